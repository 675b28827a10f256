package stacks

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/trap"
)

// retireIdle ends tenants whose profile says otherwise by now, once nothing is left of theirs at
// the module. Until then what is TCP goes to the module, so that processes with the container's
// own stack have none, and another module has to wait.
func (p *Plane) retireIdle(ctx context.Context, m *module.Module, l *module.Link) {
	for _, t := range p.tenantsOf(m) {
		if !t.stays() {
			p.announce.Lock()
			p.retireUnused(ctx, l, t)
			p.announce.Unlock()
		}
	}
}

// retireUnused ends a tenant if nothing is left of it at the module. The caller holds announce.
func (p *Plane) retireUnused(ctx context.Context, l *module.Link, t *tenant) {
	if t.stays() || !t.idle() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, module.Answers)
	defer cancel()
	s, err := l.Stats(ctx, t.number())
	if errors.Is(err, unix.ENODEV) || err == nil && s.Sockets == 0 && s.Connections == s.TimeWait {
		p.retire(l, t, &s)
	}
}

// stays reports whether the tenant has the module that its profile says.
func (t *tenant) stays() bool { return t.active.Load() && t.inPlace() == nil }

// idle reports whether the plane has nothing of a tenant, nor is asked for anything.
func (t *tenant) idle() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.unused()
}

// unused is idle. The tenant's lock is held.
func (t *tenant) unused() bool {
	for _, o := range t.outgoing {
		if !o.over() {
			return false
		}
	}
	return len(t.held) == 0 && t.calls == 0
}

// startCall notes a call of a tenant's, which has the tenant stay; false: it is over.
func (t *tenant) startCall() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.gone {
		t.calls++
	}
	return !t.gone
}

func (t *tenant) endCall() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.calls--
}

// startCall finds whose a call is, has that tenant stay, and waits until its module has been told
// of it: a call whose tenant has just been retired is the next one's.
func (p *Plane) startCall(t *tenant) (*tenant, error) {
	for !t.startCall() {
		p.announce.Lock() // who has ended it holds it until there is a next one
		t = p.tenantOf(t.ID)
		p.announce.Unlock()
		switch {
		case p.ctx.Err() != nil:
			return nil, trap.ErrAgentEnds
		case t == nil:
			return nil, module.ErrNone
		}
	}
	select {
	case <-t.begun:
		return t, nil
	case <-p.ctx.Done():
		t.endCall()
		return nil, trap.ErrAgentEnds
	}
}

// retire ends a tenant unless a call has come meanwhile. If its profile says another module, it is
// that one's from then on. The caller holds announce.
func (p *Plane) retire(l *module.Link, t *tenant, s *protocol.Stats) {
	t.mu.Lock()
	unused := t.unused()
	t.gone = t.gone || unused
	t.mu.Unlock()
	if !unused || p.tenantOf(t.ID) != t {
		return
	}
	t.count(l.PID, s)
	p.mu.Lock()
	delete(p.tenants, t.ID)
	p.retired[t.ID] = t.countedBefore()
	next := p.wantedTenant(t.Endpoint) // at no moment are new sockets the kernel's then
	p.mu.Unlock()
	if next != nil {
		defer p.begin(next)
	}
	if err := p.giveUp(l, t); err != nil {
		p.cfg.Log.Error("an endpoint does not get its TCP back from the stack module", "endpoint", t.Name, "err", err)
		return
	}
	p.cfg.Log.Info("nothing of an endpoint is left at the stack module", "endpoint", t.Name, "module", t.module.Name)
}

// giveUp ends what there is of a tenant; l may be nil. The caller holds announce.
func (p *Plane) giveUp(l *module.Link, t *tenant) error {
	t.end()
	if l != nil {
		m := protocol.Plain{Head: t.head(protocol.TypeTenantGone, 0)}
		ctx, cancel := context.WithTimeout(p.ctx, module.Answers)
		defer cancel()
		_, _, _ = module.Request[protocol.Plain, protocol.Plain](ctx, l, &m, &m.Head, -1) // or it goes with the next END
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
