package trap

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/fdkeep"
	"heddle.dev/heddle/internal/model"
)

// Listener is one seccomp filter whose trapped calls are answered, by one reader or several
// (reader.go).
type Listener struct {
	srv   *Server
	fd    int
	state specs.ContainerProcessState

	// ep is nil as long as the endpoint is unknown: every call for it gets ENETDOWN. Changed with
	// Server.mu held.
	ep atomic.Pointer[Endpoint]

	// Set before the first reader begins. Empty, -1 and nil if the listener cannot be kept.
	key    string          // the keeper's name for it
	pageFD int             // memfd of page
	page   fdkeep.CallPage // shared memory that holds inflight
	syncs  bool            // callers wake readers on their own processor

	// inflight are the calls being answered, one for each reader; zero while there is none. When
	// the listener is kept, they lie in memory the keeper keeps too, so that the next agent can
	// answer a call this one received.
	inflight [maxReaders]*inflightCall

	hasLeft atomic.Bool // an agent before left calls, which no reader has taken up yet

	receiving futexMutex // of the readers, to wait for a call and receive it
	// Guarded by receiving: calls so far; the thread that made the last one, and how many it made
	// in a row before that; calls in a row that were there before anybody waited for one, and
	// whether they are of several threads.
	received, lastCaller, alone, crowded uint32
	mixed                                bool

	readers   sync.WaitGroup            // helpers
	answering [maxReaders]atomic.Uint64 // call ids, each written by its reader
	answered  futexEvent                // signalled when one less is being answered
	closing   [maxReaders]atomic.Int32  // threads of readers that close what they gave; 0: none

	// interrupted is when a signal was last seen to take a caller out of its call, in nanoseconds
	// since 1970; 0: never.
	interrupted atomic.Int64

	deferMu    sync.RWMutex // held for reading while a deferred call is answered
	deferEnded bool         // guarded by deferMu: deferred calls are the next agent's

	mu          sync.Mutex // guards what follows; never held across a system call
	deferred    deferredCalls
	reads       [maxReaders]bool // places among the readers that are taken; the first is the primary's
	undelivered undeliveredByThread
	visitsSince time.Time // when the first of visits came
	visits      int       // of threads for a call, of late (watch.go)
	logged      map[*Reason]bool

	keepMu sync.Mutex // held while the descriptors are being kept; guards closed
	closed bool       // the descriptors are not ours any more
}

// newListener makes a listener that cannot be kept.
func newListener(s *Server, fd int, state specs.ContainerProcessState) *Listener {
	l := &Listener{srv: s, fd: fd, pageFD: -1, state: state, reads: [maxReaders]bool{true}}
	for i := range l.inflight {
		l.inflight[i] = new(inflightCall)
	}
	return l
}

// interruptedFor is how long callers are taken to be interrupted again.
const interruptedFor = time.Minute

// isInterrupted reports whether signals interrupt callers.
func (l *Listener) isInterrupted() bool {
	at := l.interrupted.Load()
	return at != 0 && time.Since(time.Unix(0, at)) < interruptedFor
}

// refused gives an error of the kernel's about a call of a thread, if it is one, with its reason,
// and notes whether a signal is that.
func (l *Listener) refused(tid uint32, err error) error {
	if err == nil {
		return nil
	}
	why := l.srv.why.ofAnswer(err)
	if why == &l.srv.why.callerGone {
		if _, err := l.srv.proc.Owner(tid); err == nil { // else it was killed
			l.interrupted.Store(time.Now().UnixNano())
		}
	}
	return why.Because(err)
}

// byNetns reports whether the listener's endpoint is that of its callers' network namespace.
func (l *Listener) byNetns() bool { return l.state.Metadata == model.EndpointByNetns }

// Intercepted reports whether calls of the listener's container are answered for an endpoint. Of
// one that is not intercepted, those are answered that need none.
func (l *Listener) Intercepted() bool { return l.state.Metadata != model.EndpointNone }

// Annotation gives an annotation of the listener's container. Those that a ListenerHandler names
// outlive the agent.
func (l *Listener) Annotation(name string) string { return l.state.State.Annotations[name] }

// hasEndpoint reports whether the listener has an endpoint that is there.
func (l *Listener) hasEndpoint() bool {
	ep := l.ep.Load()
	if ep == nil || ep.Removed() {
		return false
	}
	if l.srv.cfg.NetnsOf == nil {
		return true
	}
	_, ok := l.srv.cfg.NetnsOf(ep.ID)
	return ok
}

// bindEndpoint gives the listener the endpoint of the network namespace that thread tid is in. An
// engine may make the endpoint after it has made the container, and another one later.
func (l *Listener) bindEndpoint(tid uint32) (found bool, err error) {
	inode, err := l.srv.proc.Netns(tid)
	if err != nil {
		return false, fmt.Errorf("network namespace of thread %d: %w", tid, err)
	}
	id, found := l.srv.cfg.EndpointIn(inode)
	if found {
		l.srv.move(l, id)
	}
	return found, nil
}

// fail counts a failure and logs the first of its kind.
func (l *Listener) fail(why *Reason, err error) {
	why.Add()
	if why.Quiet || !l.first(why) {
		return
	}
	id := model.EndpointID(0)
	if ep := l.ep.Load(); ep != nil {
		id = ep.ID
	}
	l.srv.log.Error("trapped call not answered as it should be", "reason", why.Name, "err", err,
		"container", l.state.State.ID, "metadata", l.state.Metadata, "endpoint_id", id)
}

// first reports whether this is the first failure of its kind, and notes it.
func (l *Listener) first(why *Reason) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.logged[why] {
		return false
	}
	if l.logged == nil {
		l.logged = map[*Reason]bool{}
	}
	l.logged[why] = true
	return true
}

// close releases what the readers held, once they have ended. The filter lives on if the keeper
// holds the listener.
func (l *Listener) close() {
	l.endDeferred()
	l.keepMu.Lock()
	defer l.keepMu.Unlock()
	l.closed = true
	closeFD(l.fd)
	if l.pageFD >= 0 {
		closeFD(l.pageFD)
	}
	if l.page != nil {
		l.inflight = [maxReaders]*inflightCall{}
		_ = unix.Munmap(l.page) // fails only for an address that is not mapped
	}
}
