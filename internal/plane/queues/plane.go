// Package queues is the plane of endpoints whose programs send by queues (NetKernel, HotNets '17;
// docs/architecture/guest-library.md): a library in the program puts bytes into rings in shared
// memory, and a service of the node, heddle-stack --queues, has the kernel's sockets take them. The
// plane keeps the service, gives it the connections that libraries ask for, and makes sockets for
// guests that have no other way to them (docs/protocols/stack-queues.md).
package queues

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/guest"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/queues/protocol"
	"heddle.dev/heddle/internal/stack"
)

const (
	// maxRegions is how many processes of an endpoint have queues: descriptors are the agent's.
	maxRegions = 256
	// firstPause and lastPause are between tries to have the service.
	firstPause, lastPause = 100 * time.Millisecond, 5 * time.Second
	// askEvery is how often the service is asked whether it still answers.
	askEvery = time.Second
)

// Config is what the plane of a node is made with.
type Config struct {
	// StateDir is the agent's own; Self its program, beside which others are looked for.
	StateDir, Self string
	Traps          plane.Traps
	Sockets        plane.Sockets
	Modules        Modules
	Log            *slog.Logger
}

// Modules is the plane of stack modules, some of whose connections send by queues, too. Any
// goroutine may call it.
type Modules interface {
	// Connected says whether a socket of an endpoint is a connection that a module runs and that
	// can be sent by. abort ends it by RST.
	Connected(ctx context.Context, id model.EndpointID, fd int) (abort func(context.Context) error, ok bool, err error)
}

// Plane is the plane of queues of one node.
type Plane struct {
	// Connections are the TCP plane's, with its policy, limits and end.
	plane.WithoutDevices
	plane.WithoutRequests
	plane.WithoutNetwork
	plane.WithoutPolicy
	plane.WithoutLimits

	cfg      Config
	programs guest.Programs
	why      reasons
	wake     chan struct{} // of Run: somebody wants the service

	mu        sync.Mutex // guards the rest
	endpoints map[model.EndpointID]*endpoint
	regions   map[uint64]*region
	link      *link // nil: there is no service
	ended     uint64
	last      uint32 // number of an endpoint
}

// endpoint is one of the node's.
type endpoint struct {
	model.Endpoint
	attached, chosen bool
	places           guest.Places
	number           uint32 // as the service knows it, not 0
	regions          int
	large            int    // of them that have rings of regionCapacity
	profile          string // that chose it; empty: none does
}

// serves reports whether its programs may have queues.
func (e *endpoint) serves() bool { return e.attached && e.chosen }

var _ interface {
	plane.Plane
	plane.Stacks
	plane.StackReports
} = (*Plane)(nil)

// Program is the service, which the agent with this state directory starts. It has no network: all
// sockets are given to it.
func Program(self, stateDir string) process.Program {
	return process.Program{
		Name: "heddle-stack", Self: self, Socket: filepath.Join(stateDir, socketFile), Log: filepath.Join(stateDir, logFile),
		More: []string{"--queues"}, OwnNetns: true,
	}
}

const socketFile, logFile = "queues.sock", "queues.log"

// StateFiles are the service's files in an agent's state directory.
var StateFiles = []string{socketFile, logFile}

// Declares implements plane.Reports.
func (p *Plane) Declares() plane.Declaration { return plane.Declaration{} }

// Open makes the plane.
func Open(cfg Config) (*Plane, error) {
	p := &Plane{cfg: cfg, why: newReasons(), wake: make(chan struct{}, 1), endpoints: map[model.EndpointID]*endpoint{}, regions: map[uint64]*region{}}
	var err error
	if p.programs, err = guest.OpenPrograms(); err != nil {
		return nil, err
	}
	cfg.Traps.Handle(&guest.Handler{Magic: askMagic, Why: p.why.all(), Socket: &p.why.socket, Busy: &p.why.busy, Begin: p.begin})
	return p, nil
}

// Name is the plane's.
func (p *Plane) Name() string { return "queues" }

// ServeStack implements plane.Stacks: settings that say queues need the service and the library.
func (p *Plane) ServeStack(_ stack.Kind, s stack.Settings) error {
	if !s.Queues {
		return plane.ErrOtherStack
	}
	if _, err := Program(p.cfg.Self, p.cfg.StateDir).Find(); err != nil {
		return err
	}
	return guest.FindLibrary(p.cfg.Self)
}

// of gives what is known of an endpoint. The caller holds mu.
func (p *Plane) of(e model.Endpoint) *endpoint {
	known := p.endpoints[e.ID]
	if known == nil || !known.Created.Equal(e.Created) {
		p.last = max(p.last+1, 1)
		known = &endpoint{places: guest.NewPlaces(), number: p.last}
		p.endpoints[e.ID] = known
	}
	known.Endpoint = e
	return known
}

// SetStack implements plane.Stacks. Live connections follow: when the profile goes, libraries put
// nothing more into rings.
func (p *Plane) SetStack(e model.Endpoint, c stack.Choice) error {
	p.mu.Lock()
	known := p.of(e)
	known.chosen = c.Settings.Queues
	known.profile = ""
	if known.chosen {
		known.profile = c.Profile.Name
	}
	regions, l := p.regionsOf(known), p.link
	stop := !known.chosen
	p.mu.Unlock()
	if !stop {
		p.start()
	}
	if l == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), process.Answers)
	defer cancel()
	var errs []error
	for _, r := range regions {
		ask := protocol.Plain{Head: protocol.Head{Type: protocol.TypeStop, Region: r.id}}
		if stop {
			ask.Value = 1
		}
		_, _, err := request[protocol.Plain, protocol.Plain](ctx, l, &ask, &ask.Head, -1)
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, process.ErrGone) {
			errs = append(errs, fmt.Errorf("have %s leave its queues: %w", e.Name, err))
		}
	}
	return errors.Join(errs...)
}

// regionsOf gives an endpoint's. The caller holds mu.
func (p *Plane) regionsOf(e *endpoint) (all []*region) {
	for _, r := range p.regions {
		if r.of == e {
			all = append(all, r)
		}
	}
	return all
}

// start has the service run.
func (p *Plane) start() {
	select {
	case p.wake <- struct{}{}:
	default: // it is awake
	}
}

// Attach has programs of an endpoint get queues.
func (p *Plane) Attach(e model.Endpoint, _ netcfg.EndpointDevice) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.of(e).attached = true
	return nil
}

// Detach forgets the endpoint, and has the service do so.
func (p *Plane) Detach(e model.Endpoint) error {
	p.mu.Lock()
	known := p.endpoints[e.ID]
	delete(p.endpoints, e.ID)
	var regions []*region
	if known != nil {
		known.attached = false
		regions = p.regionsOf(known)
	}
	l := p.link
	p.mu.Unlock()
	if l == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), process.Answers)
	defer cancel()
	var errs []error
	for _, r := range regions {
		ask := protocol.Plain{Head: protocol.Head{Type: protocol.TypeRegionGone, Region: r.id}}
		if _, _, err := request[protocol.Plain, protocol.Plain](ctx, l, &ask, &ask.Head, -1); err != nil && !errors.Is(err, process.ErrGone) {
			errs = append(errs, fmt.Errorf("end the queues of %s: %w", e.Name, err))
		}
	}
	return errors.Join(errs...)
}

// Guest makes a region for a guest of an endpoint that has no other way to TCP, a virtual machine
// say, and gives the guest's end of its socket. flags are those of protocol: Control, Polled.
func (p *Plane) Guest(ctx context.Context, id model.EndpointID, flags uint32) (*os.File, error) {
	p.start()
	p.mu.Lock()
	e, l := p.endpoints[id], p.link
	p.mu.Unlock()
	if e == nil || !e.attached {
		return nil, fmt.Errorf("no endpoint %d on this node", id)
	}
	if l == nil {
		return nil, process.ErrGone
	}
	_, guest, err := p.newRegion(ctx, l, e, flags|protocol.Control)
	return guest, err
}

// Close gives up what the plane has. The service lives on, and with it what programs have there.
func (p *Plane) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, r := range p.regions {
		delete(p.regions, id)
		closeFD(r.memory)
	}
	p.programs.Close()
	return nil
}
