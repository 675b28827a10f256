// Package stacks is the plane of endpoints whose TCP runs in a process of its own, a stack module
// (NetKernel, HotNets '17), on the agent's side (docs/architecture/stacks.md): it says which module
// runs whose TCP, gives modules the packets of such endpoints, their tenants, and answers the
// tenants' programs' trapped calls. Modules as processes are package module's affair, and what the
// kernel keeps of a program's socket is package socket's.
//
// Plane.mu guards who is a tenant; announce is held by whoever tells a module of tenants, across
// requests. tenant.mu guards a tenant's sockets, and is held across none. Each trapped call is
// answered by a goroutine of its own, which holds its socket's place in tenant.sockets.
package stacks

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/stacks/socket"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/trap"
	"heddle.dev/heddle/internal/trap/task"
)

// Config is what the plane of a node is made with.
type Config struct {
	module.Config
	StackModules plane.StackModules
	Traps        plane.Traps
	// Keeper and StacksChanged are those of plane.Host.
	Keeper        func() trap.Keeper
	StacksChanged func()
	Faults        plane.Faults
	// Observe is told of connections as they come and go; nil: nobody is.
	Observe func(flow.Observation)
}

// Plane is the plane of stack modules of one node.
type Plane struct {
	// Packets of a module pass the TCP plane's programs at the endpoint's veth, as the container's
	// own do.
	plane.WithoutDevices
	plane.WithoutRequests
	plane.WithoutNetwork
	plane.WithoutLimits

	cfg   Config
	proc  task.Proc
	pairs *socket.Pairs
	why   reasons
	ctx   context.Context // done when the plane closes
	stop  context.CancelFunc
	tasks sync.WaitGroup
	// wanted starts makePairs.
	wanted sync.Once
	ids    atomic.Uint64 // that was given out last
	cut    atomic.Uint64 // connections that policy forbids
	// modules are the programs that run the TCP of tenants, a kind each.
	modules map[stack.Kind]*module.Module // guarded by mu
	lacking map[stack.Kind]bool           // own modules that the node has not. Guarded by mu
	runs    func(*module.Module)          // keeps one from now on; nil: not yet, or not any more. Guarded by mu

	// announce is held while a module is told of tenants, or one is added.
	announce sync.Mutex

	mu      sync.Mutex                                 // guards the rest
	choices map[model.EndpointID]stack.Choice          // of those whose profile says that a module runs their TCP
	devices map[model.EndpointID]netcfg.EndpointDevice // of those that are attached
	limits  map[model.EndpointID]model.Limits          // caps of what they send and receive
	// tenants are those of both, and who were before and are still attached.
	tenants map[model.EndpointID]*tenant
	// retired is what was counted for attached endpoints that are tenants no more.
	retired map[model.EndpointID]model.Traffic
}

var _ interface {
	plane.Plane
	plane.Stacks
	plane.StackReports
} = (*Plane)(nil)

// FaultModule says that the module does not run, or does not have an endpoint.
const FaultModule api.FaultReason = "stack_module"

// Path is that of connections whose TCP a module runs.
const Path model.Path = "stack"

// Declaration is what the plane says of its names.
var Declaration = plane.Declaration{Paths: []model.Path{Path}, Reasons: []model.Reason{reasonCut}, Faults: []api.FaultReason{FaultModule}}

// Declares implements plane.Reports.
func (p *Plane) Declares() plane.Declaration { return Declaration }

// Open makes the plane. Modules are reached, or started, by Run.
func Open(cfg Config) (*Plane, error) {
	p := &Plane{
		cfg: cfg, pairs: socket.NewPairs(), why: newReasons(), modules: map[stack.Kind]*module.Module{}, lacking: map[stack.Kind]bool{},
		tenants: map[model.EndpointID]*tenant{}, retired: map[model.EndpointID]model.Traffic{}, choices: map[model.EndpointID]stack.Choice{}, devices: map[model.EndpointID]netcfg.EndpointDevice{},
		limits: map[model.EndpointID]model.Limits{},
	}
	p.ctx, p.stop = context.WithCancel(context.Background())
	p.ids.Store(uint64(time.Now().UnixNano())) // ids are not given again by a later agent
	for _, kind := range module.Kinds {
		p.modules[kind] = p.newModule(kind)
	}
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
	if kind.IsKernels() {
		return plane.ErrOtherStack
	}
	_, err := p.cfg.Find(kind)
	p.lacks(kind, err)
	if err != nil {
		return err
	}
	p.mu.Lock()
	m := p.modules[kind]
	p.mu.Unlock()
	if err := m.Failure(); err != nil {
		return fmt.Errorf("its module does not run: %w", err)
	}
	if err := p.cfg.StackModules.StackDevices(); err != nil {
		return fmt.Errorf("no device for its module: %w: modprobe tun", err)
	}
	return kind.Check(s)
}

// SetStack implements plane.Stacks. An endpoint that had a module keeps what it has there. If it is
// to have another, that is at once if it has nothing there, and else goes on with the first one
// until it has not: its address leads to one device.
func (p *Plane) SetStack(e model.Endpoint, c stack.Choice) error {
	p.announce.Lock()
	defer p.announce.Unlock()
	chosen := c.Stack != "" && p.moduleOf(c.Stack) != nil
	p.mu.Lock()
	p.choices[e.ID] = c
	if !chosen {
		delete(p.choices, e.ID)
	}
	t := p.tenants[e.ID]
	p.mu.Unlock()
	switch {
	case t == nil:
		p.beginWanted(e)
	case !chosen:
		t.active.Store(false)
	case t.configure(c):
		l := t.module.Current()
		if l == nil {
			break
		}
		p.retireUnused(p.ctx, l, t)
		if p.tenantOf(e.ID) == t {
			p.tell(l, t)
		}
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
	p.beginWanted(e)
	return nil
}

// beginWanted makes an endpoint a tenant if it is to be one and is not. The caller holds announce.
func (p *Plane) beginWanted(e model.Endpoint) {
	p.mu.Lock()
	t := p.wantedTenant(e)
	p.mu.Unlock()
	if t != nil {
		p.begin(t)
	}
}

// wantedTenant is the endpoint's as of its profile; nil if it is to be none, or is one. The caller
// holds mu, and begins it.
func (p *Plane) wantedTenant(e model.Endpoint) *tenant {
	dev, attached := p.devices[e.ID]
	c, chosen := p.choices[e.ID]
	if !attached || !chosen || p.tenants[e.ID] != nil {
		return nil
	}
	t := newTenant(e, dev, p.modules[c.Stack])
	t.counted.last = p.retired[e.ID]
	t.configure(c)
	p.tenants[e.ID] = t
	return t
}

// begin has a new tenant's calls be answered, by a module that knows it. The caller holds announce.
func (p *Plane) begin(t *tenant) {
	defer close(t.begun)
	if err := p.adopt(t); err != nil {
		p.cfg.Log.Error("listeners of an endpoint are lost with the agent before", "endpoint", t.Name, "err", err)
	}
	p.wanted.Do(func() { p.tasks.Go(p.makePairs) })
	t.module.WakeUp()
	if l := t.module.Current(); l != nil {
		p.tell(l, t)
	}
}

// tell tells the module of a tenant and its sockets.
func (p *Plane) tell(l *module.Link, t *tenant) {
	ctx, cancel := context.WithTimeout(p.ctx, process.Answers)
	defer cancel()
	err := p.introduce(ctx, l, t)
	if err == nil {
		err = p.restore(ctx, l, t)
	}
	if err == nil {
		err = t.inPlace()
	}
	t.untold.Store(err != nil)
	if err != nil {
		p.fault(t.Name, err)
	} else {
		p.cfg.Faults.Clear(FaultModule, t.Name)
	}
}

// tellAgain tells the module of those of whom it could not be told: the process that had a tenant's
// device before may not have ended by then.
func (p *Plane) tellAgain(m *module.Module, l *module.Link) {
	p.announce.Lock()
	defer p.announce.Unlock()
	for _, t := range p.tenantsOf(m) {
		if t.untold.Load() {
			p.tell(l, t)
		}
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
	delete(p.retired, e.ID)
	p.mu.Unlock()
	if t == nil {
		return nil
	}
	return p.giveUp(t.module.Current(), t)
}

// tenantOf gives the tenant that an endpoint is; nil if it is none.
func (p *Plane) tenantOf(id model.EndpointID) *tenant {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.tenants[id]
}

// makePairs makes pairs from when the first endpoint wants a module.
func (p *Plane) makePairs() {
	if err := p.pairs.Run(p.ctx); err != nil {
		p.fault("", err)
	}
}

// hear hears the module until it has ended.
func (p *Plane) hear(l *module.Link) error {
	all := arrivals{}
	defer all.end()
	for {
		head, message, fd, err := l.Hear()
		if err != nil {
			return err
		}
		switch head.Type {
		case protocol.TypeAccepted:
			err = p.accepted(l, all, message, fd)
		case protocol.TypeSent:
			err = p.sent(all, message)
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
		p.tellEnded(t, &m)
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
	for _, m := range p.modules {
		if l := m.Current(); l != nil {
			l.Close()
		}
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
