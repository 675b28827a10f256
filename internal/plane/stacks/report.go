package stacks

import (
	"context"
	"fmt"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// stateNames are the states of connections, by the number that TCP_INFO has.
var stateNames = []string{
	1: "ESTABLISHED", 2: "SYN_SENT", 3: "SYN_RECV", 4: "FIN_WAIT1", 5: "FIN_WAIT2", 6: "TIME_WAIT", 7: "CLOSE", 8: "CLOSE_WAIT", 9: "LAST_ACK", 10: "LISTEN", 11: "CLOSING",
}

// Connections implements plane.Reports: those that the module has.
func (p *Plane) Connections() ([]model.Connection, error) {
	p.mu.Lock()
	l := p.module
	all := make([]*tenant, 0, len(p.tenants))
	for _, t := range p.tenants {
		all = append(all, t)
	}
	p.mu.Unlock()
	if l == nil {
		return nil, nil // connections end with the module
	}
	ctx, cancel := context.WithTimeout(p.ctx, moduleAnswers)
	defer cancel()
	var out []model.Connection
	for _, t := range all {
		sockets, err := l.socketsOf(ctx, t)
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
