// Package verbs is the plane of RDMA verbs (FreeFlow, NSDI '19) on the agent's side: it has the
// router (heddle-rdma) run as soon as an endpoint wants verbs, gives each such endpoint the socket
// by which its containers reach the router, and tells the router of them
// (docs/protocols/verbs-agent.md). Queues, memory and bytes are the router's.
// docs/architecture/verbs.md.
package verbs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/verbs/folder"
	"heddle.dev/heddle/internal/plane/verbs/protocol"
)

// Bounds of the pause before a router that cannot run is started again; it doubles from try to try.
const (
	firstPause = time.Second
	lastPause  = 30 * time.Second
)

// Config is what the plane of a node is made with.
type Config struct {
	// StateDir is the agent's state directory, SeccompSocket its seccomp socket: folders of
	// endpoints are beside that.
	StateDir, SeccompSocket string
	// Self is the agent's own program, beside which the router's is looked for.
	Self string
	// Device is the RDMA card that pairs between nodes go by, "" for none.
	Device string
	// Outside are addresses of peers without Heddle that the endpoints which may have some reach by
	// the card.
	Outside []netip.Prefix
	// Decide gives the verdict of the policy in force on a TCP connection.
	Decide func(from, to netip.Addr, port uint16) (model.Verdict, error)
	// Limits are those of endpoints that have none themselves.
	Limits model.VerbsLimits
	// SpinMicros is the SpinMicros of endpoints that have none themselves, and the most that the
	// router, whose time is the node's and no container's, heeds of any.
	SpinMicros uint32
	Sockets    plane.Sockets
	// SetGroups tells other nodes of groups that queue pairs of this one's endpoints have joined.
	SetGroups plane.SetGroups
	Faults    plane.Faults
	Log       *slog.Logger
}

// Plane is the verbs plane of one node.
type Plane struct {
	// Connections of queue pairs are TCP connections of their endpoints, so that policy and paths
	// are the TCP plane's.
	plane.WithoutDevices
	plane.WithoutPolicy

	cfg       Config
	wake      chan struct{}  // of Run: there is an endpoint
	accepting sync.WaitGroup // a goroutine for each endpoint

	asking sync.Mutex // one STATS at a time; taken before mu
	asked  uint32     // the tag of the last one; asking guards it

	mu        sync.Mutex // guards the rest; held while a message is sent
	closed    bool
	endpoints map[model.EndpointID]*endpoint
	router    *link   // nil: none
	old       []*link // of other builds, until their endpoints have no devices open any more
	ended     uint64  // how many routers have
	groups    groups
	reported  time.Time
	reasons   [len(reasons)]uint64
	members   members
}

var _ interface {
	plane.Plane
	plane.Status
	plane.RDMA
} = (*Plane)(nil)

// FaultRouter says that the router does not run, or does not have an endpoint: programs find no
// RDMA device.
const FaultRouter api.FaultReason = "verbs_router"

// FaultOldRouter says that a router of another version runs, to which this agent cannot speak, or
// one of an earlier build that does not answer.
const FaultOldRouter api.FaultReason = "verbs_router_old"

// Declaration is what the plane says of its names.
var Declaration = plane.Declaration{Reasons: reasons[:], Faults: []api.FaultReason{FaultRouter, FaultOldRouter}}

// Declares implements plane.Reports.
func (p *Plane) Declares() plane.Declaration { return Declaration }

// Open makes the plane. The router is reached, or started, by Run.
func Open(cfg Config) *Plane {
	return &Plane{
		cfg: cfg, wake: make(chan struct{}, 1), endpoints: make(map[model.EndpointID]*endpoint),
		groups: groups{joined: make(map[model.EndpointID][]netip.Addr), made: make(map[model.EndpointID]changes), wake: make(chan struct{}, 1),
			members: make(map[netip.Addr]member)},
	}
}

// Name is the plane's.
func (p *Plane) Name() string { return "verbs" }

// Accepts implements plane.Endpoints: without a router's program there are no verbs.
func (p *Plane) Accepts(wanted model.EndpointPlanes) error {
	if !wanted.Verbs.Wanted {
		return nil
	}
	if wanted.Verbs.Outside && len(p.cfg.Outside) == 0 {
		return &api.Error{Code: api.CodeUnavailable, Field: "verbs", Message: "outside: this node reaches no peers without Heddle",
			Remedy: "start heddled with --rdma-device and --rdma-outside"}
	}
	p.mu.Lock()
	runs := p.router != nil
	p.mu.Unlock()
	if _, err := FindProgram(p.cfg.Self); err != nil && !runs {
		return &api.Error{Code: api.CodeUnavailable, Field: "verbs", Message: err.Error(),
			Remedy: "install it (the Debian package has it, `make build` makes it), or leave verbs away"}
	}
	return nil
}

// Recall implements plane.Endpoints.
func (p *Plane) Recall(e model.Endpoint, _ uint64) bool { return !e.Planes.Verbs.Wanted }

// Attach gives an endpoint that wants verbs its folder, and tells the router of it. What fails is a
// fault: the endpoint has its other planes all the same.
func (p *Plane) Attach(e model.Endpoint, _ netcfg.EndpointDevice) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ep, known := p.endpoints[e.ID]; known {
		if e.Planes.Verbs.VerbsEndpoint == ep.Planes.Verbs.VerbsEndpoint {
			return nil
		}
		if !e.Planes.Verbs.Wanted {
			p.cfg.Faults.Clear(FaultRouter, e.Name)
			return p.detach(ep.Endpoint)
		}
		ep.Endpoint = e
		p.tellIfThere(ep)
		return nil
	}
	if !e.Planes.Verbs.Wanted {
		return nil
	}
	ep := newEndpoint(e, folder.Of(p.cfg.SeccompSocket, e.ID))
	if !ep.hasSocket() {
		if err := ep.listen(); err != nil {
			p.fault(e.Name, err)
		}
	}
	p.endpoints[e.ID] = ep
	p.takeConnections(ep, firstPause)
	p.tellIfThere(ep)
	select {
	case p.wake <- struct{}{}:
	default: // it is awake
	}
	return nil
}

// takeConnections listens for those of others' queue pairs. A program of the endpoint may have the
// port: then it is tried again after pause, and ever more rarely. The caller holds mu.
func (p *Plane) takeConnections(ep *endpoint, pause time.Duration) {
	connections, err := p.cfg.Sockets.ListenRDMA(ep.ID, Port, ep.Addr6().IsValid())
	if err == nil {
		ep.connections = connections
		p.accepting.Go(func() { p.accept(ep, connections) })
		p.cfg.Faults.Clear(FaultRouter, ep.Name)
		return
	}
	p.fault(ep.Name, fmt.Errorf("others cannot connect to its queue pairs: %w", err))
	time.AfterFunc(pause, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if !p.closed && p.endpoints[ep.ID] == ep {
			p.takeConnections(ep, min(2*pause, lastPause))
		}
	})
}

// Detach ends all that the endpoint has at the router, and removes its folder.
func (p *Plane) Detach(e model.Endpoint) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.detach(e)
}

// detach is Detach for a caller who holds mu.
func (p *Plane) detach(e model.Endpoint) error {
	ep, known := p.endpoints[e.ID]
	if known {
		delete(p.endpoints, e.ID)
		delete(p.groups.joined, e.ID)
		delete(p.groups.made, e.ID)
		ep.close()
		if ep.router != nil {
			p.send(ep.router, plain(protocol.TypeRemove, ep.number), nil)
			p.letEnd(ep.router)
		}
	}
	if !e.Planes.Verbs.Wanted {
		return nil
	}
	return os.RemoveAll(folder.Of(p.cfg.SeccompSocket, e.ID))
}

// Keep removes the folders of endpoints that are not in keep. The router hears of them when it is
// told of all that there are.
func (p *Plane) Keep(keep map[model.EndpointID]bool) (map[string]int, error) {
	p.mu.Lock() // a socket is made beside its folder, and moved there
	defer p.mu.Unlock()
	top := folder.All(p.cfg.SeccompSocket)
	all, err := os.ReadDir(top)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	removed := 0
	errs := []error{err}
	for _, f := range all {
		id, err := strconv.ParseUint(f.Name(), 10, 32)
		if err == nil && keep[model.EndpointID(id)] {
			continue
		}
		errs = append(errs, os.RemoveAll(filepath.Join(top, f.Name())))
		removed++
	}
	return map[string]int{"folders": removed}, errors.Join(errs...)
}

// Run keeps a router for the endpoints that want one, until ctx ends. The router lives on.
func (p *Plane) Run(ctx context.Context) error {
	var old sync.WaitGroup
	defer old.Wait()
	old.Go(func() { p.keepGroups(ctx) })
	old.Go(func() { program(p.cfg.Self, p.cfg.StateDir).BoundLog(ctx, p.cfg.Log) })
	// One that runs for endpoints that there are no more has to hear of that.
	l, err := p.inherit(ctx, &old)
	for pause := firstPause; ; {
		if l == nil {
			if !p.await(ctx) {
				return nil
			}
			l, err = p.reach()
		}
		began, ended := time.Now(), l != nil
		if ended {
			err = p.serve(ctx, l)
			l = nil
		}
		if ctx.Err() != nil {
			return nil
		}
		p.refuse(ended)
		p.fault("", err)
		if time.Since(began) > lastPause {
			pause = firstPause
			continue // it was well for a while
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
			pause = min(2*pause, lastPause)
		}
	}
}

// await waits until an endpoint wants verbs; false: ctx has ended before.
func (p *Plane) await(ctx context.Context) bool {
	for {
		p.mu.Lock()
		some := len(p.endpoints) > 0
		p.mu.Unlock()
		if some {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-p.wake:
		}
	}
}

// refuse has programs learn at once that there is no router; ended says that there was one.
func (p *Plane) refuse(ended bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ended {
		p.ended++
	}
	for _, ep := range p.endpoints {
		ep.closeListener()
	}
}

// serve tells the router of all endpoints and hears it until it ends.
func (p *Plane) serve(ctx context.Context, l *link) error {
	ctx, cancel := context.WithCancel(ctx)
	var connecting sync.WaitGroup // a goroutine for each CONNECT
	defer connecting.Wait()
	defer cancel()
	defer context.AfterFunc(ctx, l.close)()
	defer l.close()
	p.introduce(l)
	connecting.Go(func() { p.poll(ctx) })
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.router = nil
		p.lost(l)
	}()
	for {
		m, err := l.receive()
		switch {
		case errors.Is(err, io.EOF):
			return fmt.Errorf("%s, process %d, has ended; it is started again", Program, l.PID)
		case err != nil:
			return fmt.Errorf("hear %s, process %d: %w", Program, l.PID, err)
		case m.Type == protocol.TypeHello && m.number != protocol.Version:
			return fmt.Errorf("%s, process %d, speaks version %d, and this agent %d: end it, and its programs open the device again",
				Program, l.PID, m.number, protocol.Version)
		case m.Type == protocol.TypeHello:
			if p.cfg.Faults.Clear(FaultRouter, "") {
				p.cfg.Log.Info("router of the verbs plane is there again", "pid", l.PID)
			}
		case m.Type == protocol.TypeRefused:
			p.refused(m)
		default:
			p.hear(ctx, l, m, &connecting)
		}
	}
}

// hear does what a router asks for. connecting has what takes longer.
func (p *Plane) hear(ctx context.Context, l *link, m heard, connecting *sync.WaitGroup) {
	switch {
	case m.Type == protocol.TypeConnect:
		connecting.Go(func() { p.connect(ctx, l, m) })
	case m.Type == protocol.TypeAsk:
		p.answer(l, m)
	case m.Type == protocol.TypeStatistics && m.Endpoint != 0:
		p.lastCounts(m)
	case m.Type == protocol.TypeStatistics:
		m.statistics.records = bytes.Clone(m.statistics.records)
		select {
		case <-l.answers: // one for which nobody waited any more
		default:
		}
		l.answers <- m // there is room: nobody else sends
	case m.Type == protocol.TypeReleased:
		p.released(l, m)
	case m.Type == protocol.TypeGroups:
		p.hearGroups(l, m)
	}
}

// numbered gives the endpoint that has a number at a router, if that router has it.
func (p *Plane) numbered(l *link, number uint64) (id model.EndpointID, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ep := range p.endpoints {
		if ep.number == number && ep.router == l {
			return ep.ID, true
		}
	}
	return 0, false
}

// lost forgets a router that speaks no more. The caller holds mu.
func (p *Plane) lost(l *link) {
	close(l.done)
	for _, ep := range p.endpoints {
		if ep.router == l {
			ep.router = nil
			ep.counted.restart()
		}
	}
}

// introduce says what there is to a router, which may know some of it.
func (p *Plane) introduce(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.router = l
	p.send(l, helloMessage(), nil)
	p.send(l, plain(protocol.TypeBegin, 0), nil)
	for _, ep := range p.endpoints {
		if ep.connections != nil {
			p.cfg.Faults.Clear(FaultRouter, ep.Name)
		}
		if ep.router == nil { // no old one has it
			p.tellIfThere(ep)
		}
	}
	p.tellAllGroups(l)
	p.send(l, plain(protocol.TypeEnd, 0), nil)
}

// tellIfThere tells the router that has the endpoint, or is to have it, unless that is told of all
// later. The caller holds mu.
func (p *Plane) tellIfThere(ep *endpoint) {
	if ep.router == nil {
		ep.router = p.router
	}
	if ep.router == nil {
		return
	}
	p.send(ep.router, endpointMessage(ep.number, ep.Endpoint, p.cfg), ep.listener)
	ep.closeListener() // the router has it, or the socket is made anew
}

// send sends a message to a router. After an error whoever receives finds the connection closed.
// The caller holds mu.
func (p *Plane) send(l *link, message []byte, file *os.File) {
	if err := l.send(message, file); err != nil {
		l.close()
	}
}

// refused hears that the router does not have an endpoint. It has no socket of one that it did not
// know: then it gets one.
func (p *Plane) refused(m heard) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ep := range p.endpoints {
		if ep.number != m.Endpoint {
			continue
		}
		err := m.refusal()
		if errors.Is(err, unix.EBADF) {
			if err = ep.listen(); err == nil {
				p.tellIfThere(ep)
				return
			}
		}
		p.fault(ep.Name, err)
		time.AfterFunc(lastPause, func() { p.tellAgain(ep) })
	}
}

// tellAgain tells the router of an endpoint that it refused.
func (p *Plane) tellAgain(ep *endpoint) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ep.router == nil || p.endpoints[ep.ID] != ep {
		return // it is told of all when it is there, or of this one no more
	}
	p.cfg.Faults.Clear(FaultRouter, ep.Name)
	p.tellIfThere(ep)
}

// fault notes that the router, or an endpoint of it, is not there.
func (p *Plane) fault(endpoint string, err error) {
	if p.cfg.Faults.Set(FaultRouter, endpoint, err) {
		p.cfg.Log.Error("no verbs; will try again", "reason", FaultRouter, "endpoint", endpoint, "err", err)
	}
}

// FillStatus says how the router is.
func (p *Plane) FillStatus(_ context.Context, st *api.Status) error {
	r := p.Router()
	st.Router = &r
	return nil
}

// Router reports the router's state.
func (p *Plane) Router() api.Router {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := api.Router{Endpoints: len(p.endpoints), Ended: p.ended, State: api.RouterNone}
	switch {
	case p.router != nil:
		r.State, r.PID = api.RouterRuns, p.router.PID
	case len(p.endpoints) > 0:
		r.State = api.RouterDown
	}
	for _, l := range p.old {
		r.Old = append(r.Old, api.OldRouter{PID: l.PID, Endpoints: p.kept(l)})
	}
	return r
}

// routers gives all that speak to the agent. The caller holds mu.
func (p *Plane) routers() []*link {
	if p.router == nil {
		return slices.Clone(p.old)
	}
	return append(slices.Clone(p.old), p.router)
}

// Close hangs up. The router lives on, for the next agent.
func (p *Plane) Close() error {
	p.mu.Lock()
	p.closed = true
	for _, l := range p.routers() {
		l.close()
	}
	for _, ep := range p.endpoints {
		ep.close()
	}
	p.mu.Unlock()
	p.accepting.Wait()
	return nil
}
