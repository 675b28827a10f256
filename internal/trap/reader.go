package trap

import (
	"errors"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/fdkeep"
)

const (
	// maxReaders bounds the threads that answer calls of one listener at a time. Each answer waits
	// for its caller to run and take the socket; more readers than processors let the others go on
	// meanwhile. What was tried is in docs/benchmarks/log.md.
	maxReaders = fdkeep.ReaderPlaces
	// crowdedAfter is how many calls in a row must have been there already before another reader
	// joins.
	crowdedAfter = 8
	// aloneAfter is how many calls in a row one thread must have made before the helpers end.
	aloneAfter = 32
	// atOnce is how quickly poll returns when a call was there.
	atOnce = 5 * time.Microsecond
	// maxHelpers bounds the helpers, of all listeners together: Go ends a process with 10,000
	// threads.
	maxHelpers = 256
	// helperStays is how long a helper waits for its turn, and then for a call, before it ends.
	helperStays = 5 * time.Millisecond
)

// reader is a thread that answers calls of a listener. Its goroutine owns it.
//
// Readers take turns: one waits for a call and receives it, then lets the next one wait while it
// answers. Two that wait would both be woken, and the one that comes late to RECV would block
// there, where it cannot be ended. A listener that has a call has one reader, its primary, until
// callers have to wait for it; those that join, the helpers, end when they have nothing to do.
type reader struct {
	*Listener
	call     Call
	slot     int
	tid      int32         // its thread
	inflight *inflightCall // the call it answers
	primary  bool
	stays    time.Duration // how long the primary waits for a call before it leaves

	yielder  Yielder
	affinity affinity // the primary's only
}

// callID says whose call a reader answers, and which: the thread in the lower half, in the upper
// one a number that each call gets in the order of receipt; 0 is none. A thread that was
// interrupted comes again before the reader of its first call knows (inflight.go): who answers the
// second call waits for the first.
type callID uint64

func callIDOf(tid, serial uint32) callID { return callID(serial)<<32 | callID(tid) }

// follows reports whether c is a later call than earlier, and of the same thread.
func (c callID) follows(earlier callID) bool {
	// Numbers come round; those at hand are few and close together.
	return uint32(c) == uint32(earlier) && uint32(c) != 0 && int32(uint32(c>>32)-uint32(earlier>>32)) > 0
}

// prepare makes the calling goroutine's thread one that answers, and counts it; leaves is what ends
// that.
func (r *reader) prepare(s *Server) bool {
	// Not unlocked: the thread's signals stay blocked, so it must end with this goroutine.
	runtime.LockOSThread()
	r.tid = int32(unix.Gettid())
	ownSlack()
	if err := blockSignals(); err != nil {
		s.why.receive.Add()
		s.log.Error("thread does not answer calls", "reason", s.why.receive.Name, "err", fmt.Errorf("block signals: %w", err))
		return false
	}
	if err := setBatchPolicy(); err != nil {
		s.log.Warn("reader keeps its scheduling policy: answers will be slower", "err", err)
	}
	s.readers.Add(1)
	s.monitor.change(1)
	return true
}

// leaves counts a thread out that prepare counted.
func (s *Server) leaves() {
	s.readers.Add(-1)
	s.monitor.change(-1)
}

// becomeReaderOf makes r the reader of a place among a listener's.
func (r *reader) becomeReaderOf(l *Listener, slot int) {
	r.Listener, r.slot, r.inflight, r.affinity = l, slot, l.inflight[slot], affinity{}
	r.call = Call{reader: r}
}

// finishLeft answers calls that the agent before us received, or had deferred. It reports false if
// they are the next agent's.
func (r *reader) finishLeft() bool {
	own := r.inflight
	defer func() { r.inflight = own }()
	for _, f := range r.Listener.inflight {
		if r.inflight = f; f.call.ID != 0 {
			r.finish()
		}
		if f.call.ID != 0 {
			return false
		}
	}
	r.inflight = own
	return r.resumeDeferred()
}

// read receives and answers calls until it has to end, and says why.
func (r *reader) read() end {
	for {
		how, err := r.next()
		if err != nil {
			r.fail(&r.srv.why.receive, err)
			return endBroken
		}
		if how != endNot {
			return how
		}
		r.handle()
		r.done()
		r.yielder.Yield(r.affinity.yieldToCaller)
		if r.inflight.call.ID != 0 {
			return endServer // it is the next agent's
		}
	}
}

type end int

const (
	endNot end = iota
	endFilter
	endServer
	endIdle   // nothing to do
	endBroken // the listener cannot be read
)

// next waits for the reader's turn, then for a call, and receives it.
func (r *reader) next() (end, error) {
	if !r.receiving.lock(r.turn()) {
		return endIdle, nil
	}
	defer r.receiving.unlock()
	if !r.primary && r.alone >= aloneAfter {
		return endIdle, nil
	}
	for {
		waited, end, err := r.wait()
		if err != nil || end != endNot {
			return end, err
		}
		// RECV does not block now. ENOENT: the caller was killed, or interrupted, since poll saw
		// it.
		switch err := receive(r.fd, &r.inflight.call); {
		case err == nil:
			r.note(waited)
			return endNot, nil
		case !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINTR):
			return endNot, fmt.Errorf("receive: %w", err)
		}
	}
}

// timeout is how long the reader waits for something to do.
func (r *reader) timeout() time.Duration {
	if r.primary {
		return r.stays
	}
	return helperStays
}

// turn is how long the reader waits for its turn: a helper that has it may wait for a call.
func (r *reader) turn() time.Duration {
	if r.primary {
		return -1
	}
	return helperStays
}

// note says whom the reader answers from now on, and lets another reader join when calls keep being
// there before anybody waits for one. It is the reader's turn, so calls get their numbers in the
// order of their receipt.
func (r *reader) note(waited bool) {
	tid := r.inflight.call.PID
	r.received++
	r.answering[r.slot].Store(uint64(callIDOf(tid, r.received)))
	// A thread that calls again as soon as it has its answer is there before its reader, too, and
	// has no use for another one.
	if waited {
		r.crowded, r.mixed = 0, false
	} else {
		r.crowded++
		r.mixed = r.mixed || r.crowded > 1 && tid != r.lastCaller
	}
	if r.crowded >= crowdedAfter {
		if r.mixed {
			r.addHelper()
		}
		r.crowded, r.mixed = 0, false
	}
	if r.alone++; tid != r.lastCaller {
		r.alone = 0
	}
	r.lastCaller = tid
	switch {
	case !r.primary || !r.syncs:
	case r.alone < aloneAfter:
		r.affinity.unbind()
	default:
		r.affinity.received(time.Now())
	}
}

// awaitEarlier waits until the earlier calls of the same thread are answered.
func (r *reader) awaitEarlier() {
	own := callID(r.answering[r.slot].Load())
	r.answered.wait(func() bool { return !r.hasEarlier(own) })
}

// hasEarlier reports whether a reader answers an earlier call of the same thread.
func (l *Listener) hasEarlier(own callID) bool {
	for i := range l.answering {
		if own.follows(callID(l.answering[i].Load())) {
			return true
		}
	}
	return false
}

// done says that the reader's call is answered.
func (r *reader) done() {
	r.answering[r.slot].Store(0)
	r.answered.signal()
}

// wait blocks until a call is there or the loop has to end. waited is false if the call was there
// already.
func (r *reader) wait() (waited bool, end end, err error) {
	fds := [2]unix.PollFd{{Fd: int32(r.fd), Events: unix.POLLIN}, {Fd: int32(r.srv.stopFD), Events: unix.POLLIN}}
	for {
		timeout := r.timeout()
		if r.affinity.bound {
			timeout = boundTimeout
		}
		began := time.Now()
		n, err := unix.Poll(fds[:], int(timeout/time.Millisecond))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return false, endNot, fmt.Errorf("poll: %w", err)
		case n == 0 && r.affinity.bound:
			r.affinity.relax()
		case n == 0:
			return true, endIdle, nil
		case fds[1].Revents != 0:
			return false, endServer, nil
		case fds[0].Revents&unix.POLLIN != 0:
			return time.Since(began) >= atOnce, endNot, nil
		case fds[0].Revents&unix.POLLHUP != 0:
			return false, endFilter, nil
		case fds[0].Revents&unix.POLLNVAL != 0:
			return false, endNot, errors.New("poll: descriptor was closed")
		}
	}
}

// addHelper starts another reader, if there may be one.
func (l *Listener) addHelper() {
	slot := l.freeSlot()
	if slot < 0 {
		return
	}
	// The primary reader waits for the others, so there is one to add to.
	l.readers.Go(func() {
		defer l.srv.helpers.Add(-1)
		if r := new(reader); r.prepare(l.srv) {
			r.becomeReaderOf(l, slot)
			r.read()
			l.srv.leaves()
		}
		l.mu.Lock()
		l.reads[slot] = false
		l.mu.Unlock()
	})
}

// freeSlot takes a place among the readers, and one among the spare ones of all listeners; -1 if
// there is none.
func (l *Listener) freeSlot() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, taken := range l.reads {
		if taken {
			continue
		}
		if l.srv.helpers.Add(1) > maxHelpers {
			l.srv.helpers.Add(-1)
			return -1
		}
		l.reads[i] = true
		return i
	}
	return -1
}

// finish answers the call that the agent before us received. How far it came is not known: the
// caller may have its descriptor, and then must be told where, not be given another.
func (r *reader) finish() {
	n := &r.inflight.call
	if r.inflight.inode == 0 {
		r.handle()
		return
	}
	number, found, err := r.srv.proc.FindSocket(n.PID, r.inflight.inode)
	if err != nil {
		r.srv.log.Warn("cannot tell whether a caller has its socket already: it may get a second one", "err", err,
			"container", r.state.State.ID, "pid", n.PID)
	}
	if !found {
		r.handle()
		return
	}
	if err := sendValue(r.fd, n.ID, number); err == nil {
		r.srv.redelivered(&n.Data)
	} // or it had its answer
	*r.inflight = inflightCall{}
}

// handle answers the in-flight call and clears it: RECV insists on zeroes, and a zero id says that
// nothing waits.
func (r *reader) handle() {
	r.awaitEarlier()
	err := r.dispatch()
	if errors.Is(err, ErrAgentEnds) {
		return // the next agent's to answer
	}
	if err != nil {
		why := r.srv.why.of(err)
		if why != &r.srv.why.callerGone {
			serr := sendErrno(r.fd, r.call.id(), why.errno(err))
			if serr != nil && gone(serr) {
				why, err = &r.srv.why.callerGone, serr
			}
		}
		r.fail(why, err)
	}
	r.call.Endpoint = nil
	*r.inflight = inflightCall{}
}
