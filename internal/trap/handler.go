package trap

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"

	"heddle.dev/heddle/internal/model"
)

// Handler answers trapped calls of some kind. Its methods are called by several threads at a time.
type Handler interface {
	// Owns reports whether a call may be the handler's. It judges by the call's number and
	// integers: what those point to may change between the look and the answer. Answer may find
	// that it is not, and leave it to other handlers that own it (Call.Next).
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
// yet. The caller may be in another network namespace than its endpoint's: before it gets anything
// of the endpoint's, Answer asks Call.InOtherNetns.
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

// AskedHandler is a Handler whose calls are questions of a library in the container, which asks
// again after EAGAIN: that is what it is told while no agent runs. fdkeep.Questions of them at
// most.
type AskedHandler interface {
	Handler
	// Asked gives the kind of the questions, as fdkeep.CallPage.SetQuestions has it; false if the
	// listener's container has no such library.
	Asked(l *Listener) (kind uint64, ok bool)
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

// Handle has calls answered by h, too, which the server closes from here on. Of several handlers
// that own a call the one that was registered last is asked first, and leaves those to the others
// that are not for it (Call.Next): so planes take calls from those that they stand on. All handlers
// are registered before Listen.
func (s *Server) Handle(h Handler) {
	if s.socket != nil {
		panic("trap: a handler after Listen: readers ask the list without a lock")
	}
	endpoints, _ := h.(EndpointHandler)
	s.handlers = slices.Insert(s.handlers, 0, &handling{Handler: h, endpoints: endpoints})
	if h, ok := h.(ListenerHandler); ok {
		s.annotations = append(s.annotations, h.Annotations()...)
	}
}

// dispatch has the reader's call answered. After an error the caller still waits, unless it has
// gone.
func (r *reader) dispatch() error {
	r.call.others = r.srv.handlers
	return r.call.Next()
}

// Next has the call answered by the next handler that owns it; if there is none, the kernel goes on
// with it. It is for an Answer that has looked at no more than integers and the endpoint, and finds
// that the call is not for it: the endpoint has not chosen its plane, say.
func (c *Call) Next() error {
	for len(c.others) > 0 {
		h := c.others[0]
		c.others = c.others[1:]
		if !h.Owns(c.Data()) || h.endpoints != nil && !c.reader.Intercepted() {
			continue
		}
		if h.endpoints != nil && c.Endpoint == nil {
			if passed, err := c.reader.findEndpoint(c); passed || err != nil {
				return err
			}
		}
		c.handler = h
		return h.Answer(c)
	}
	return c.PassThrough()
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
