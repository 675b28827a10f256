package intercept

import (
	"context"
	"log/slog"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// refiller makes sockets ahead of need: for stocks and, when those are full, for crates (packing.go). One goroutine runs it, on a
// thread of its own that sleeps in the kernel; the answering threads only queue stocks and crates. (A goroutine that waits for a
// channel and is locked to a thread takes two other threads to wake.)
type refiller struct {
	log     *slog.Logger
	maker   SocketMaker
	target  int          // sockets a stock is filled up to; 0 turns stocks off
	max     int64        // ready sockets of all stocks together
	total   atomic.Int64 // sockets in stocks, or being made for one
	queue   chan *stock
	wakeFD  int          // eventfd; written to when the refiller has to look at its queue now, or to end
	doing   atomic.Int32 // what run does: a phase
	yielder yielder      // run's own
	failed  func(model.EndpointID, error)

	crates   chan *packing  // that readers gave to programs
	packings []*packing     // those it adds sockets to by turns; run's own
	turns    uint64         // how many there have been; run's own
	packed   *atomic.Uint64 // counts what it put into crates
	alarm    *alarm         // of run's thread; nil: its close() may wait
}

// A refiller that had something to do looks again after refillPause, and sleeps when it found nothing staysAwake times: to wake it
// takes 5 to 20 us of the thread that answers, and of the caller, who waits for the same processor. It costs as much to look, so it
// stays awake only if it is needed about as often as it looks.
const (
	refillPause = time.Millisecond
	staysAwake  = 2
)

// phase is what a refiller does.
type phase int32

const (
	filling  phase = iota // and looks at the queue before it does something else
	resting               // for refillPause
	sleeping              // until it is woken
)

// request queues st if it wants filling, and rouses the refiller. It never blocks: if the queue is full the next use of the stock
// asks again.
func (r *refiller) request(st *stock, wants need, before func()) {
	if r.target == 0 || wants == needNot {
		return
	}
	if !st.queued.Swap(true) {
		select {
		case r.queue <- st:
		default:
			st.queued.Store(false)
			return
		}
	}
	r.rouse(wants, before)
}

// rouse wakes the refiller if it sleeps, or if it rests and the matter is urgent; before is called first then.
func (r *refiller) rouse(wants need, before func()) {
	if _, wake := r.mustWake(wants); !wake {
		return
	}
	before()
	if doing, wake := r.mustWake(wants); wake && r.doing.CompareAndSwap(int32(doing), int32(filling)) { // else somebody else wakes it
		r.wake()
	}
}

// mustWake gives what the refiller does, and reports whether it has to be woken from that.
func (r *refiller) mustWake(wants need) (doing phase, wake bool) {
	doing = phase(r.doing.Load())
	return doing, doing == sleeping || doing == resting && wants == needNow
}

// nothing is for those who have nothing to do before a wake-up.
func nothing() {}

// wake makes run look at its queues and its context.
func (r *refiller) wake() {
	_, _ = unix.Write(r.wakeFD, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // fails only after 2^64 wakes that nobody has seen
}

// run fills stocks and crates until ctx is done and wake was called.
func (r *refiller) run(ctx context.Context) {
	// Not unlocked: the thread's priority stays low, so it must end with this goroutine.
	runtime.LockOSThread()
	ownSlack()
	if err := yieldToAll(); err != nil {
		r.log.Warn("making sockets ahead competes with programs", "err", err)
	}
	if err := becomeCrateUser(); err != nil {
		r.log.Warn("sockets in crates count as root's under way", "err", err)
	}
	var err error
	if r.alarm, err = newAlarm(); err != nil {
		r.log.Warn("a program that lets sockets linger delays making them for all", "err", err)
	} else {
		defer r.alarm.delete()
	}
	defer r.doing.Store(int32(filling)) // nobody need be woken any more
	for idle := 0; ctx.Err() == nil; idle++ {
		r.doing.Store(int32(filling))
		if r.fillQueued(ctx) {
			idle = 0
		}
		r.yielder.yield(nothing)
		next := resting
		if idle >= staysAwake {
			next = sleeping
		}
		r.doing.Store(int32(next))
		if r.fillQueued(ctx) { // of those who did not see any more that nobody would look
			idle = 0
			continue
		}
		if err := r.wait(next); err != nil {
			r.log.Error("no more sockets are made ahead: answers will be slower", "err", err)
			return
		}
	}
}

// wait ends when the refiller is woken, or its rest is over.
func (r *refiller) wait(doing phase) error {
	timeout := -1
	if doing == resting {
		timeout = int(refillPause.Milliseconds())
	}
	fds := [1]unix.PollFd{{Fd: int32(r.wakeFD), Events: unix.POLLIN}}
	n, err := unix.Poll(fds[:], timeout)
	if err == nil && n > 0 {
		var wakes [8]byte
		_, err = unix.Read(r.wakeFD, wakes[:])
	}
	if err == unix.EINTR {
		return nil
	}
	return err
}

// fillQueued fills the stocks on the queue, then the crates, and reports whether that took a socket.
func (r *refiller) fillQueued(ctx context.Context) (made bool) {
	for ctx.Err() == nil {
		select {
		case st := <-r.queue:
			st.queued.Store(false)
			n, err := r.fill(ctx, st)
			if err != nil {
				r.failed(st.endpoint, err)
			}
			made = made || n > 0
		default:
			if !r.packSome(ctx) {
				return made
			}
			made = true
			r.yielder.yield(nothing)
		}
	}
	return made
}

// fill brings one stock to the target, or to what the common limit leaves.
func (r *refiller) fill(ctx context.Context, st *stock) (made int, err error) {
	for missing, want := st.shortfall(r.target); made < missing && ctx.Err() == nil; made++ {
		if r.total.Add(1) > r.max {
			r.total.Add(-1)
			return made, nil
		}
		s, err := makeSocket(r.maker, st.endpoint, st.family)
		if err == nil {
			if err = s.fit(r.maker, st.endpoint, want); err != nil {
				closeFD(s.fd)
			}
		}
		if err != nil {
			r.total.Add(-1)
			return made, err
		}
		if !st.put(s, r.target) {
			r.discard(s)
			return made, nil
		}
	}
	return made, nil
}

// need says how much a stock wants filling.
type need int

const (
	needNot need = iota
	needSoon
	needNow
)

// take gets a ready socket for a caller, or makes one on the spot. ready says which.
func (r *refiller) take(st *stock, want traits) (s socket, ready bool, refill need, err error) {
	s, left, ready := st.take(want)
	if !ready {
		s, err = makeSocket(r.maker, st.endpoint, st.family)
		return s, false, needNow, err
	}
	r.total.Add(-1)
	switch {
	case left == r.target/4: // once on the way down: the refiller may be long in coming
		refill = needNow
	case left <= r.target/2:
		refill = needSoon
	}
	return s, true, refill, nil
}

// giveBack returns a socket whose caller does not get it.
func (r *refiller) giveBack(st *stock, s socket) {
	r.total.Add(1)
	if !st.put(s, r.target) {
		r.discard(s)
	}
}

// drop closes an endpoint's stocks and the sockets in them.
func (r *refiller) drop(e *endpoint) {
	for _, st := range []*stock{&e.v4, &e.v6} {
		for _, s := range st.close() {
			r.discard(s)
		}
	}
}

// discard closes a socket that total counts.
func (r *refiller) discard(s socket) {
	r.total.Add(-1)
	closeFD(s.fd)
}
