package intercept

import (
	"errors"
	"fmt"
	"time"

	"heddle.dev/heddle/internal/model"
)

// finish answers the call that the agent before us received. How far it came is not known: the caller may
// have its socket, and then must be told where, not be given another.
func (r *reader) finish() {
	n := &r.inflight.call
	if r.inflight.inode == 0 {
		r.handle()
		return
	}
	number, found, err := r.srv.proc.findSocket(n.PID, r.inflight.inode)
	if err != nil {
		r.srv.log.Warn("cannot tell whether a caller has its socket already; it may get a second one", "err", err,
			"container", r.state.State.ID, "pid", n.PID)
	}
	if !found {
		r.handle()
		return
	}
	if err := sendValue(r.fd, n.ID, number); err == nil {
		r.srv.counters.answered.Add(1)
		r.srv.counters.misses.Add(1)
	} // or it had its answer
	*r.inflight = inflightCall{}
}

// handle answers the in-flight call and clears it: RECV insists on zeroes, and a zero id says that nothing
// waits.
func (r *reader) handle() {
	n := &r.inflight.call
	r.awaitEarlier()
	f, err := r.answer(n)
	if errors.Is(err, errServerCloses) {
		return // the next agent's to answer
	}
	if f != failNone {
		if f != failCallerGone {
			serr := sendErrno(r.fd, n.ID, errnoOf(f, err))
			if serr != nil && gone(serr) {
				f, err = failCallerGone, serr
			}
		}
		r.fail(f, err)
	}
	*r.inflight = inflightCall{}
}

// answer answers one call with a socket or lets it continue. On failure the caller still waits, unless
// the failure is that it has gone.
func (r *reader) answer(n *notification) (failure, error) {
	if c, ok := classifyIoctl(&n.Data); ok && model.ProtectIoctls.On() {
		return r.answerIoctl(n, c)
	}
	req, ok := classify(&n.Data)
	if !ok || r.ioctlOnly() {
		if err := sendContinue(r.fd, n.ID); err != nil {
			return injectFailure(err), err
		}
		r.srv.counters.continued.Add(1)
		return failNone, nil
	}
	if r.byNetns() && !r.hasEndpoint() {
		if found, err := r.bindEndpoint(n.PID); err != nil {
			return failNetns, fmt.Errorf("network namespace of thread %d: %w", n.PID, err)
		} else if !found && r.ep.Load() == nil {
			return r.passThrough(n, failNoEndpoint, errNoEndpoint)
		}
	}
	ep := r.ep.Load()
	if ep == nil || ep.removed.Load() {
		return failUnknown, errUnknownEndpoint
	}
	if r.redeliver(n, req) {
		return failNone, nil
	}
	if r.srv.cfg.AdmitCompares && n.PID != 0 {
		return r.giveCompared(n, req, ep)
	}
	if foreign, err := r.foreign(n.PID); err != nil {
		return failNetns, fmt.Errorf("network namespace of thread %d: %w", n.PID, err)
	} else if foreign {
		return r.passThrough(n, failForeignNetns, errForeignNetns)
	}
	own, err := r.srv.proc.ownerOf(n.PID)
	if err != nil {
		return failOwner, fmt.Errorf("owner of thread %d: %w", n.PID, err)
	}
	return r.give(n, req, ep, socketOptions{own: own, nonblock: req.nonblock, mptcp: req.mptcp}, model.Caller{})
}

// giveCompared answers a call with a socket made for a caller like the last. Whether this one is like it, and in the
// endpoint's network namespace, is seen together with the count of the socket.
func (r *reader) giveCompared(n *notification, req request, ep *endpoint) (failure, error) {
	caller := model.Caller{Thread: n.PID, AnyOwner: !model.ProtectUser.On()}
	if r.srv.cfg.NetnsOf != nil && model.ProtectNetns.On() {
		want, ok := r.srv.cfg.NetnsOf(ep.id)
		if !ok {
			return r.passThrough(n, failForeignNetns, errForeignNetns)
		}
		caller.Netns = uint32(want) // inodes of namespaces have 32 bits
	}
	own := ep.pool(req.family).lastOwner()
	why, err := r.give(n, req, ep, socketOptions{own: own, nonblock: req.nonblock, mptcp: req.mptcp}, caller)
	if why == failNone || why == failCallerGone || why == failQuota {
		return why, err
	}
	// There was no socket to be compared with: one in another namespace has no need of it.
	if foreign, ferr := r.foreign(n.PID); ferr == nil && foreign {
		return r.passThrough(n, failForeignNetns, errForeignNetns)
	}
	return why, err
}

// passThrough lets a caller that is not in its endpoint's network namespace, or has no endpoint, have its socket in its
// own, as it would without Heddle.
func (r *reader) passThrough(n *notification, why failure, err error) (failure, error) {
	if err := sendContinue(r.fd, n.ID); err != nil {
		return injectFailure(err), err
	}
	r.srv.counters.continued.Add(1)
	r.fail(why, err)
	return failNone, nil
}

// give answers a call with a socket. What is not needed by the caller happens after it has its answer.
func (r *reader) give(n *notification, req request, ep *endpoint, want socketOptions, caller model.Caller) (failure, error) {
	if done, why, err := r.giveBatch(n, req, ep, want, caller); done {
		return why, err
	}
	st, prefiller := ep.pool(req.family), &r.srv.prefiller
	s, ready, prefill, err := prefiller.take(st, want)
	if prefill == needSoon && !r.primary { // several ask: it will be needed sooner
		prefill = needNow
	}
	defer prefiller.request(st, prefill, r.affinity.letCallerRun)
	if err != nil {
		return makeFailure(err), err
	}
	switch err := r.admit(n, st, &s, &want, caller); {
	case err == nil:
	case errors.Is(err, model.ErrOtherNetns):
		prefiller.giveBack(st, s)
		return r.passThrough(n, failForeignNetns, errForeignNetns)
	case errors.Is(err, model.ErrSocketQuota):
		prefiller.giveBack(st, s)
		return failQuota, err
	case errors.Is(err, errOwner):
		closeFD(s.fd)
		return failOwner, err
	default:
		closeFD(s.fd)
		return failMake, err
	}
	r.inflight.inode = s.inode // before the caller can have it: see finish
	began := time.Now()
	number, err := addDescriptor(r.fd, n.ID, s.fd, req.closeOnExec)
	r.affinity.answered(time.Since(began))
	if err != nil {
		closeFD(s.fd) // and with it what Admit counted
		return injectFailure(err), fmt.Errorf("give socket to caller: %w", err)
	}
	// Before the caller goes on: its close() must be the last.
	r.closeGiven(s.fd)
	if err := sendValue(r.fd, n.ID, number); err != nil {
		r.addUndelivered(n.PID, undelivered{inode: s.inode, number: number, request: req})
		return injectFailure(err), fmt.Errorf("tell caller its socket: %w", err)
	}
	c := &r.srv.counters
	c.answered.Add(1)
	if ready {
		c.hits.Add(1)
	} else {
		c.misses.Add(1)
	}
	return failNone, nil
}

// admit makes the socket what the caller wants and counts it. If the caller is another than the one it was made for, it is
// given to this one, which is then also what want says.
func (r *reader) admit(n *notification, st *socketPool, s *socket, want *socketOptions, caller model.Caller) error {
	maker := r.srv.prefiller.maker
	if err := s.apply(maker, st.endpoint, *want); err != nil {
		return fmt.Errorf("%w: %w", errOwner, err)
	}
	caller.UID, caller.GID = want.own.uid, want.own.gid
	err := maker.Admit(s.fd, caller)
	if !errors.Is(err, model.ErrOtherOwner) && !errors.Is(err, model.ErrNoCaller) {
		return err
	}
	own, err := r.srv.proc.ownerOf(n.PID)
	if err != nil {
		return fmt.Errorf("%w of thread %d: %w", errOwner, n.PID, err)
	}
	want.own = own
	st.learn(*want)
	if err := s.apply(maker, st.endpoint, *want); err != nil {
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
