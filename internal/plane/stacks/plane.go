// Package stacks is the plane of endpoints whose TCP runs in a process of its own, a stack module
// (NetKernel, HotNets '17), on the agent's side: it has the module run, gives it the packets of
// such endpoints, and answers their programs' trapped calls (docs/protocols/stack-module.md).
// docs/architecture/stacks.md.
package stacks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/trap"
	"heddle.dev/heddle/internal/trap/task"
)

const (
	// moduleAnswers bounds what the module may take for an answer that does not depend on a peer.
	moduleAnswers = 2 * time.Second
	// moduleStarts is how long a call waits for a module that is being started.
	moduleStarts = 2 * time.Second
	// Bounds of the pause before a module that cannot run is started again; it doubles from try to
	// try. One that ended is started again at once.
	firstPause = 100 * time.Millisecond
	lastPause  = 30 * time.Second
	// wellFor is how long a module must have run for its end to be the first of a series.
	wellFor = 5 * time.Second
	// statsEvery is how often the module is asked whether it still answers.
	statsEvery = time.Second
)

// Program is the module's, smoltcp in it.
const Program = "heddle-stack"

// Names of what the module has in the agent's state directory.
const (
	socketFile = "stack.sock"
	logFile    = "stack.log"
)

// StateFiles are the module's files in an agent's state directory.
var StateFiles = []string{socketFile, logFile}

func program(self, stateDir string) process.Program {
	// It has the network that it is given by devices, and no other. Names of its Unix sockets are
	// nobody's.
	return process.Program{Name: Program, Self: self, Socket: filepath.Join(stateDir, socketFile), Log: filepath.Join(stateDir, logFile), OwnNetns: true}
}

// Arguments are those that the agent with this state directory starts its module with.
func Arguments(stateDir string) []string { return program("", stateDir).Arguments() }

// FindProgram gives the module's path, looking beside the program self first.
func FindProgram(self string) (string, error) { return program(self, "").Find() }

// Config is what the plane of a node is made with.
type Config struct {
	// StateDir is the agent's state directory.
	StateDir string
	// Self is the agent's own program, beside which the module's is looked for.
	Self         string
	StackModules plane.StackModules
	Traps        plane.Traps
	// Keeper and StacksChanged are those of plane.Host.
	Keeper        func() trap.Keeper
	StacksChanged func()
	Faults        plane.Faults
	Log           *slog.Logger
}

// Plane is the plane of stack modules of one node.
type Plane struct {
	cfg   Config
	proc  task.Proc
	pairs *pairs
	why   reasons
	ctx   context.Context // done when the plane closes
	stop  context.CancelFunc
	tasks sync.WaitGroup
	ids   atomic.Uint64 // that was given out last
	wake  chan struct{} // of Run: there is a tenant
	cut   atomic.Uint64 // connections that policy forbids

	// announce is held while the module is told of tenants, or one is added.
	announce sync.Mutex

	mu      sync.Mutex                                 // guards the rest
	choices map[model.EndpointID]stack.Choice          // of those whose profile says that a module runs their TCP
	devices map[model.EndpointID]netcfg.EndpointDevice // of those that are attached
	// tenants are those of both, and who were before and are still attached.
	tenants map[model.EndpointID]*tenant
	module  *link         // that has been told of all tenants; nil: none
	there   chan struct{} // closed when there is one
	failed  error         // why the last try to have one failed; nil: it did not
	ended   uint64        // how many modules have
}

var _ interface {
	plane.Plane
	plane.Stacks
} = (*Plane)(nil)

// FaultModule says that the module does not run, or does not have an endpoint.
const FaultModule api.FaultReason = "stack_module"

// Path is that of connections whose TCP a module runs.
const Path model.Path = "stack"

// Declaration is what the plane says of its names.
var Declaration = plane.Declaration{Paths: []model.Path{Path}, Reasons: []model.Reason{reasonCut}, Faults: []api.FaultReason{FaultModule}}

// Declares implements plane.Reports.
func (p *Plane) Declares() plane.Declaration { return Declaration }

// Open makes the plane. The module is reached, or started, by Run.
func Open(cfg Config) (*Plane, error) {
	p := &Plane{
		cfg: cfg, pairs: newPairs(), why: newReasons(), wake: make(chan struct{}, 1), there: make(chan struct{}),
		tenants: map[model.EndpointID]*tenant{}, choices: map[model.EndpointID]stack.Choice{}, devices: map[model.EndpointID]netcfg.EndpointDevice{},
	}
	p.ctx, p.stop = context.WithCancel(context.Background())
	p.ids.Store(uint64(time.Now().UnixNano())) // ids are not given again by a later agent
	var err error
	if p.proc, err = task.Open(); err != nil {
		return nil, err
	}
	cfg.Traps.Handle(&handler{p})
	return p, nil
}

// Name is the plane's.
func (p *Plane) Name() string { return "stacks" }

// ServeStack implements plane.Stacks.
func (p *Plane) ServeStack(kind stack.Kind, s stack.Settings) error {
	if kind != stack.Smoltcp {
		return plane.ErrOtherStack
	}
	if _, err := FindProgram(p.cfg.Self); err != nil {
		return err
	}
	if err := p.failure(); err != nil {
		return fmt.Errorf("its module does not run: %w", err)
	}
	if err := p.cfg.StackModules.StackDevices(); err != nil {
		return fmt.Errorf("no device for its module: %w: modprobe tun", err)
	}
	return checkSettings(s)
}

// failure gives why there is no module although one was tried for; nil if there is one, or nobody
// has wanted one.
func (p *Plane) failure() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failed
}

// SetStack implements plane.Stacks. An endpoint that had the module keeps what it has there.
func (p *Plane) SetStack(e model.Endpoint, c stack.Choice) error {
	p.announce.Lock()
	defer p.announce.Unlock()
	p.mu.Lock()
	p.choices[e.ID] = c
	if c.Stack != stack.Smoltcp {
		delete(p.choices, e.ID)
	}
	t, module := p.tenants[e.ID], p.module
	p.mu.Unlock()
	switch {
	case t == nil:
		p.begin(e)
	case c.Stack == stack.Smoltcp && t.configure(c) && module != nil:
		p.tell(module, t)
	case c.Stack != stack.Smoltcp:
		t.active.Store(false)
	}
	return nil
}

// Attach has the module run the TCP of an endpoint whose profile says so. What fails is a fault:
// the endpoint has its other planes all the same.
func (p *Plane) Attach(e model.Endpoint, dev netcfg.EndpointDevice) error {
	p.announce.Lock()
	defer p.announce.Unlock()
	p.mu.Lock()
	p.devices[e.ID] = dev
	p.mu.Unlock()
	p.begin(e)
	return nil
}

// begin makes an endpoint a tenant if it is to be one and is not. The caller holds announce.
func (p *Plane) begin(e model.Endpoint) {
	p.mu.Lock()
	dev, attached := p.devices[e.ID]
	c, chosen := p.choices[e.ID]
	module := p.module
	if !attached || !chosen || p.tenants[e.ID] != nil {
		p.mu.Unlock()
		return
	}
	t := newTenant(e, dev)
	t.configure(c)
	p.tenants[e.ID] = t
	p.mu.Unlock()
	if err := p.adopt(t); err != nil {
		p.cfg.Log.Error("listeners of an endpoint are lost with the agent before", "endpoint", e.Name, "err", err)
	}
	select {
	case p.wake <- struct{}{}:
	default: // it is awake
	}
	if module != nil {
		p.tell(module, t)
	}
}

// tell tells the module of a tenant and its sockets.
func (p *Plane) tell(l *link, t *tenant) {
	ctx, cancel := context.WithTimeout(p.ctx, process.Answers)
	defer cancel()
	err := p.introduce(ctx, l, t)
	if err == nil {
		err = p.restore(ctx, l, t)
	}
	if err != nil {
		p.fault(t.Name, err)
	} else {
		p.cfg.Faults.Clear(FaultModule, t.Name)
	}
}

// Detach ends all that the endpoint has at the module.
func (p *Plane) Detach(e model.Endpoint) error {
	p.announce.Lock() // else a module that is being met hears of it once more, afterwards
	defer p.announce.Unlock()
	p.mu.Lock()
	t := p.tenants[e.ID]
	delete(p.tenants, e.ID)
	delete(p.devices, e.ID)
	module := p.module
	p.mu.Unlock()
	if t == nil {
		return nil
	}
	t.end()
	if module != nil {
		m := protocol.Plain{Head: t.head(protocol.TypeTenantGone, 0)}
		ctx, cancel := context.WithTimeout(p.ctx, moduleAnswers)
		defer cancel()
		_, _, _ = request[protocol.Plain, protocol.Plain](ctx, module, &m, &m.Head, -1) // or it goes with the next END
	}
	p.cfg.Faults.Clear(FaultModule, e.Name)
	return p.cfg.StackModules.LeaveStackDevice(e)
}

// tenantOf gives the tenant that an endpoint is; nil if it is none.
func (p *Plane) tenantOf(id model.EndpointID) *tenant {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.tenants[id]
}

// current gives the module, nil if there is none.
func (p *Plane) current() *link {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.module
}

// moduleAndTenants gives the module, nil if there is none, and all tenants.
func (p *Plane) moduleAndTenants() (*link, []*tenant) {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]*tenant, 0, len(p.tenants))
	for _, t := range p.tenants {
		all = append(all, t)
	}
	return p.module, all
}

// await gives the module, or waits for one that is being started.
func (p *Plane) await(ctx context.Context) (*link, error) {
	ctx, cancel := context.WithTimeout(ctx, moduleStarts)
	defer cancel()
	for {
		p.mu.Lock()
		l, there := p.module, p.there
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

// Run keeps a module for the endpoints that want one, until ctx ends. The module lives on.
func (p *Plane) Run(ctx context.Context) error {
	// One that runs for endpoints that there are no more has to hear of that.
	l, err := process.Adopt(program("", p.cfg.StateDir).Socket, dial)
	var making sync.WaitGroup
	defer making.Wait()
	making.Go(func() {
		if err := p.makePairs(ctx); err != nil {
			p.fault("", err)
		}
	})
	for pause := firstPause; ; {
		if l == nil {
			if !p.awaitTenant(ctx) {
				return nil
			}
			l, err = process.Reach(program(p.cfg.Self, p.cfg.StateDir), dial)
		}
		began, ran := time.Now(), l != nil
		if ran {
			err = p.serve(ctx, l)
			l = nil
		}
		if ctx.Err() != nil {
			return nil
		}
		p.fault("", err)
		p.mu.Lock()
		was := p.failed
		if p.failed = err; ran {
			p.failed = nil // it is there again before anybody is to have another stack
			p.ended++
		}
		changed := (was == nil) != (p.failed == nil)
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
			return nil
		case <-time.After(pause):
			pause = min(2*pause, lastPause)
		}
	}
}

// makePairs makes pairs once there is a tenant.
func (p *Plane) makePairs(ctx context.Context) error {
	if !p.awaitTenant(ctx) {
		return nil
	}
	return p.pairs.run(ctx)
}

// awaitTenant waits until an endpoint wants a module; false: ctx has ended before.
func (p *Plane) awaitTenant(ctx context.Context) bool {
	for {
		p.mu.Lock()
		some := len(p.tenants) > 0
		p.mu.Unlock()
		if some {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-p.wake:
		case <-time.After(time.Second): // another that waits may have been woken
		}
	}
}

// serve tells the module of all tenants and hears it until it ends.
func (p *Plane) serve(ctx context.Context, l *link) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, l.close)()
	defer l.close()
	var heard error
	ended := make(chan struct{}) // closed once heard is why nothing more is
	go func() { heard = p.hear(l); close(ended) }()
	defer func() { l.close(); <-ended }()
	err := p.meet(ctx, l)
	if err == nil {
		// What was forbidden while no agent ran.
		if _, err := p.CutForbidden(); err != nil {
			p.cfg.Log.Warn("connections that are forbidden may be alive", "err", err)
		}
		err = p.probe(ctx, l, ended)
		p.setModule(nil)
	}
	if err == nil {
		err = heard
	}
	if errors.Is(err, io.EOF) || errors.Is(err, errModuleEnded) {
		err = fmt.Errorf("%s, process %d, has ended; it is started again", Program, l.pid)
	}
	return err
}

// setModule says that l is the module from now on; nil: there is none.
func (p *Plane) setModule(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.module = l
	if l == nil {
		p.there = make(chan struct{})
		return
	}
	if p.failed != nil {
		p.failed = nil
		p.cfg.StacksChanged()
	}
	close(p.there)
	if p.cfg.Faults.Clear(FaultModule, "") {
		p.cfg.Log.Info("stack module is there again", "pid", l.pid)
	}
}

// probe asks the module again and again whether it answers, until it has ended; nil then. One that
// hangs is ended.
func (p *Plane) probe(ctx context.Context, l *link, ended <-chan struct{}) error {
	tick := time.NewTicker(statsEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ended:
			return nil
		case <-tick.C:
		}
		m := protocol.Plain{Head: protocol.Head{Type: protocol.TypeStats}}
		limit, cancel := context.WithTimeout(ctx, moduleAnswers)
		_, _, err := request[protocol.Plain, protocol.Stats](limit, l, &m, &m.Head, -1)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			p.why.hangs.Add()
			_ = unix.Kill(l.pid, unix.SIGKILL) // or it has just ended
			return fmt.Errorf("%s, process %d, does not answer within %s and was killed", Program, l.pid, moduleAnswers)
		}
	}
}

// meet makes acquaintance with a module, which may know some of what it is told.
func (p *Plane) meet(ctx context.Context, l *link) error {
	limit, cancel := context.WithTimeout(ctx, process.Answers)
	defer cancel()
	hello := protocol.Hello{Head: protocol.Head{Type: protocol.TypeHello}, Version: protocol.Version}
	its, _, err := request[protocol.Hello, protocol.Hello](limit, l, &hello, &hello.Head, -1)
	if err != nil {
		return fmt.Errorf("meet %s, process %d: %w", Program, l.pid, err)
	}
	p.cfg.Log.Info("stack module is there", "name", strings.TrimRight(string(its.Name[:]), "\x00"), "pid", l.pid)
	p.announce.Lock()
	defer p.announce.Unlock()
	send(l, &protocol.Plain{Head: protocol.Head{Type: protocol.TypeBegin}})
	p.mu.Lock()
	all := make([]*tenant, 0, len(p.tenants))
	for _, t := range p.tenants {
		all = append(all, t)
	}
	p.mu.Unlock()
	for _, t := range all {
		p.tell(l, t)
		if err := p.closeStrays(limit, l, t); err != nil {
			return fmt.Errorf("sockets of %s, process %d: %w", Program, l.pid, err)
		}
	}
	send(l, &protocol.Plain{Head: protocol.Head{Type: protocol.TypeEnd}})
	p.setModule(l) // before an endpoint that is attached now asks whether there is one
	return nil
}

// hear hears the module until it has ended.
func (p *Plane) hear(l *link) error {
	for {
		head, message, fd, err := l.receive()
		if err != nil {
			return err
		}
		switch head.Type {
		case protocol.TypeAccepted:
			err = p.accepted(message, fd)
		case protocol.TypeEnded:
			err = p.endedOne(message)
		default:
			err = fmt.Errorf("%w: type %d", protocol.ErrMalformed, head.Type)
		}
		if err != nil {
			return err
		}
	}
}

// endedOne hears that a connection is over.
func (p *Plane) endedOne(message []byte) error {
	m, err := protocol.Parse[protocol.Info](message)
	if err != nil {
		return err
	}
	if t := p.tenantOf(model.EndpointID(m.Head.Tenant)); t != nil {
		t.mu.Lock()
		delete(t.outgoing, m.Head.ID)
		t.mu.Unlock()
	}
	return nil
}

// fault notes that the module, or an endpoint of it, is not there.
func (p *Plane) fault(endpoint string, err error) {
	if p.cfg.Faults.Set(FaultModule, endpoint, err) {
		p.cfg.Log.Error("no TCP by a stack module; will try again", "reason", FaultModule, "endpoint", endpoint, "err", err)
	}
}

// Close hangs up. The module lives on, for the next agent, and what the keeper has.
func (p *Plane) Close() error {
	p.stop()
	p.mu.Lock()
	if p.module != nil {
		p.module.close()
	}
	all := make([]*tenant, 0, len(p.tenants))
	for _, t := range p.tenants {
		all = append(all, t)
	}
	p.mu.Unlock()
	for _, t := range all {
		t.leave()
	}
	p.tasks.Wait()
	p.proc.Close()
	return nil
}
