package trap

import (
	"context"
	"errors"
	"sync/atomic"

	"heddle.dev/heddle/internal/model"
)

// Handler answers trapped calls of some kind. Its methods are called by several threads at a time.
type Handler interface {
	// Owns reports whether a call is the handler's. It judges by the call's number and integers:
	// what those point to may change between the look and the answer.
	Owns(d *Data) bool
	// Answer answers one call, by a method of c, and returns nil. After an error the caller, if it
	// still waits, is told the errno of the error's Reason; after ErrAgentEnds the call is the next
	// agent's.
	Answer(c *Call) error
	// Reasons are those that Answer gives.
	Reasons() []*Reason
}

// EndpointHandler is a Handler whose calls are answered for an endpoint, which Call.Endpoint gives.
// Its calls continue in containers that are not intercepted, and where the endpoint is not made
// yet.
type EndpointHandler interface {
	Handler
	// Bound says that ep has a listener, Released that it has none any more, or was removed.
	// Neither blocks; Bound comes before the first call.
	Bound(ep *Endpoint)
	Released(ep *Endpoint)
}

// ListenerHandler is a Handler that keeps something for each listener.
type ListenerHandler interface {
	Handler
	// Annotations are the names of those that it asks listeners for: they are kept while no agent
	// runs, and no others.
	Annotations() []string
	// Opened comes before a listener's first call, Closed after its last. Opened does not block.
	Opened(l *Listener)
	Closed(l *Listener)
}

// RunningHandler is a Handler that does something by itself.
type RunningHandler interface {
	Handler
	// Run returns when ctx is done. Listeners are served meanwhile.
	Run(ctx context.Context)
}

// ClosingHandler is a Handler that has something to give up when the last call is answered and Run
// has returned.
type ClosingHandler interface {
	Handler
	Close()
}

// ErrAgentEnds is what Answer returns to leave a call to the next agent.
var ErrAgentEnds = errors.New("agent ends")

// handling is a handler of a server's.
type handling struct {
	Handler
	endpoints   EndpointHandler // the same, or nil
	redelivered atomic.Uint64
}

func newHandlings(handlers []Handler) (out []*handling) {
	for _, h := range handlers {
		endpoints, _ := h.(EndpointHandler)
		out = append(out, &handling{Handler: h, endpoints: endpoints})
	}
	return out
}

// handlerOf finds the handler of a call; nil if it is nobody's.
func (s *Server) handlerOf(d *Data) *handling {
	for _, h := range s.handlers {
		if h.Owns(d) {
			return h
		}
	}
	return nil
}

// dispatch has the reader's call answered. After an error the caller still waits, unless it has
// gone.
func (r *reader) dispatch() error {
	c := &r.call
	c.handler = r.srv.handlerOf(c.Data())
	if c.handler == nil || c.handler.endpoints != nil && !r.Intercepted() {
		return c.PassThrough()
	}
	if c.handler.endpoints != nil {
		if passed, err := r.findEndpoint(c); passed || err != nil {
			return err
		}
	}
	return c.handler.Answer(c)
}

// findEndpoint gives the call its endpoint, which a listener may have to be bound to first. passed
// says that the call went on in its own namespace, which has no endpoint.
func (r *reader) findEndpoint(c *Call) (passed bool, err error) {
	if r.byNetns() && !r.hasEndpoint() {
		found, err := r.bindEndpoint(c.Thread())
		if err != nil {
			return false, r.srv.why.netns.Because(err)
		}
		if !found && r.ep.Load() == nil {
			return true, c.passFor(&r.srv.why.noEndpoint, errNoEndpoint)
		}
	}
	c.Endpoint = r.ep.Load()
	if c.Endpoint == nil || c.Endpoint.Removed() {
		return false, r.srv.why.unknown.Because(errUnknownEndpoint)
	}
	return false, nil
}

var (
	errUnknownEndpoint = errors.New("no such endpoint, or removed")
	errNoEndpoint      = errors.New("the caller's network namespace has no endpoint (yet)")
	errOtherNetns      = errors.New("caller is not in its endpoint's network namespace: its sockets are of its own")
)

// Endpoint is what the listeners of one endpoint share.
type Endpoint struct {
	ID      model.EndpointID
	removed atomic.Bool // set once by Server.Forget, read for every call
	users   int         // running listeners; guarded by Server.mu
}

// Removed reports whether the endpoint was removed.
func (e *Endpoint) Removed() bool { return e.removed.Load() }

// Remove marks the endpoint as removed.
func (e *Endpoint) Remove() { e.removed.Store(true) }
