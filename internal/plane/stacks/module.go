package stacks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/stack"
)

// programs are the modules' by what they run, and their files in an agent's state directory.
var programs = map[stack.Kind]struct{ name, socket, log string }{
	stack.Smoltcp:  {"heddle-stack", "stack.sock", "stack.log"},
	stack.Netstack: {"heddle-netstack", "netstack.sock", "netstack.log"},
}

// Kinds are the stacks that modules of Heddle's run; others are the operator's own (own.go).
var Kinds = []stack.Kind{stack.Smoltcp, stack.Netstack}

// StateFiles gives the modules' files in an agent's state directory.
func StateFiles() (files []string) {
	for _, kind := range Kinds {
		files = append(files, programs[kind].socket, programs[kind].log)
	}
	return append(files, ownFolder)
}

func program(kind stack.Kind, self, stateDir string) process.Program {
	// It has the network that it is given by devices, and no other. Names of its Unix sockets are
	// nobody's.
	f := programs[kind]
	return process.Program{Name: f.name, Self: self, Socket: filepath.Join(stateDir, f.socket), Log: filepath.Join(stateDir, f.log), OwnNetns: true}
}

// Arguments are those that the agent with this state directory starts a module with.
func Arguments(kind stack.Kind, stateDir string) []string {
	return program(kind, "", stateDir).Arguments()
}

// FindProgram gives a module's path, looking beside the program self first.
func FindProgram(kind stack.Kind, self string) (string, error) { return program(kind, self, "").Find() }

// module is one that runs, or is to run, the TCP of its tenants.
type module struct {
	kind stack.Kind
	name string        // the program's
	wake chan struct{} // of run: there is a tenant

	// Guarded by Plane.mu.
	link   *link           // that has been told of all tenants; nil: none
	there  chan struct{}   // closed when there is one
	failed error           // why the last try to have one failed; nil: it did not
	ended  uint64          // how many have
	drains *api.StackDrain // nil: the module is of the build that is installed
}

func newModules() map[stack.Kind]*module {
	all := map[stack.Kind]*module{}
	for _, kind := range Kinds {
		all[kind] = newModule(kind, programs[kind].name)
	}
	return all
}

func newModule(kind stack.Kind, name string) *module {
	return &module{kind: kind, name: name, wake: make(chan struct{}, 1), there: make(chan struct{})}
}

// moduleOf gives what runs a stack, nil if no module does. One of the operator's own begins to be
// kept here.
func (p *Plane) moduleOf(kind stack.Kind) *module {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.modules[kind]
	if name, own := kind.Module(); m == nil && own {
		m = newModule(kind, name)
		p.modules[kind] = m
		if p.runs != nil {
			p.runs(m)
		}
	}
	return m
}

// allModules gives them by name.
func (p *Plane) allModules() []*module {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.SortedFunc(maps.Values(p.modules), func(a, b *module) int { return cmp.Compare(a.kind, b.kind) })
}

// wakeUp says that there is a tenant.
func (m *module) wakeUp() {
	select {
	case m.wake <- struct{}{}:
	default: // it is awake
	}
}

// failure gives why there is no module although one was tried for; nil if there is one, or nobody
// has wanted one.
func (p *Plane) failure(kind stack.Kind) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m := p.modules[kind]; m != nil {
		return m.failed
	}
	return nil
}

// current gives the connection to a module, nil if there is none.
func (p *Plane) current(m *module) *link {
	p.mu.Lock()
	defer p.mu.Unlock()
	return m.link
}

// await gives the connection to a module, or waits for one that is being started.
func (p *Plane) await(ctx context.Context, m *module) (*link, error) {
	ctx, cancel := context.WithTimeout(ctx, moduleStarts)
	defer cancel()
	for {
		p.mu.Lock()
		l, there := m.link, m.there
		p.mu.Unlock()
		if l != nil {
			return l, nil
		}
		select {
		case <-there:
		case <-ctx.Done():
			return nil, errNoModule
		}
	}
}

var errNoModule = errors.New("there is no stack module")

// tenantsOf gives a module's.
func (p *Plane) tenantsOf(m *module) (all []*tenant) {
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
func (p *Plane) reached() map[*tenant]*link {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[*tenant]*link{}
	for _, t := range p.tenants {
		if t.module.link != nil {
			out[t] = t.module.link
		}
	}
	return out
}

// Run keeps modules for the endpoints that want them, until ctx ends. The modules live on.
func (p *Plane) Run(ctx context.Context) error {
	p.adoptOwn()
	var running sync.WaitGroup
	p.mu.Lock()
	p.runs = func(m *module) { running.Go(func() { p.run(ctx, m) }) }
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

// run keeps a module.
func (p *Plane) run(ctx context.Context, m *module) {
	// One that runs for endpoints that there are no more has to hear of that.
	l, err := process.Adopt(p.program(m.kind).Socket, p.dial(m))
	for pause := firstPause; ; {
		if l == nil {
			if !p.awaitTenant(ctx, m) {
				return
			}
			l, err = p.reach(m)
		}
		began, ran := time.Now(), l != nil
		if ran {
			err = p.serve(ctx, m, l)
			l = nil
		}
		if ctx.Err() != nil {
			return
		}
		p.fault(m.name, err)
		p.mu.Lock()
		was := m.failed
		if m.failed = err; ran {
			m.failed = nil // it is there again before anybody is to have another stack
			m.ended++
		}
		changed := (was == nil) != (m.failed == nil)
		p.mu.Unlock()
		if changed {
			p.cfg.StacksChanged()
		}
		if time.Since(began) > wellFor {
			pause = firstPause
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
			pause = min(2*pause, lastPause)
		}
	}
}

// awaitTenant waits until an endpoint wants a module; false: ctx has ended before.
func (p *Plane) awaitTenant(ctx context.Context, m *module) bool {
	for {
		if len(p.tenantsOf(m)) > 0 {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-m.wake:
		}
	}
}

// serve tells the module of all its tenants and hears it until it ends.
func (p *Plane) serve(ctx context.Context, m *module, l *link) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, l.Close)()
	defer l.Close()
	var heard error
	ended := make(chan struct{}) // closed once heard is why nothing more is
	go func() {
		heard = p.hear(l)
		close(ended)
		l.Close() // nobody waits for an answer any more
	}()
	defer func() { l.Close(); <-ended }()
	err := p.meet(ctx, m, l)
	if err == nil {
		// What was forbidden while no agent ran.
		if _, err := p.CutForbidden(); err != nil {
			p.cfg.Log.Warn("connections that are forbidden may be alive", "err", err)
		}
		err = p.probe(ctx, m, l, ended)
		p.setLink(m, nil)
	}
	if err == nil {
		err = heard
	}
	if errors.Is(err, io.EOF) || errors.Is(err, process.ErrGone) {
		err = fmt.Errorf("%s, process %d, has ended, or lost a tenant; it is reached or started again", m.name, l.PID)
	}
	return err
}

// setLink says that l leads to the module from now on; nil: there is none.
func (p *Plane) setLink(m *module, l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	m.link, m.drains = l, nil
	if l == nil {
		m.there = make(chan struct{})
		return
	}
	if m.failed != nil {
		m.failed = nil
		p.cfg.StacksChanged()
	}
	close(m.there)
	if p.cfg.Faults.Clear(FaultModule, m.name) {
		p.cfg.Log.Info("stack module is there again", "module", m.name, "pid", l.PID)
	}
}

// probe asks the module again and again whether it answers, until it has ended; nil then. One that
// hangs is ended.
func (p *Plane) probe(ctx context.Context, m *module, l *link, ended <-chan struct{}) error {
	tick := time.NewTicker(statsEvery)
	defer tick.Stop()
	var runs build
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ended:
			return nil
		case <-tick.C:
		}
		q := protocol.Plain{Head: protocol.Head{Type: protocol.TypeStats}}
		limit, cancel := context.WithTimeout(ctx, moduleAnswers)
		s, _, err := request[protocol.Plain, protocol.Stats](limit, l, &q, &q.Head, -1)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			p.why.hangs.Add()
			p.kill(m, l)
			return fmt.Errorf("%s, process %d, does not answer within %s and was killed", m.name, l.PID, moduleAnswers)
		}
		p.retireIdle(ctx, m, l)
		p.tellAgain(m, l)
		if err == nil {
			if err := p.renew(m, l, &runs, &s); err != nil {
				<-ended // until then it could be reached once more
				return err
			}
		}
	}
}

// meet makes acquaintance with a module, which may know some of what it is told.
func (p *Plane) meet(ctx context.Context, m *module, l *link) error {
	limit, cancel := context.WithTimeout(ctx, process.Answers)
	defer cancel()
	hello := protocol.Hello{Head: protocol.Head{Type: protocol.TypeHello}, Version: protocol.Version}
	its, _, err := request[protocol.Hello, protocol.Hello](limit, l, &hello, &hello.Head, -1)
	if err != nil {
		return fmt.Errorf("meet %s, process %d: %w", m.name, l.PID, err)
	}
	p.cfg.Log.Info("stack module is there", "name", strings.TrimRight(string(its.Name[:]), "\x00"), "pid", l.PID)
	p.announce.Lock()
	defer p.announce.Unlock()
	if its.Features&protocol.CanTellSent != 0 {
		l.tellsSent.Store(true)
		send(l, &protocol.Plain{Head: protocol.Head{Type: protocol.TypeTellSent}})
	}
	send(l, &protocol.Plain{Head: protocol.Head{Type: protocol.TypeBegin}})
	for _, t := range p.tenantsOf(m) {
		p.tell(l, t)
		if err := p.closeStrays(limit, l, t); err != nil {
			return fmt.Errorf("sockets of %s, process %d: %w", m.name, l.PID, err)
		}
	}
	send(l, &protocol.Plain{Head: protocol.Head{Type: protocol.TypeEnd}})
	p.setLink(m, l) // before an endpoint that is attached now asks whether there is one
	return nil
}
