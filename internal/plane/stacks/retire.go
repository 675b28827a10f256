package stacks

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// retireIdle ends tenants whose profile says otherwise by now, once nothing is left of theirs at
// the module. Until then what is TCP goes to the module, so that processes with the container's
// own stack have none.
func (p *Plane) retireIdle(ctx context.Context, m *module, l *link) {
	for _, t := range p.tenantsOf(m) {
		if t.active.Load() || !t.idle() {
			continue
		}
		q := protocol.Plain{Head: t.head(protocol.TypeStats, 0)}
		s, _, err := request[protocol.Plain, protocol.Stats](ctx, l, &q, &q.Head, -1)
		if errors.Is(err, unix.ENODEV) || err == nil && s.Sockets == 0 && s.Connections == s.TimeWait {
			p.retire(l, t, &s)
		}
	}
}

// idle reports whether the plane has nothing of a tenant, nor is asked for anything.
func (t *tenant) idle() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, o := range t.outgoing {
		if !o.over() {
			return false
		}
	}
	return len(t.held) == 0
}

func (p *Plane) retire(l *link, t *tenant, s *protocol.Stats) {
	p.announce.Lock()
	defer p.announce.Unlock()
	if t.active.Load() || p.tenantOf(t.ID) != t {
		return
	}
	t.count(l.pid, s)
	p.mu.Lock()
	delete(p.tenants, t.ID)
	p.retired[t.ID] = t.countedBefore()
	p.mu.Unlock()
	if err := p.giveUp(l, t); err != nil {
		p.cfg.Log.Error("an endpoint does not get its TCP back from the stack module", "endpoint", t.Name, "err", err)
		return
	}
	p.cfg.Log.Info("nothing of an endpoint is left at the stack module", "endpoint", t.Name)
}

// giveUp ends what there is of a tenant; l may be nil. The caller holds announce.
func (p *Plane) giveUp(l *link, t *tenant) error {
	t.end()
	if l != nil {
		m := protocol.Plain{Head: t.head(protocol.TypeTenantGone, 0)}
		ctx, cancel := context.WithTimeout(p.ctx, moduleAnswers)
		defer cancel()
		_, _, _ = request[protocol.Plain, protocol.Plain](ctx, l, &m, &m.Head, -1) // or it goes with the next END
	}
	p.cfg.Faults.Clear(FaultModule, t.Name)
	return p.cfg.StackModules.LeaveStackDevice(t.Endpoint)
}

// countedOf gives what was counted for an endpoint that is no tenant any more.
func (p *Plane) countedOf(id model.EndpointID) model.Traffic {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.retired[id]
}
