package stacks

import (
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/stacks/socket"
)

// maxCutting bounds of how many connections of a tenant it is remembered that the plane ends them.
const maxCutting = 4096

// observe says what became of a connection of a tenant.
func (p *Plane) observe(t *tenant, event flow.Event, id uint64, local, remote netip.AddrPort, change func(*flow.Observation)) {
	if p.cfg.Observe == nil {
		return
	}
	o := flow.Observation{At: time.Now(), Event: event, Connection: model.Connection{
		Endpoint: t.ID, Path: Path, Local: local, Remote: remote, Cookie: cookieOf(t.ID, id),
	}}
	if change != nil {
		change(&o)
	}
	p.cfg.Observe(o)
}

// cookieOf names a connection among those of the node: the kernel's cookies have no such bit.
func cookieOf(e model.EndpointID, id uint64) uint64 { return 1<<63 | uint64(e)<<40 ^ id }

// tellConnect says what became of a connect.
func (p *Plane) tellConnect(t *tenant, n *socket.Note, o *outgoing) {
	local, remote := o.local.AddrPort(), n.Remote.AddrPort()
	if o.errno == 0 {
		p.observe(t, flow.Open, n.ID, local, remote, nil)
		return
	}
	p.observe(t, flow.Fail, n.ID, netip.AddrPort{}, remote, func(f *flow.Observation) { f.Error = unix.ErrnoName(o.errno) })
}

// tellEnded says that a connection is over.
func (p *Plane) tellEnded(t *tenant, i *protocol.Info) {
	event, reason := flow.End, ""
	if t.wasCut(i.Head.ID) {
		event, reason = flow.Cut, reasonCut.Name
	}
	p.observe(t, event, i.Head.ID, i.Local.AddrPort(), i.Remote.AddrPort(), func(o *flow.Observation) {
		c := &o.Connection
		c.Reason, c.BytesSent, c.BytesReceived, c.Retransmits = reason, i.BytesSent, i.BytesReceived, uint32(i.Retransmits)
		o.Accepted, o.RTT = i.Listener != 0, time.Duration(i.RTT)*time.Microsecond
		if i.Head.Error != 0 && event != flow.Cut {
			o.Error = unix.ErrnoName(unix.Errno(i.Head.Error))
		}
	})
}

// cuts notes that the plane ends a connection, so that its end is told as that.
func (t *tenant) cuts(id uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.cutting == nil || len(t.cutting) >= maxCutting { // of a module that never said that they ended
		t.cutting = make(map[uint64]struct{})
	}
	t.cutting[id] = struct{}{}
}

func (t *tenant) wasCut(id uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, was := t.cutting[id]
	delete(t.cutting, id)
	return was
}

// RunsTCPOf reports whether a module runs the TCP of an endpoint.
func (p *Plane) RunsTCPOf(id model.EndpointID) bool {
	t := p.tenantOf(id)
	return t != nil && t.active.Load()
}
