// Package lanes is the plane of endpoints whose connections with each other on one node go through
// shared memory (docs/architecture/guest-library.md). Such a connection is one of the TCP plane's
// in all but its bytes: libraries in both containers, a GuestLib each (NetKernel, HotNets '17), ask
// for memory by a trapped socket(), and the plane gives both the same, if profiles and limits let
// it (docs/protocols/memory-lanes.md).
package lanes

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/guest"
	"heddle.dev/heddle/internal/stack"
)

const (
	// sweepEvery is how often it is looked which connections have ended, and what they carried.
	sweepEvery = time.Second
	// maxPairs is how many connections of an endpoint have lanes at a time: the descriptors are the
	// agent's.
	maxPairs = 4096
)

// Config is what the plane of a node is made with.
type Config struct {
	// Self is the agent's own program, beside which the library is looked for.
	Self  string
	Traps plane.Traps
	Log   *slog.Logger
}

// Plane is the plane of lanes of one node.
type Plane struct {
	// Connections are the TCP plane's, with its policy and its end.
	plane.WithoutDevices
	plane.WithoutRequests
	plane.WithoutNetwork
	plane.WithoutPolicy
	plane.WithoutLimits

	cfg      Config
	programs guest.Programs
	why      reasons

	mu        sync.Mutex // guards the rest
	endpoints map[model.EndpointID]*endpoint
	pairs     map[connection]*pair
	beats     uint32
}

// endpoint is one of the node's.
type endpoint struct {
	model.Endpoint
	attached, chosen, limited bool
	places                    guest.Places
	pairs                     int
	sent                      uint64
	received                  uint64
}

// serves reports whether its connections may have lanes.
func (e *endpoint) serves() bool { return e.attached && e.chosen && !e.limited }

// connection tells connections apart: the ends that connected and accepted, as programs see them.
type connection struct{ connector, acceptor netip.AddrPort }

var _ interface {
	plane.Plane
	plane.Stacks
} = (*Plane)(nil)

// Path is that of bytes that go by memory.
const Path model.Path = "memory"

// Declaration is what the plane says of its names.
var Declaration = plane.Declaration{Paths: []model.Path{Path}}

// Declares implements plane.Reports.
func (p *Plane) Declares() plane.Declaration { return Declaration }

// Open makes the plane.
func Open(cfg Config) (*Plane, error) {
	p := &Plane{cfg: cfg, why: newReasons(), endpoints: map[model.EndpointID]*endpoint{}, pairs: map[connection]*pair{}}
	var err error
	if p.programs, err = guest.OpenPrograms(); err != nil {
		return nil, err
	}
	cfg.Traps.Handle(&guest.Handler{Magic: askMagic, Why: p.why.all(), Socket: &p.why.socket, Busy: &p.why.busy, Begin: p.begin})
	return p, nil
}

// Name is the plane's.
func (p *Plane) Name() string { return "lanes" }

// ServeStack implements plane.Stacks. What settings mean is the TCP plane's to say.
func (p *Plane) ServeStack(kind stack.Kind, _ stack.Settings) error {
	if kind != stack.SharedMemory {
		return plane.ErrOtherStack
	}
	return guest.FindLibrary(p.cfg.Self)
}

// of gives what is known of an endpoint. The caller holds mu.
func (p *Plane) of(e model.Endpoint) *endpoint {
	known := p.endpoints[e.ID]
	if known == nil || !known.Created.Equal(e.Created) {
		known = &endpoint{places: guest.NewPlaces()}
		p.endpoints[e.ID] = known
	}
	known.Endpoint = e
	return known
}

// SetStack implements plane.Stacks. Live connections follow: those whose profile goes, to TCP.
func (p *Plane) SetStack(e model.Endpoint, c stack.Choice) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	known := p.of(e)
	known.chosen = c.Stack == stack.SharedMemory
	return p.follow(known)
}

// Attach has connections of an endpoint get lanes.
func (p *Plane) Attach(e model.Endpoint, _ netcfg.EndpointDevice) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	known := p.of(e)
	known.attached = true
	return p.follow(known)
}

// Detach forgets the endpoint. Its connections end with its sockets.
func (p *Plane) Detach(e model.Endpoint) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	known := p.endpoints[e.ID]
	if known == nil {
		return nil
	}
	known.attached = false
	err := p.follow(known)
	for key, pair := range p.pairs {
		if pair.ends[0] == known || pair.ends[1] == known {
			p.forget(key, pair)
		}
	}
	delete(p.endpoints, e.ID)
	return err
}

// SetLimits implements plane.Limits: nobody can hold memory to a rate, so that endpoints that have
// a cap have TCP.
func (p *Plane) SetLimits(e model.Endpoint, _ []model.Endpoint) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	known := p.of(e)
	known.limited = e.Limits != nil && e.Limits.Shapes()
	return p.follow(known)
}

// RestoreLimits implements plane.Limits.
func (p *Plane) RestoreLimits(all []model.Endpoint) error {
	var errs []error
	for _, e := range all {
		errs = append(errs, p.SetLimits(e, nil))
	}
	return errors.Join(errs...)
}

// follow has the lanes of an endpoint be used, or not. The caller holds mu.
func (p *Plane) follow(e *endpoint) error {
	var errs []error
	for _, pair := range p.pairs {
		if pair.ends[0] == e || pair.ends[1] == e {
			errs = append(errs, pair.stop(!pair.ends[0].serves() || !pair.ends[1].serves()))
		}
	}
	return errors.Join(errs...)
}

// endpointAt gives the endpoint with an address. The caller holds mu.
func (p *Plane) endpointAt(a netip.Addr) *endpoint {
	for _, e := range p.endpoints {
		if e.attached && (e.Addr4() == a || e.Addr6() == a) {
			return e
		}
	}
	return nil
}

// Run looks which connections have ended until ctx ends.
func (p *Plane) Run(ctx context.Context) error {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			p.sweep()
		}
	}
}

// sweep says that the agent is there, counts what lanes carried, and forgets those that nobody has
// any more.
func (p *Plane) sweep() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.beats++
	for key, pair := range p.pairs {
		pair.beat(p.beats)
		gone := pair.gone() // before the last count
		pair.count()
		if gone {
			p.forget(key, pair)
		}
	}
}

// forget gives up a pair. The caller holds mu.
func (p *Plane) forget(key connection, pair *pair) {
	delete(p.pairs, key)
	pair.ends[0].pairs--
	pair.ends[1].pairs--
	pair.close()
}

// Close gives up what the plane has. Bytes go by the lanes for some seconds more, and then by
// TCP: nobody would count them.
func (p *Plane) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, pair := range p.pairs {
		delete(p.pairs, key)
		pair.close()
	}
	p.programs.Close()
	return nil
}

// Counters implements plane.Reports.
func (p *Plane) Counters() ([]api.Counter, error) { return nil, nil }

// Traffic implements plane.Reports: the bytes that went by memory, as the containers have noted
// them there; their connections are the TCP plane's.
func (p *Plane) Traffic(endpoints []model.Endpoint) ([]model.Traffic, error) {
	p.sweep()
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]model.Traffic, len(endpoints))
	for i, e := range endpoints {
		if known := p.endpoints[e.ID]; known != nil {
			out[i].BytesSent, out[i].BytesReceived = known.sent, known.received
		}
	}
	return out, nil
}

// Connections implements plane.Reports: each end of those whose two ends have lanes. The TCP plane
// lists them, too, with what went by TCP.
func (p *Plane) Connections() ([]model.Connection, error) {
	p.sweep()
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []model.Connection
	for key, pair := range p.pairs {
		if !pair.given[0] || !pair.given[1] {
			continue
		}
		ends := [2]netip.AddrPort{key.connector, key.acceptor}
		for role, e := range pair.ends {
			out = append(out, model.Connection{
				Endpoint: e.ID, State: "ESTABLISHED", Path: Path, Local: ends[role], Remote: ends[1-role],
				NodeLocal: ends[role], NodeRemote: ends[1-role], BytesSent: pair.counted[role], BytesReceived: pair.counted[1-role],
			})
		}
	}
	return out, nil
}
