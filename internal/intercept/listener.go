package intercept

import (
	"errors"
	"fmt"
	"runtime"
	"sync"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// listener answers the trapped calls of one seccomp filter. Its loop goroutine owns all of it but what says
// otherwise.
type listener struct {
	srv   *Server
	ep    *endpoint // nil: unknown, every request for a socket gets ENETDOWN
	fd    int
	state specs.ContainerProcessState

	// Set before the loop begins. Empty, -1 and nil if the listener cannot be parked.
	key    string // the parker's name for it
	pageFD int    // memfd of page
	page   []byte // shared memory that holds flight

	// flight is the call being answered; zero while there is none. When the listener is parked, it lies
	// in memory the parker keeps too, so that the next agent can answer a call this one received.
	flight *flight
	// strays are sockets that interrupted callers got and were not told of.
	strays strays
	logged [numFailures]bool
	crates shelf // those its programs hold

	parkMu sync.Mutex // held while the descriptors are being parked; guards closed
	closed bool       // the descriptors are not ours any more
}

// run answers calls until the filter has no users left (it reports true then), the server closes, or the
// listener breaks.
func (l *listener) run() (finished bool) {
	// Not unlocked: the thread's signals stay blocked, so it must end with this goroutine.
	runtime.LockOSThread()
	if err := blockSignals(); err != nil {
		l.fail(failReceive, fmt.Errorf("block signals: %w", err))
		return false
	}
	if err := yieldToCallers(); err != nil {
		l.srv.log.Warn("answers will be slower", "err", err)
	}
	if l.flight.call.ID != 0 {
		l.finish()
	}
	for {
		end, err := l.wait()
		if err != nil {
			l.fail(failReceive, err)
			return false
		}
		switch end {
		case endFilter:
			return true
		case endServer:
			return false
		}
		// RECV does not block now. ENOENT: the caller was killed since poll saw it.
		switch err := receive(l.fd, &l.flight.call); {
		case err == nil:
			l.handle()
		case !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINTR):
			l.fail(failReceive, fmt.Errorf("receive: %w", err))
			return false
		}
	}
}

type end int

const (
	endNot end = iota
	endFilter
	endServer
)

// wait blocks until a call is there or the loop has to end.
func (l *listener) wait() (end, error) {
	fds := [2]unix.PollFd{{Fd: int32(l.fd), Events: unix.POLLIN}, {Fd: int32(l.srv.stopFD), Events: unix.POLLIN}}
	for {
		_, err := unix.Poll(fds[:], -1)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return endNot, fmt.Errorf("poll: %w", err)
		case fds[1].Revents != 0:
			return endServer, nil
		case fds[0].Revents&unix.POLLIN != 0:
			return endNot, nil
		case fds[0].Revents&unix.POLLHUP != 0:
			return endFilter, nil
		case fds[0].Revents&unix.POLLNVAL != 0:
			return endNot, errors.New("poll: descriptor was closed")
		}
	}
}

// finish answers the call that the agent before us received. How far it came is not known: the caller may
// have its socket, and then must be told where, not be given another.
func (l *listener) finish() {
	n := &l.flight.call
	if l.flight.inode == 0 {
		l.handle()
		return
	}
	number, found, err := l.srv.proc.findSocket(n.PID, l.flight.inode)
	if err != nil {
		l.srv.log.Warn("cannot tell whether a caller has its socket already; it may get a second one", "err", err,
			"container", l.state.State.ID, "pid", n.PID)
	}
	if !found {
		l.handle()
		return
	}
	if err := sendValue(l.fd, n.ID, number); err == nil {
		l.srv.counters.answered.Add(1)
		l.srv.counters.inline.Add(1)
	} // or it had its answer
	*l.flight = flight{}
}

// handle answers the call in flight and clears it: RECV insists on zeroes, and a zero id says that nothing
// waits.
func (l *listener) handle() {
	n := &l.flight.call
	f, err := l.answer(n)
	if errors.Is(err, errServerCloses) {
		return // the next agent's to answer
	}
	if f != failNone {
		if f != failCallerGone {
			serr := sendErrno(l.fd, n.ID, errnoOf(f, err))
			if serr != nil && gone(serr) {
				f, err = failCallerGone, serr
			}
		}
		l.fail(f, err)
	}
	*l.flight = flight{}
}

// answer answers one call with a socket or lets it continue. On failure the caller still waits, unless
// the failure is that it has gone.
func (l *listener) answer(n *notification) (failure, error) {
	if c, ok := classifyIoctl(&n.Data); ok && model.ProtectIoctls.On() {
		return l.answerIoctl(n, c)
	}
	req, ok := classify(&n.Data)
	if !ok {
		if err := sendContinue(l.fd, n.ID); err != nil {
			return injectFailure(err), err
		}
		l.srv.counters.continued.Add(1)
		return failNone, nil
	}
	if l.byNetns() && !l.settled() {
		if found, err := l.settle(n.PID); err != nil {
			return failNetns, fmt.Errorf("network namespace of thread %d: %w", n.PID, err)
		} else if !found && l.ep == nil {
			return l.leaveAlone(n, failNoEndpoint, errNoEndpoint)
		}
	}
	if l.ep == nil || l.ep.removed.Load() {
		return failUnknown, errUnknownEndpoint
	}
	if l.srv.cfg.AdmitCompares && n.PID != 0 && len(l.strays) == 0 {
		return l.giveCompared(n, req)
	}
	if foreign, err := l.foreign(n.PID); err != nil {
		return failNetns, fmt.Errorf("network namespace of thread %d: %w", n.PID, err)
	} else if foreign {
		return l.leaveAlone(n, failForeignNetns, errForeignNetns)
	}
	own, err := l.srv.proc.ownerOf(n.PID)
	if err != nil {
		return failOwner, fmt.Errorf("owner of thread %d: %w", n.PID, err)
	}
	return l.give(n, req, traits{own: own, nonblock: req.nonblock, mptcp: req.mptcp}, model.Caller{})
}

// giveCompared answers a call with a socket made for a caller like the last. Whether this one is like it, and in the
// endpoint's network namespace, is seen together with the count of the socket.
func (l *listener) giveCompared(n *notification, req request) (failure, error) {
	caller := model.Caller{Thread: n.PID, AnyOwner: !model.ProtectUser.On()}
	if l.srv.cfg.NetnsOf != nil && model.ProtectNetns.On() {
		want, ok := l.srv.cfg.NetnsOf(l.ep.id)
		if !ok {
			return l.leaveAlone(n, failForeignNetns, errForeignNetns)
		}
		caller.Netns = uint32(want) // inodes of namespaces have 32 bits
	}
	own := l.ep.stock(req.family).lastOwner()
	why, err := l.give(n, req, traits{own: own, nonblock: req.nonblock, mptcp: req.mptcp}, caller)
	if why == failNone || why == failCallerGone || why == failQuota {
		return why, err
	}
	// There was no socket to be compared with: one in another namespace has no need of it.
	if foreign, ferr := l.foreign(n.PID); ferr == nil && foreign {
		return l.leaveAlone(n, failForeignNetns, errForeignNetns)
	}
	return why, err
}

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
	want, ok := l.srv.cfg.NetnsOf(l.ep.id)
	return !ok || have != want, nil
}

// byNetns reports whether the listener's endpoint is that of its callers' network namespace.
func (l *listener) byNetns() bool { return l.state.Metadata == model.EndpointByNetns }

// settled reports whether the listener has an endpoint that is there.
func (l *listener) settled() bool {
	if l.ep == nil || l.ep.removed.Load() {
		return false
	}
	if l.srv.cfg.NetnsOf == nil {
		return true
	}
	_, ok := l.srv.cfg.NetnsOf(l.ep.id)
	return ok
}

// settle gives the listener the endpoint of the network namespace that thread tid is in. An engine may make the endpoint
// after it has made the container, and another one later.
func (l *listener) settle(tid uint32) (found bool, err error) {
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

// leaveAlone lets a caller that is not in its endpoint's network namespace, or has no endpoint, have its socket in its
// own, as it would without Heddle.
func (l *listener) leaveAlone(n *notification, why failure, err error) (failure, error) {
	if err := sendContinue(l.fd, n.ID); err != nil {
		return injectFailure(err), err
	}
	l.srv.counters.continued.Add(1)
	l.fail(why, err)
	return failNone, nil
}

// give answers a call with a socket. What is not needed by the caller happens after it has its answer.
func (l *listener) give(n *notification, req request, want traits, caller model.Caller) (failure, error) {
	if len(l.strays) > 0 && l.giveStray(n, req) {
		return failNone, nil
	}
	if done, why, err := l.giveCrate(n, req, want, caller); done {
		return why, err
	}
	st, r := l.ep.stock(req.family), &l.srv.refiller
	s, ready, refill, err := r.take(st, want)
	if refill {
		defer r.request(st)
	}
	if err != nil {
		return makeFailure(err), err
	}
	switch err := l.admit(n, st, &s, want, caller); {
	case err == nil:
	case errors.Is(err, model.ErrOtherNetns):
		r.giveBack(st, s)
		return l.leaveAlone(n, failForeignNetns, errForeignNetns)
	case errors.Is(err, model.ErrSocketQuota):
		r.giveBack(st, s)
		return failQuota, err
	case errors.Is(err, errOwner):
		closeFD(s.fd)
		return failOwner, err
	default:
		closeFD(s.fd)
		return failMake, err
	}
	l.flight.inode = s.inode // before the caller can have it: see finish
	number, err := addDescriptor(l.fd, n.ID, s.fd, req.closeOnExec)
	if err != nil {
		closeFD(s.fd) // and with it what Admit counted
		return injectFailure(err), fmt.Errorf("give socket to caller: %w", err)
	}
	// Before the caller goes on: its close() must be the last.
	closeFD(s.fd)
	if err := sendValue(l.fd, n.ID, number); err != nil {
		l.strays.add(n.PID, stray{inode: s.inode, number: number, request: req})
		return injectFailure(err), fmt.Errorf("tell caller its socket: %w", err)
	}
	c := &l.srv.counters
	c.answered.Add(1)
	if ready {
		c.premade.Add(1)
	} else {
		c.inline.Add(1)
	}
	return failNone, nil
}

// admit makes the socket what the caller wants and counts it. If the caller is another than the one it was made for, it is
// given to this one.
func (l *listener) admit(n *notification, st *stock, s *socket, want traits, caller model.Caller) error {
	maker := l.srv.refiller.maker
	if err := s.fit(maker, st.endpoint, want); err != nil {
		return fmt.Errorf("%w: %w", errOwner, err)
	}
	caller.UID, caller.GID = want.own.uid, want.own.gid
	err := maker.Admit(s.fd, caller)
	if !errors.Is(err, model.ErrOtherOwner) && !errors.Is(err, model.ErrNoCaller) {
		return err
	}
	own, err := l.srv.proc.ownerOf(n.PID)
	if err != nil {
		return fmt.Errorf("%w of thread %d: %w", errOwner, n.PID, err)
	}
	want.own = own
	st.learn(want)
	if err := s.fit(maker, st.endpoint, want); err != nil {
		return fmt.Errorf("%w: %w", errOwner, err)
	}
	caller.UID, caller.GID = own.uid, own.gid
	return maker.Admit(s.fd, caller)
}

var (
	errUnknownEndpoint = errors.New("no such endpoint, or removed")
	errOwner           = errors.New("owner")
	errNoEndpoint      = errors.New("the caller's network namespace has no endpoint (yet)")
	errForeignNetns    = errors.New("caller is not in its endpoint's network namespace: its sockets are of its own")
)

// fail counts a failure and logs the first of its kind.
func (l *listener) fail(f failure, err error) {
	l.srv.counters.failed[f].Add(1)
	if f == failCallerGone || f == failCallerNofile || f == failQuota || f == failNoEndpoint || l.logged[f] {
		return // the container's own doing, no fault, or said before
	}
	l.logged[f] = true
	l.srv.log.Error("socket call not answered with a socket", "reason", f.String(), "err", err,
		"container", l.state.State.ID, "metadata", l.state.Metadata, "endpoint_id", l.endpointID())
}

func (l *listener) endpointID() model.EndpointID {
	if l.ep == nil {
		return 0
	}
	return l.ep.id
}

// close releases what the loop held. The filter lives on if the parker holds the listener.
func (l *listener) close() {
	l.parkMu.Lock()
	defer l.parkMu.Unlock()
	l.closed = true
	l.crates.close()
	closeFD(l.fd)
	if l.pageFD >= 0 {
		closeFD(l.pageFD)
	}
	if l.page != nil {
		l.flight = nil
		_ = unix.Munmap(l.page) // fails only for an address that is not mapped
	}
}
