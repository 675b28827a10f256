// Package module is stack modules as processes: which programs they are, how one is found, started,
// met, asked, watched and replaced by another build. Whose TCP it runs is its Owner's affair.
//
// The goroutine that runs Keep is the only one that starts, meets and gives up a module; while one
// is there, a second one hears it. What others ask of a Module is guarded by its lock, which is
// held across no request.
package module

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/hang"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/stack"
)

const (
	// Answers bounds what a module may take for an answer that does not depend on a peer.
	Answers = 2 * time.Second
	// Starts is how long a call waits for a module that is being started.
	Starts = 2 * time.Second
	// Bounds of the pause before a module that cannot run is started again; it doubles from try to
	// try. One that ended is started again at once.
	firstPause = 100 * time.Millisecond
	lastPause  = 30 * time.Second
	// wellFor is how long a module must have run for its end to be the first of a series.
	wellFor = 5 * time.Second
	// askEvery is how often a module is asked whether it still answers.
	askEvery = time.Second
)

// ErrNone says that there is no module.
var ErrNone = errors.New("there is no stack module")

// Config is what the modules of a node are kept with.
type Config struct {
	Programs
	// Drain is how long a module of an earlier build than the one installed may have connections;
	// 0: for ever.
	Drain time.Duration
	Log   *slog.Logger
}

// Owner is whom a module is kept for.
type Owner interface {
	// Wants reports whether there is anybody whose TCP the module is to run.
	Wants(*Module) bool
	// Meet tells a module that has said HELLO of all that it is to have, and then says SetLink.
	Meet(context.Context, *Module, *Link) error
	// Met follows, on the same goroutine.
	Met()
	// Hear hears the module until it has ended; the error is why.
	Hear(*Link) error
	// Tend is called once a second while the module is there.
	Tend(context.Context, *Module, *Link)
	// Fault says that the module, by its program's name, is not there; NoFault that it is again,
	// and reports whether that is news.
	Fault(name string, err error)
	NoFault(name string) bool
	// Hangs counts a module that did not answer and was killed.
	Hangs()
	// Changed says that what Failure says has become another.
	Changed()
}

// Module is one that runs, or is to run, the TCP of its tenants.
type Module struct {
	Kind stack.Kind
	Name string // the program's

	cfg   *Config
	owner Owner
	wake  chan struct{} // of Keep: there is a tenant

	mu     sync.Mutex      // guards the rest
	link   *Link           // that has been told of all tenants; nil: none
	there  chan struct{}   // closed when there is one
	failed error           // why the last try to have one failed; nil: it did not
	ended  uint64          // how many have
	drains *api.StackDrain // nil: the module is of the build that is installed
}

// New gives the module of a stack, which is not kept yet.
func New(kind stack.Kind, cfg *Config, owner Owner) *Module {
	name, own := kind.Module()
	if !own {
		name = programs[kind].name
	}
	return &Module{Kind: kind, Name: name, cfg: cfg, owner: owner, wake: make(chan struct{}, 1), there: make(chan struct{})}
}

// WakeUp says that there is a tenant.
func (m *Module) WakeUp() {
	select {
	case m.wake <- struct{}{}:
	default: // it is awake
	}
}

// Failure gives why there is no module although one was tried for; nil if there is one, or nobody
// has wanted one, of which m may be nil.
func (m *Module) Failure() error {
	if m == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.failed
}

// Current gives the connection to the module, nil if there is none.
func (m *Module) Current() *Link {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.link
}

// State gives the connection, nil if there is none, how many processes have ended, and how long the
// one that runs drains, nil if it does not.
func (m *Module) State() (l *Link, ended uint64, drains *api.StackDrain) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.link, m.ended, m.drains
}

// Await gives the connection to the module, or waits for one that is being started.
func (m *Module) Await(ctx context.Context) (*Link, error) {
	ctx, cancel := context.WithTimeout(ctx, Starts)
	defer cancel()
	for {
		m.mu.Lock()
		l, there := m.link, m.there
		m.mu.Unlock()
		if l != nil {
			return l, nil
		}
		select {
		case <-there:
		case <-ctx.Done():
			return nil, ErrNone
		}
	}
}

// SetLink says that l leads to the module from now on; nil: there is none.
func (m *Module) SetLink(l *Link) {
	m.mu.Lock()
	failed := m.failed
	if m.link, m.drains = l, nil; l == nil {
		m.there = make(chan struct{})
		m.mu.Unlock()
		return
	}
	m.failed = nil
	close(m.there)
	m.mu.Unlock()
	if failed != nil {
		m.owner.Changed()
	}
	if m.owner.NoFault(m.Name) {
		m.cfg.Log.Info("stack module is there again", "module", m.Name, "pid", l.PID)
	}
}

// Keep keeps the module for as long as anybody wants it, until ctx ends. It lives on.
func (m *Module) Keep(ctx context.Context) {
	var log sync.WaitGroup
	defer log.Wait()
	log.Go(func() { m.cfg.program(m.Kind).BoundLog(ctx, m.cfg.Log) })
	// One that runs for endpoints that there are no more has to hear of that.
	l, err := m.cfg.adopt(m.Kind)
	for pause := firstPause; ; {
		if l == nil {
			if !m.awaitTenant(ctx) {
				return
			}
			l, err = m.cfg.reach(m.Kind)
		}
		began, ran := time.Now(), l != nil
		if ran {
			err = m.serve(ctx, l)
			l = nil
		}
		if ctx.Err() != nil {
			return
		}
		m.owner.Fault(m.Name, err)
		m.gone(ran, err)
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

// gone notes why there is none: one that ran is there again before anybody is to have another
// stack.
func (m *Module) gone(ran bool, err error) {
	m.mu.Lock()
	was := m.failed
	if m.failed = err; ran {
		m.failed = nil
		m.ended++
	}
	changed := (was == nil) != (m.failed == nil)
	m.mu.Unlock()
	if changed {
		m.owner.Changed()
	}
}

// awaitTenant waits until an endpoint wants the module; false: ctx has ended before.
func (m *Module) awaitTenant(ctx context.Context) bool {
	for !m.owner.Wants(m) {
		select {
		case <-ctx.Done():
			return false
		case <-m.wake:
		}
	}
	return true
}

// serve tells the module of all its tenants and hears it until it ends.
func (m *Module) serve(ctx context.Context, l *Link) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, l.Close)()
	defer l.Close()
	var heard error
	ended := make(chan struct{}) // closed once heard is why nothing more is
	go func() {
		heard = m.owner.Hear(l)
		close(ended)
		l.Close() // nobody waits for an answer any more
	}()
	defer func() { l.Close(); <-ended }()
	err := m.meet(ctx, l)
	if err == nil {
		m.owner.Met()
		err = m.watch(ctx, l, ended)
		m.SetLink(nil)
	}
	if err == nil {
		err = heard
	}
	if errors.Is(err, io.EOF) || errors.Is(err, process.ErrGone) {
		err = fmt.Errorf("%s, process %d, has ended, or lost a tenant; it is reached or started again", m.Name, l.PID)
	}
	return err
}

// meet makes acquaintance with the module, which may know some of what it is told.
func (m *Module) meet(ctx context.Context, l *Link) error {
	ctx, cancel := context.WithTimeout(ctx, process.Answers)
	defer cancel()
	hello := protocol.Hello{Head: protocol.Head{Type: protocol.TypeHello}, Version: protocol.Version}
	its, _, err := Request[protocol.Hello, protocol.Hello](ctx, l, &hello, &hello.Head, -1)
	if err != nil {
		return fmt.Errorf("meet %s, process %d: %w", m.Name, l.PID, err)
	}
	m.cfg.Log.Info("stack module is there", "name", strings.TrimRight(string(its.Name[:]), "\x00"), "pid", l.PID)
	if its.Features&protocol.CanTellSent != 0 {
		l.TellsSent.Store(true)
		Send(l, &protocol.Plain{Head: protocol.Head{Type: protocol.TypeTellSent}})
	}
	return m.owner.Meet(ctx, m, l)
}

// watch asks the module again and again whether it answers, until it has ended; nil then. One that
// hangs is ended.
func (m *Module) watch(ctx context.Context, l *Link, ended <-chan struct{}) error {
	tick := time.NewTicker(askEvery)
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
		bound, cancel := hang.Bound(ctx, l.PID)
		s, err := l.Stats(bound, 0)
		hangs := err != nil && errors.Is(context.Cause(bound), hang.Err)
		cancel()
		if hangs {
			m.owner.Hangs()
			m.cfg.kill(m.Kind, l.PID)
			return fmt.Errorf("%s, process %d, hangs and was killed: for %s %w", m.Name, l.PID, hang.After, hang.Err)
		}
		m.owner.Tend(ctx, m, l)
		if err == nil {
			if err := m.renew(l, &runs, &s); err != nil {
				<-ended // until then it could be reached once more
				return err
			}
		}
	}
}
