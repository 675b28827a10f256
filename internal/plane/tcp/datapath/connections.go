package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/lockwait"
	"heddle.dev/heddle/internal/plane/tcp/names"
)

// Connections lists the TCP sockets of this node's endpoints, listeners too. It must run in the
// node's network namespace. The list is not atomic: connections that come and go while it runs may
// be missing.
func (d *Datapath) Connections() ([]model.Connection, error) {
	raw, err := d.listRecords()
	if err != nil {
		return nil, err
	}
	return parseConnections(raw)
}

// listRecords gives the sockets of this node's endpoints, also while the pass over them is stuck.
func (d *Datapath) listRecords() ([]byte, error) {
	raw, err := d.iterate("list", d.objs.List)
	if errors.Is(err, lockwait.ErrStuck) {
		raw, err = d.iterateUnlocked(d.objs.ListUnlocked)
	}
	if err != nil {
		return nil, fmt.Errorf("list connections: %w", err)
	}
	return raw, nil
}

// IDsInUse gives the endpoint ids that sockets of this node carry. It sees the sockets that
// Connections can: not those that were never bound nor connected.
func (d *Datapath) IDsInUse() (map[model.EndpointID]bool, error) {
	raw, err := d.listRecords()
	if err != nil {
		return nil, err
	}
	ids := make(map[model.EndpointID]bool)
	err = eachRecord(raw, func(r *heddleConnectionRecord) { ids[model.EndpointID(r.Tag.EndpointId)] = true })
	return ids, err
}

func parseConnections(raw []byte) ([]model.Connection, error) {
	out := make([]model.Connection, 0, len(raw)/binary.Size(heddleConnectionRecord{}))
	err := eachRecord(raw, func(r *heddleConnectionRecord) {
		if r.Tag.Path != uint8(heddleHeddlePathPATH_NONE) || r.State == tcpListen {
			out = append(out, toConnection(r))
		}
	})
	return out, err
}

func eachRecord[T heddleConnectionRecord | heddleSocketOwnerRecord | heddleSocketRecord](raw []byte, f func(*T)) error {
	var rec T
	size := binary.Size(rec)
	if len(raw)%size != 0 {
		return fmt.Errorf("socket iterator: %d bytes are no whole number of records of %d", len(raw), size)
	}
	for r := bytes.NewReader(raw); r.Len() > 0; {
		if err := binary.Read(r, binary.NativeEndian, &rec); err != nil {
			return fmt.Errorf("socket iterator: %w", err)
		}
		f(&rec)
	}
	return nil
}

const tcpClosed, tcpListen = 7, 10

// tcpStates names the kernel's TCP states, by number (include/net/tcp_states.h).
var tcpStates = []string{"", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT",
	"CLOSE", "CLOSE_WAIT", "LAST_ACK", "LISTEN", "CLOSING", "NEW_SYN_RECV"}

// toConnection applies to a record what sock/names.bpf.c does for a program: where the tag has an
// address or a port, that is what the program sees.
func toConnection(rec *heddleConnectionRecord) model.Connection {
	tag := &rec.Tag
	c := model.Connection{
		Endpoint:      model.EndpointID(tag.EndpointId),
		NodeLocal:     netip.AddrPortFrom(toAddr(rec.NodeLocal), toPort(rec.NodeLocalPort)),
		NodeRemote:    netip.AddrPortFrom(toAddr(rec.NodeRemote), toPort(rec.NodeRemotePort)),
		Path:          names.PathOf(tag.Path),
		BytesSent:     rec.BytesSent,
		BytesReceived: rec.BytesReceived,
		ReceiveQueue:  rec.ReceiveQueue,
		SendQueue:     rec.SendQueue,
		Retransmits:   rec.Retransmits,
		Cookie:        rec.Cookie,
	}
	if int(rec.State) < len(tcpStates) {
		c.State = tcpStates[rec.State]
	}
	if tag.Reason != 0 {
		c.Reason = names.Reason(tag.Reason).String()
	}
	c.Local, c.Remote = c.NodeLocal, c.NodeRemote
	flags := heddleSockTagFlags(tag.Flags)
	switch {
	// A wildcard of the node, too: of a listener that was never bound.
	case flags&heddleSockTagFlagsTAG_WILD != 0 && rec.NodeRemotePort == 0 || c.NodeLocal.Addr().IsUnspecified():
		any := netip.IPv4Unspecified()
		if rec.Family == 10 {
			any = netip.IPv6Unspecified()
		}
		c.Local = netip.AddrPortFrom(any, c.NodeLocal.Port())
	case flags&heddleSockTagFlagsTAG_LOCAL != 0:
		c.Local = shown(toAddr(tag.Local), tag.LocalPort, c.NodeLocal.Port())
	}
	if flags&heddleSockTagFlagsTAG_REMOTE != 0 {
		c.Remote = shown(toAddr(tag.Remote), tag.RemotePort, c.NodeRemote.Port())
	}
	if rec.State == tcpListen {
		c.Path, c.Remote, c.NodeRemote = model.PathListen, netip.AddrPort{}, netip.AddrPort{}
	}
	return c
}

func shown(a netip.Addr, portBE, kernelPort uint16) netip.AddrPort {
	if portBE != 0 {
		return netip.AddrPortFrom(a, toPort(portBE))
	}
	return netip.AddrPortFrom(a, kernelPort)
}
