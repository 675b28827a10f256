package stacks

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// stateNames are the states of connections, by the number that TCP_INFO has.
var stateNames = []string{
	1: "ESTABLISHED", 2: "SYN_SENT", 3: "SYN_RECV", 4: "FIN_WAIT1", 5: "FIN_WAIT2", 6: "TIME_WAIT", 7: "CLOSE", 8: "CLOSE_WAIT", 9: "LAST_ACK", 10: "LISTEN", 11: "CLOSING",
}

// counted is what was counted for a tenant; guarded by tenant.mu.
type counted struct {
	module int           // the process that counted last
	before model.Traffic // by modules that have ended
	last   model.Traffic // by all
}

// Traffic implements plane.Reports: what the module counted, and those before it, of which what
// nobody asked about in time is lost.
func (p *Plane) Traffic(endpoints []model.Endpoint) ([]model.Traffic, error) {
	out := make([]model.Traffic, len(endpoints))
	ctx, cancel := context.WithTimeout(p.ctx, module.Answers)
	defer cancel()
	for i, e := range endpoints {
		t := p.tenantOf(e.ID)
		if t == nil {
			out[i] = p.countedOf(e.ID)
			continue
		}
		l := t.module.Current()
		if l == nil {
			out[i] = t.countedBefore()
			continue
		}
		s, err := l.Stats(ctx, t.number())
		switch {
		case errors.Is(err, unix.ENODEV): // the module does not know of it yet
			out[i] = t.countedBefore()
		case err != nil:
			return out, fmt.Errorf("ask for the traffic of %s: %w", t.Name, err)
		default:
			out[i] = t.count(l.PID, &s)
		}
	}
	return out, nil
}

// countedBefore gives what was counted by a module that is no more.
func (t *tenant) countedBefore() model.Traffic {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := t.counted.last
	out.Live = nil
	out.Closed = out.Opened + out.Accepted
	return out
}

// count adds up what module, a process, has counted, and those before it.
func (t *tenant) count(module int, s *protocol.Stats) model.Traffic {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := &t.counted
	if c.module != module {
		c.module, c.before = module, c.last
		c.before.Live = nil
		c.before.Closed = c.before.Opened + c.before.Accepted
	}
	made := s.Connected + s.Accepted
	live := min(made, s.Connections-min(s.Connections, s.HalfOpen+s.TimeWait))
	now := model.Traffic{
		Opened: s.Connected, Accepted: s.Accepted, Failed: s.Failed, Closed: made - live, Broken: s.Reset,
		BytesSent: s.BytesSent, BytesReceived: s.BytesReceived, Retransmits: s.Retransmits,
		Live: map[model.Path]uint64{Path: live},
	}
	now.Add(c.before)
	now.RaiseTo(c.last)
	c.last = now
	return now
}

// Connections implements plane.Reports: those that the module has.
func (p *Plane) Connections() ([]model.Connection, error) {
	ctx, cancel := context.WithTimeout(p.ctx, module.Answers)
	defer cancel()
	var out []model.Connection
	for t, l := range p.reached() {
		sockets, err := l.Sockets(ctx, t.number())
		if err != nil {
			return out, fmt.Errorf("list connections of %s: %w", t.Name, err)
		}
		for _, s := range sockets {
			if s.Kind != protocol.KindBound {
				out = append(out, connectionOf(t, &s))
			}
		}
	}
	return out, nil
}

func connectionOf(t *tenant, s *protocol.Info) model.Connection {
	c := model.Connection{
		Endpoint: t.ID, State: "LISTEN", Path: model.PathListen, Local: s.Local.AddrPort(), NodeLocal: s.Local.AddrPort(),
		ReceiveQueue: s.Pending, SendQueue: s.Backlog, Cookie: s.Head.ID,
	}
	if s.Kind == protocol.KindListener {
		return c
	}
	if c.State = "CLOSE"; int(s.State) < len(stateNames) && s.State > 0 {
		c.State = stateNames[s.State]
	}
	c.Path, c.Remote, c.NodeRemote = Path, s.Remote.AddrPort(), s.Remote.AddrPort()
	c.BytesSent, c.BytesReceived, c.Retransmits = s.BytesSent, s.BytesReceived, uint32(s.Retransmits)
	c.ReceiveQueue, c.SendQueue = s.ReceiveQueue, s.SendQueue
	return c
}
