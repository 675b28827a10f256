package main

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/link/loopback"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// tenant is the TCP of one endpoint. The module's lock guards it.
type tenant struct {
	module     *module
	id         uint64
	generation uint64
	kept       bool // named since BEGIN
	stack      *stack.Stack
	device     *os.File
	sockets    map[uint64]*socket // by id
	last       uint64             // id that was given to a connection
	ports      uint16
	done       protocol.Stats // of connections that are over
}

// socket is one that is bound, a listener, or a connection.
type socket struct {
	kind          uint32
	local, remote netip.AddrPort
	listens       *gonet.TCPListener
	listener      uint64 // whose connection it is
	connection    *connection
	program       int // the program's end of its pair until the agent has it, or -1
}

const device, itself tcpip.NICID = 1, 2

func newTenant(m *module, asked *protocol.Tenant, file *os.File) (*tenant, error) {
	t := &tenant{
		module: m, id: asked.Head.Tenant, generation: asked.Generation, kept: true, device: file,
		sockets: map[uint64]*socket{}, last: protocol.IDOfModule, ports: 32768,
	}
	t.stack = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
	})
	link := channel.New(512, asked.MTU, "")
	link.LinkEPCapabilities = stack.CapabilityRXChecksumOffload // receive looks at them
	for id, to := range map[tcpip.NICID]stack.LinkEndpoint{device: link, itself: loopback.New()} {
		if err := t.stack.CreateNIC(id, to); err != nil {
			return nil, errors.New(err.String())
		}
	}
	for addr, nic := range map[netip.Addr]tcpip.NICID{
		netip.AddrFrom4(asked.Address4): device, netip.AddrFrom16(asked.Address6): device,
		netip.MustParseAddr("127.0.0.1"): itself, netip.IPv6Loopback(): itself,
	} {
		at := tcpip.ProtocolAddress{Protocol: familyOf(addr), AddressWithPrefix: toAddress(addr).WithPrefix()}
		if err := t.stack.AddProtocolAddress(nic, at, stack.AddressProperties{}); err != nil {
			return nil, errors.New(err.String())
		}
	}
	t.stack.SetRouteTable([]tcpip.Route{
		{Destination: toAddress(netip.MustParseAddr("127.0.0.1")).WithPrefix().Subnet(), NIC: itself},
		{Destination: header.IPv6Loopback.WithPrefix().Subnet(), NIC: itself},
		{Destination: header.IPv4EmptySubnet, NIC: device},
		{Destination: header.IPv6EmptySubnet, NIC: device},
	})
	go t.receive(link)
	go t.transmit(link, asked)
	return t, nil
}

// Each packet has these before it: struct virtio_net_hdr and an Ethernet header.
const vnet, before = 10, 10 + header.EthernetMinimumSize

// receive has the stack read what is TCP of the packets that come, until the device is closed.
func (t *tenant) receive(link *channel.Endpoint) {
	buf := make([]byte, before+65536)
	for {
		n, err := t.device.Read(buf)
		if err != nil {
			return
		}
		if n <= before {
			continue
		}
		ip, family := buf[before:n], tcpip.NetworkProtocolNumber(binary.BigEndian.Uint16(buf[before-2:]))
		// VIRTIO_NET_HDR_F_NEEDS_CSUM or _DATA_VALID: the kernel vouches for the checksum.
		if !isTCP(ip, family, buf[0] != 0) {
			continue
		}
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(ip)})
		link.InjectInbound(family, pkt)
		pkt.DecRef()
	}
}

// isTCP reports whether a packet is a whole segment of TCP, with the right checksum unless somebody
// vouches for it.
func isTCP(ip []byte, family tcpip.NetworkProtocolNumber, vouched bool) bool {
	var from, to tcpip.Address
	var segment header.TCP
	switch v4, v6 := header.IPv4(ip), header.IPv6(ip); {
	case family == header.IPv4ProtocolNumber && v4.IsValid(len(ip)) && v4.Protocol() == uint8(header.TCPProtocolNumber) && !v4.More() && v4.FragmentOffset() == 0:
		from, to, segment = v4.SourceAddress(), v4.DestinationAddress(), v4.Payload()
	case family == header.IPv6ProtocolNumber && v6.IsValid(len(ip)) && v6.NextHeader() == uint8(header.TCPProtocolNumber):
		from, to, segment = v6.SourceAddress(), v6.DestinationAddress(), v6.Payload()
	default:
		return false
	}
	if len(segment) < header.TCPMinimumSize || int(segment.DataOffset()) < header.TCPMinimumSize || int(segment.DataOffset()) > len(segment) {
		return false
	}
	data := segment.Payload()
	return vouched || segment.IsChecksumValid(from, to, checksum.Checksum(data, 0), uint16(len(data)))
}

// transmit writes what the stack sends, all of it to the gateway.
func (t *tenant) transmit(link *channel.Endpoint, asked *protocol.Tenant) {
	frame := make([]byte, before, before+int(asked.MTU))
	copy(frame[vnet:], asked.Gateway[:])
	copy(frame[vnet+6:], asked.MAC[:])
	for {
		pkt := link.ReadContext(context.Background())
		if pkt == nil {
			return
		}
		binary.BigEndian.PutUint16(frame[before-2:], uint16(pkt.NetworkProtocolNumber))
		view := pkt.ToView()
		_, _ = t.device.Write(append(frame, view.AsSlice()...)) // TCP sends it again
		view.Release()
		pkt.DecRef()
	}
}

// hear serves a message that is about the tenant.
func (t *tenant) hear(head, answer protocol.Head, b []byte, fd int) error {
	var err error
	s := t.sockets[head.ID]
	switch head.Type {
	case protocol.TypeTenantGone:
		delete(t.module.tenants, t.id)
		t.end()
	case protocol.TypeBind:
		asked, perr := protocol.Parse[protocol.Bind](b)
		if perr != nil {
			return perr
		}
		at, err := t.bind(head.ID, asked.Address.AddrPort())
		t.named(answer, at, err)
		return nil
	case protocol.TypeListen:
		asked, perr := protocol.Parse[protocol.Listen](b)
		if perr != nil {
			return perr
		}
		at, err := t.listen(head.ID, asked.Address.AddrPort())
		t.named(answer, at, err)
		return nil
	case protocol.TypeConnect:
		asked, perr := protocol.Parse[protocol.Connect](b)
		if perr != nil {
			return perr
		}
		go t.connect(answer, &asked, fd)
		return nil
	case protocol.TypeSet:
	case protocol.TypeInfo:
		if s != nil {
			info := s.info(answer)
			send(t.module, &info, -1)
			return nil
		}
		err = unix.ENOENT
	case protocol.TypeList:
		for id, s := range t.sockets {
			info := s.info(protocol.Head{Type: protocol.TypeListed, Tag: head.Tag, Tenant: t.id, ID: id})
			send(t.module, &info, -1)
		}
	case protocol.TypeClose:
		if s == nil {
			err = unix.ENOENT
			break
		}
		t.close(head.ID, s)
	default:
		err = unix.EINVAL
	}
	answer.Error = errnoOf(err)
	send(t.module, &protocol.Plain{Head: answer}, -1)
	return nil
}
