package intercept

import (
	"sync"
	"sync/atomic"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// listener is one seccomp filter whose trapped calls are answered, by one reader or several (reader.go).
type listener struct {
	srv   *Server
	fd    int
	state specs.ContainerProcessState

	// ep is nil as long as the endpoint is unknown: every request for a socket gets ENETDOWN. Changed with Server.mu held.
	ep atomic.Pointer[endpoint]

	// Set before the first reader begins. Empty, -1 and nil if the listener cannot be kept.
	key    string // the keeper's name for it
	pageFD int    // memfd of page
	page   []byte // shared memory that holds inflight
	syncs  bool   // callers wake readers on their own processor

	// inflight are the calls being answered, one for each reader; zero while there is none. When the listener is kept, they
	// lie in memory the keeper keeps too, so that the next agent can answer a call this one received.
	inflight [maxReaders]*inflightCall

	receiving futexMutex // of the readers, to wait for a call and receive it
	// Guarded by receiving: calls so far; the thread that made the last one, and how many it made in a row before that; calls in a row
	// that were there before anybody waited for one, and whether they are of several threads.
	received, lastCaller, alone, crowded uint32
	mixed                                bool

	readers   sync.WaitGroup            // helpers
	answering [maxReaders]atomic.Uint64 // call ids, each written by its reader
	answered  futexEvent                // signalled when one less is being answered
	closing   [maxReaders]atomic.Int32  // threads of readers that close a socket which they gave; 0: none

	mu          sync.Mutex       // guards what follows; never held across a system call
	reads       [maxReaders]bool // places among the readers that are taken
	undelivered undeliveredByThread
	logged      [numFailures]bool

	batches outstanding // those its programs hold

	keepMu sync.Mutex // held while the descriptors are being kept; guards closed
	closed bool       // the descriptors are not ours any more
}

// newListener makes a listener that cannot be kept.
func newListener(s *Server, fd int, state specs.ContainerProcessState) *listener {
	l := &listener{srv: s, fd: fd, pageFD: -1, state: state}
	for i := range l.inflight {
		l.inflight[i] = new(inflightCall)
	}
	return l
}

// byNetns reports whether the listener's endpoint is that of its callers' network namespace.
func (l *listener) byNetns() bool { return l.state.Metadata == model.EndpointByNetns }

// ioctlOnly reports whether the listener's container is not intercepted: its ioctls are answered, nothing else.
func (l *listener) ioctlOnly() bool { return l.state.Metadata == model.EndpointNone }

// foreign reports whether thread tid is in another network namespace than the listener's endpoint: it has unshared or
// changed its own, or its bundle names an endpoint that is not its. No check follows that tid still is the same
// task: a task cannot change its namespace while it waits for an answer, and the answer fails if it has gone.
func (l *listener) foreign(tid uint32) (bool, error) {
	if l.srv.cfg.NetnsOf == nil || !model.ProtectNetns.On() {
		return false, nil
	}
	have, err := l.srv.proc.netnsOf(tid)
	if err != nil {
		return false, err
	}
	ep := l.ep.Load()
	if ep == nil {
		return true, nil
	}
	want, ok := l.srv.cfg.NetnsOf(ep.id)
	return !ok || have != want, nil
}

// hasEndpoint reports whether the listener has an endpoint that is there.
func (l *listener) hasEndpoint() bool {
	ep := l.ep.Load()
	if ep == nil || ep.removed.Load() {
		return false
	}
	if l.srv.cfg.NetnsOf == nil {
		return true
	}
	_, ok := l.srv.cfg.NetnsOf(ep.id)
	return ok
}

// bindEndpoint gives the listener the endpoint of the network namespace that thread tid is in. An engine may make the endpoint
// after it has made the container, and another one later.
func (l *listener) bindEndpoint(tid uint32) (found bool, err error) {
	inode, err := l.srv.proc.netnsOf(tid)
	if err != nil {
		return false, err
	}
	id, found := l.srv.cfg.EndpointIn(inode)
	if found {
		l.srv.move(l, id)
	}
	return found, nil
}

// fail counts a failure and logs the first of its kind.
func (l *listener) fail(f failure, err error) {
	l.srv.counters.failed[f].Add(1)
	if f == failCallerGone || f == failCallerNofile || f == failQuota || f == failNoEndpoint || !l.first(f) {
		return // the container's own doing, no fault, or said before
	}
	l.srv.log.Error("socket call not answered with a socket", "reason", f.String(), "err", err,
		"container", l.state.State.ID, "metadata", l.state.Metadata, "endpoint_id", l.endpointID())
}

// first reports whether f is the first failure of its kind, and notes it.
func (l *listener) first(f failure) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	said := l.logged[f]
	l.logged[f] = true
	return !said
}

func (l *listener) endpointID() model.EndpointID {
	if ep := l.ep.Load(); ep != nil {
		return ep.id
	}
	return 0
}

// close releases what the readers held, once they have ended. The filter lives on if the keeper holds the listener.
func (l *listener) close() {
	l.keepMu.Lock()
	defer l.keepMu.Unlock()
	l.closed = true
	l.batches.close()
	closeFD(l.fd)
	if l.pageFD >= 0 {
		closeFD(l.pageFD)
	}
	if l.page != nil {
		l.inflight = [maxReaders]*inflightCall{}
		_ = unix.Munmap(l.page) // fails only for an address that is not mapped
	}
}
