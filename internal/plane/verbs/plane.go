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
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/verbs/folder"
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
	// Limits are those of endpoints that have none themselves.
	Limits  model.VerbsLimits
	Sockets plane.Sockets
	Faults  plane.Faults
	Log     *slog.Logger
}

// Plane is the verbs plane of one node.
type Plane struct {
	cfg       Config
	wake      chan struct{}  // of Run: there is an endpoint
	accepting sync.WaitGroup // a goroutine for each endpoint

	asking sync.Mutex // one STATS at a time; taken before mu
	asked  uint32     // the tag of the last one; asking guards it

	mu        sync.Mutex // guards the rest; held while a message is sent
	closed    bool
	endpoints map[model.EndpointID]*endpoint
	router    *link  // nil: none
	ended     uint64 // how many routers have
	reported  time.Time
	reasons   [len(reasons)]uint64
}

var _ interface {
	plane.Plane
	plane.Status
	plane.RDMA
} = (*Plane)(nil)

// FaultRouter says that the router does not run, or does not have an endpoint: programs find no
// RDMA device.
const FaultRouter api.FaultReason = "verbs_router"

// Declaration is what the plane says of its names.
var Declaration = plane.Declaration{Reasons: reasons[:], Faults: []api.FaultReason{FaultRouter}}

// Declares implements plane.Reports.
func (p *Plane) Declares() plane.Declaration { return Declaration }

// Open makes the plane. The router is reached, or started, by Run.
func Open(cfg Config) *Plane {
	return &Plane{cfg: cfg, wake: make(chan struct{}, 1), endpoints: make(map[model.EndpointID]*endpoint)}
}

// Name is the plane's.
func (p *Plane) Name() string { return "verbs" }

// Accepts implements plane.Endpoints: without a router's program there are no verbs.
func (p *Plane) Accepts(wanted model.EndpointPlanes) error {
	if !wanted.Verbs.Wanted {
		return nil
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

// Attach gives an endpoint that wants verbs its folder, and tells the router of it. What fails is a
// fault: the endpoint has its other planes all the same.
func (p *Plane) Attach(e model.Endpoint, _ netcfg.EndpointDevice) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ep, known := p.endpoints[e.ID]; known {
		if e.Planes.Verbs == ep.Planes.Verbs {
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
	connections, err := p.cfg.Sockets.ListenAs(ep.ID, Port, ep.Addr6().IsValid())
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
		ep.close()
		if p.router != nil {
			p.send(head{kind: typeRemove, endpoint: ep.number}.append(nil), nil)
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
	top := filepath.Join(filepath.Dir(p.cfg.SeccompSocket), folder.Dir)
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
	// One that runs for endpoints that there are no more has to hear of that.
	l, err := adopt(filepath.Join(p.cfg.StateDir, socketFile))
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
		p.fault("", err)
		p.refuse(ended)
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
		close(l.done)
		for _, ep := range p.endpoints {
			ep.counted.restart()
		}
	}()
	for {
		m, err := l.receive()
		switch {
		case errors.Is(err, io.EOF):
			return fmt.Errorf("%s, process %d, has ended; it is started again", Program, l.pid)
		case err != nil:
			return fmt.Errorf("hear %s, process %d: %w", Program, l.pid, err)
		case m.kind == typeHello && m.number != protocolVersion:
			return fmt.Errorf("%s, process %d, speaks version %d, and this agent %d: end it, and its programs open the device again",
				Program, l.pid, m.number, protocolVersion)
		case m.kind == typeHello:
			if p.cfg.Faults.Clear(FaultRouter, "") {
				p.cfg.Log.Info("router of the verbs plane is there again", "pid", l.pid)
			}
		case m.kind == typeConnect:
			connecting.Go(func() { p.connect(ctx, l, m) })
		case m.kind == typeStatistics:
			m.statistics.records = bytes.Clone(m.statistics.records)
			select {
			case <-l.answers: // one for which nobody waited any more
			default:
			}
			l.answers <- m // there is room: nobody else sends
		default:
			p.refused(m)
		}
	}
}

// numbered gives the endpoint that has a number at the router.
func (p *Plane) numbered(number uint64) (id model.EndpointID, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ep := range p.endpoints {
		if ep.number == number {
			return ep.ID, true
		}
	}
	return 0, false
}

// introduce says what there is to a router, which may know some of it.
func (p *Plane) introduce(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.router = l
	p.send(helloMessage(), nil)
	p.send(head{kind: typeBegin}.append(nil), nil)
	for _, ep := range p.endpoints {
		if ep.connections != nil {
			p.cfg.Faults.Clear(FaultRouter, ep.Name)
		}
		p.tell(ep)
	}
	p.send(head{kind: typeEnd}.append(nil), nil)
}

// tell tells the router of an endpoint. The caller holds mu.
func (p *Plane) tell(ep *endpoint) {
	p.send(endpointMessage(ep.number, ep.Endpoint, p.cfg.Limits), ep.listener)
	ep.closeListener() // the router has it, or the socket is made anew
}

// tellIfThere tells the router of an endpoint, unless it is told of all later. The caller holds mu.
func (p *Plane) tellIfThere(ep *endpoint) {
	if p.router != nil {
		p.tell(ep)
	}
}

// send sends a message to the router. After an error whoever receives finds the connection closed.
// The caller holds mu.
func (p *Plane) send(message []byte, file *os.File) {
	if err := p.router.send(message, file); err != nil {
		p.router.close()
	}
}

// refused hears that the router does not have an endpoint. It has no socket of one that it did not
// know: then it gets one.
func (p *Plane) refused(m heard) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ep := range p.endpoints {
		if ep.number != m.endpoint {
			continue
		}
		err := m.refusal()
		if errors.Is(err, unix.EBADF) {
			if err = ep.listen(); err == nil {
				p.tell(ep)
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
	if p.router == nil || p.endpoints[ep.ID] != ep {
		return // it is told of all when it is there, or of this one no more
	}
	p.cfg.Faults.Clear(FaultRouter, ep.Name)
	p.tell(ep)
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
		r.State, r.PID = api.RouterRuns, p.router.pid
	case len(p.endpoints) > 0:
		r.State = api.RouterDown
	}
	return r
}

// Close hangs up. The router lives on, for the next agent.
func (p *Plane) Close() error {
	p.mu.Lock()
	p.closed = true
	if p.router != nil {
		p.router.close()
	}
	for _, ep := range p.endpoints {
		ep.close()
	}
	p.mu.Unlock()
	p.accepting.Wait()
	return nil
}
