package stacks

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/stack"
)

// owner is the plane as its modules know it.
type owner struct{ *Plane }

var _ module.Owner = owner{}

// Run keeps modules for the endpoints that want them, until ctx ends. The modules live on.
func (p *Plane) Run(ctx context.Context) error {
	for _, kind := range p.cfg.Ran() {
		p.moduleOf(kind)
	}
	var running sync.WaitGroup
	p.mu.Lock()
	p.runs = func(m *module.Module) { running.Go(func() { m.Keep(ctx) }) }
	for _, m := range p.modules {
		p.runs(m)
	}
	p.mu.Unlock()
	p.lookForOwn(ctx)
	p.mu.Lock()
	p.runs = nil // those that come now are the next agent's
	p.mu.Unlock()
	running.Wait()
	return nil
}

// newModule gives one that is not kept yet.
func (p *Plane) newModule(kind stack.Kind) *module.Module {
	return module.New(kind, &p.cfg.Config, owner{p})
}

// moduleOf gives what runs a stack, nil if no module does. One of the operator's own begins to be
// kept here.
func (p *Plane) moduleOf(kind stack.Kind) *module.Module {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.modules[kind]
	if _, own := kind.Module(); m == nil && own {
		m = p.newModule(kind)
		p.modules[kind] = m
		if p.runs != nil {
			p.runs(m)
		}
	}
	return m
}

// allModules gives them by name.
func (p *Plane) allModules() []*module.Module {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.SortedFunc(maps.Values(p.modules), func(a, b *module.Module) int { return cmp.Compare(a.Kind, b.Kind) })
}

// tenantsOf gives a module's.
func (p *Plane) tenantsOf(m *module.Module) (all []*tenant) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.tenants {
		if t.module == m {
			all = append(all, t)
		}
	}
	return all
}

// reached gives the tenants whose module is there, and what leads to it: connections of others have
// ended with theirs.
func (p *Plane) reached() map[*tenant]*module.Link {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[*tenant]*module.Link{}
	for _, t := range p.tenants {
		if l := t.module.Current(); l != nil {
			out[t] = l
		}
	}
	return out
}

// Wants implements module.Owner.
func (p owner) Wants(m *module.Module) bool { return len(p.tenantsOf(m)) > 0 }

// Meet implements module.Owner.
func (p owner) Meet(ctx context.Context, m *module.Module, l *module.Link) error {
	p.announce.Lock()
	defer p.announce.Unlock()
	module.Send(l, &protocol.Plain{Head: protocol.Head{Type: protocol.TypeBegin}})
	for _, t := range p.tenantsOf(m) {
		p.tell(l, t)
		if err := p.closeStrays(ctx, l, t); err != nil {
			return fmt.Errorf("sockets of %s, process %d: %w", m.Name, l.PID, err)
		}
	}
	module.Send(l, &protocol.Plain{Head: protocol.Head{Type: protocol.TypeEnd}})
	m.SetLink(l) // before an endpoint that is attached now asks whether there is one
	return nil
}

// Met implements module.Owner: it ends what was forbidden while no agent ran.
func (p owner) Met() {
	if _, err := p.CutForbidden(); err != nil {
		p.cfg.Log.Warn("connections that are forbidden may be alive", "err", err)
	}
}

// Hear implements module.Owner.
func (p owner) Hear(l *module.Link) error { return p.hear(l) }

// Tend implements module.Owner.
func (p owner) Tend(ctx context.Context, m *module.Module, l *module.Link) {
	p.retireIdle(ctx, m, l)
	p.tellAgain(m, l)
}

// Fault implements module.Owner.
func (p owner) Fault(name string, err error) { p.fault(name, err) }

// NoFault implements module.Owner.
func (p owner) NoFault(name string) bool { return p.cfg.Faults.Clear(FaultModule, name) }

// Hangs implements module.Owner.
func (p owner) Hangs() { p.why.hangs.Add() }

// Changed implements module.Owner.
func (p owner) Changed() { p.cfg.StacksChanged() }
