package intercept

import (
	"context"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/trap"
)

// prefiller makes sockets ahead of need: for pools and, when those are full, for batches
// (filling.go). One goroutine runs it, on a thread of its own that sleeps in the kernel; the
// answering threads only queue pools and batches. (A goroutine that waits for a channel and is
// locked to a thread takes two other threads to wake.)
type prefiller struct {
	log     *slog.Logger
	maker   SocketMaker
	target  int          // sockets that a pool has at most; 0 turns pools off
	max     int64        // ready sockets of all pools together
	total   atomic.Int64 // sockets in pools, or being made for one
	queue   chan *socketPool
	wakeFD  int          // eventfd; written to when the prefiller has to look at its queue now, or to end
	doing   atomic.Int32 // what run does: a phase
	yielder trap.Yielder // run's own
	failed  func(model.EndpointID, error)

	batches    chan *filling   // that readers gave to programs
	fillings   []*filling      // those it adds sockets to by turns; run's own
	turns      uint64          // how many there have been; run's own
	filled     *atomic.Uint64  // counts what it put into batches
	interrupts *interruptTimer // of run's thread; nil: its close() may wait

	mu    sync.Mutex           // guards pools; never held across a system call
	pools map[*socketPool]bool // that share max (sharing.go)
}

// A prefiller that had something to do looks again after prefillPause, and sleeps when it found
// nothing staysAwake times: to wake it takes 5 to 20 us of the thread that answers, and of the
// caller, who waits for the same processor. It costs as much to look, so it stays awake only if it
// is needed about as often as it looks.
const (
	prefillPause = time.Millisecond
	staysAwake   = 2
)

// phase is what a prefiller does.
type phase int32

const (
	working  phase = iota // and looks at the queue before it does something else
	resting               // for prefillPause
	sleeping              // until it is woken
)

// request queues p if it wants sockets, and rouses the prefiller. It never blocks: if the queue is
// full the next use of the pool asks again.
func (r *prefiller) request(p *socketPool, wants need, before func()) {
	if r.target == 0 || wants == needNot {
		return
	}
	if !p.queued.Swap(true) {
		select {
		case r.queue <- p:
		default:
			p.queued.Store(false)
			return
		}
	}
	r.rouse(wants, before)
}

// rouse wakes the prefiller if it sleeps, or if it rests and the matter is urgent; before is called
// first then.
func (r *prefiller) rouse(wants need, before func()) {
	if _, wake := r.mustWake(wants); !wake {
		return
	}
	before()
	if doing, wake := r.mustWake(wants); wake && r.doing.CompareAndSwap(int32(doing), int32(working)) { // else somebody else wakes it
		r.wake()
	}
}

// mustWake gives what the prefiller does, and reports whether it has to be woken from that.
func (r *prefiller) mustWake(wants need) (doing phase, wake bool) {
	doing = phase(r.doing.Load())
	return doing, doing == sleeping || doing == resting && wants == needNow
}

// nothing is for those who have nothing to do before a wake-up.
func nothing() {}

// wake makes run look at its queues and its context.
func (r *prefiller) wake() {
	_, _ = unix.Write(r.wakeFD, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // fails only after 2^64 wakes that nobody has seen
}

// run prefills pools and fills batches until ctx is done and wake was called.
func (r *prefiller) run(ctx context.Context) {
	// Not unlocked: the thread's priority stays low, so it must end with this goroutine.
	runtime.LockOSThread()
	if err := trap.Background(); err != nil {
		r.log.Warn("thread that makes sockets ahead keeps its priority: it competes with programs", "err", err)
	}
	if err := becomeBatchUser(); err != nil {
		r.log.Warn("batches have no user of their own: their sockets count as root's under way", "err", err)
	}
	var err error
	if r.interrupts, err = newInterruptTimer(); err != nil {
		r.log.Warn("close() cannot be interrupted: a program that lets sockets linger delays making them for all", "err", err)
	} else {
		defer r.interrupts.delete()
	}
	defer r.doing.Store(int32(working)) // nobody need be woken any more
	for idle := 0; ctx.Err() == nil; idle++ {
		r.doing.Store(int32(working))
		if r.prefillQueued(ctx) {
			idle = 0
		}
		r.yielder.Yield(nothing)
		next := resting
		if idle >= staysAwake {
			next = sleeping
		}
		r.doing.Store(int32(next))
		if r.prefillQueued(ctx) { // of those who did not see any more that nobody would look
			idle = 0
			continue
		}
		if err := r.wait(next); err != nil {
			r.log.Error("no more sockets are made ahead: answers will be slower", "err", err)
			return
		}
	}
}

// wait ends when the prefiller is woken, or its rest is over.
func (r *prefiller) wait(doing phase) error {
	timeout := -1
	if doing == resting {
		timeout = int(prefillPause.Milliseconds())
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

// prefillQueued fills the pools on the queue, then the batches, and reports whether that took a
// socket.
func (r *prefiller) prefillQueued(ctx context.Context) (made bool) {
	for ctx.Err() == nil {
		select {
		case p := <-r.queue:
			p.queued.Store(false)
			n, err := r.prefill(ctx, p)
			if err != nil {
				r.failed(p.endpoint, err)
			}
			made = made || n > 0
		default:
			if !r.fillSome(ctx) {
				return made
			}
			made = true
			r.yielder.Yield(nothing)
		}
	}
	return made
}

// prefill brings one pool to what it may have now, or to what the common limit leaves.
func (r *prefiller) prefill(ctx context.Context, p *socketPool) (made int, err error) {
	r.join(p)
	now := time.Now()
	limit, busy := r.limit(p, now)
	for missing, want := p.shortfall(limit); made < missing && ctx.Err() == nil; made++ {
		if !r.room(busy, now) {
			return made, nil
		}
		s, err := makeSocket(r.maker, p.endpoint, p.family)
		if err == nil {
			if err = s.apply(r.maker, p.endpoint, want); err != nil {
				closeFD(s.fd)
			}
		}
		if err != nil {
			r.total.Add(-1)
			return made, err
		}
		if !p.put(s, r.target) {
			r.discard(s)
			return made, nil
		}
	}
	return made, nil
}

// need says how much a pool wants sockets.
type need int

const (
	needNot need = iota
	needSoon
	needNow
)

// take gets a ready socket for a caller, or makes one on the spot. ready says which.
func (r *prefiller) take(p *socketPool, want socketOptions) (s socket, ready bool, prefill need, err error) {
	s, left, limit, ready := p.take(want)
	if !ready {
		s, err = makeSocket(r.maker, p.endpoint, p.family)
		return s, false, needNow, err
	}
	r.total.Add(-1)
	switch {
	case left == limit/4: // once on the way down: the prefiller may be long in coming
		prefill = needNow
	case left <= limit/2:
		prefill = needSoon
	}
	return s, true, prefill, nil
}

// giveBack returns a socket whose caller does not get it.
func (r *prefiller) giveBack(p *socketPool, s socket) {
	r.total.Add(1)
	if !p.put(s, r.target) {
		r.discard(s)
	}
}

// drop closes an endpoint's pools and the sockets in them.
func (r *prefiller) drop(of *pools) {
	for _, p := range []*socketPool{&of.v4, &of.v6} {
		for _, s := range p.close() {
			r.discard(s)
		}
		r.leave(p)
	}
}

// discard closes a socket that total counts.
func (r *prefiller) discard(s socket) {
	r.total.Add(-1)
	closeFD(s.fd)
}
