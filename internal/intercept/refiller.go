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

// refiller makes sockets ahead of need. One goroutine runs it, on a thread of its own that sleeps in the kernel; the answering
// threads only queue stocks. (A goroutine that waits for a channel and is locked to a thread takes two other threads to wake.)
type refiller struct {
	log    *slog.Logger
	maker  SocketMaker
	max    int64        // ready sockets of all stocks together
	total  atomic.Int64 // sockets in stocks, or being made for one
	queue  chan *stock
	wakeFD int          // eventfd; written to when the refiller has to look at its queue now, or to end
	doing  atomic.Int32 // what run does
	failed func(model.EndpointID, error)
	grown  map[*stock]struct{} // those that it filled to more than their least size since it last slept; run's own
}

// A refiller that had something to do looks again after refillPause, and sleeps when it found nothing staysAwake times: to wake it
// takes 5 to 20 us of the thread that answers, and of the caller, who waits for the same processor. It costs as much to look, so it
// stays awake only if it is needed about as often as it looks. Stocks that have grown shrink when nobody asks for staysGrown.
const (
	refillPause = time.Millisecond
	staysAwake  = 2
	staysGrown  = 100 * time.Millisecond
	forEver     = -1 // as a pause
)

// What a refiller does.
const (
	fills  int32 = iota // and looks at the queue before it rests
	rests               // for refillPause
	sleeps              // until it is woken
)

// request queues st, and wakes the refiller if it sleeps, or if it rests and the matter is urgent. It never blocks: if the queue
// is full the next use of the stock asks again.
func (r *refiller) request(st *stock, urgent bool) {
	if st.least == 0 {
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
	if doing := r.doing.Load(); doing == sleeps || doing == rests && urgent {
		r.wake()
	}
}

// wake makes run look at its queue and its context.
func (r *refiller) wake() {
	_, _ = unix.Write(r.wakeFD, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // fails only after 2^64 wakes that nobody has seen
}

// run fills stocks until ctx is done and wake was called.
func (r *refiller) run(ctx context.Context) {
	// Not unlocked: the thread's priority stays low, so it must end with this goroutine.
	runtime.LockOSThread()
	if err := yieldToAll(); err != nil {
		r.log.Warn("making sockets ahead competes with programs", "err", err)
	}
	for idle := 0; ctx.Err() == nil; idle++ {
		if r.fillQueued(ctx) {
			idle = 0
		}
		doing, pause := rests, refillPause
		switch {
		case idle < staysAwake:
		case len(r.grown) > 0:
			doing, pause = sleeps, staysGrown
		default:
			doing, pause = sleeps, forEver
		}
		woken, err := r.rest(doing, pause)
		if err != nil {
			r.log.Error("no more sockets are made ahead: answers will be slower", "err", err)
			return
		}
		if doing == sleeps && !woken {
			r.shrink()
		}
	}
}

// fillQueued fills the stocks on the queue and reports whether there was one.
func (r *refiller) fillQueued(ctx context.Context) (some bool) {
	for ctx.Err() == nil {
		select {
		case st := <-r.queue:
			some = true
			st.queued.Store(false)
			if err := r.fill(ctx, st); err != nil {
				r.failed(st.endpoint, err)
			}
		default:
			return some
		}
	}
	return some
}

// rest waits for the time of a pause, or until the refiller is woken. Meanwhile others see what it is doing.
func (r *refiller) rest(doing int32, pause time.Duration) (woken bool, err error) {
	r.doing.Store(doing)
	defer r.doing.Store(fills)
	if len(r.queue) > 0 { // who put it there may not have seen that nobody looks any more
		return true, nil
	}
	timeout := int(pause.Milliseconds())
	if pause == forEver {
		timeout = -1
	}
	fds := [1]unix.PollFd{{Fd: int32(r.wakeFD), Events: unix.POLLIN}}
	n, err := unix.Poll(fds[:], timeout)
	if err == unix.EINTR {
		return true, nil
	}
	if err != nil || n == 0 {
		return false, err
	}
	var wakes [8]byte
	_, err = unix.Read(r.wakeFD, wakes[:])
	return true, err
}

// fill brings one stock to its size, or to what the common limit leaves.
func (r *refiller) fill(ctx context.Context, st *stock) error {
	missing, grown, want := st.shortfall()
	if grown > 0 {
		r.grown[st] = struct{}{}
	}
	for ; missing > 0 && ctx.Err() == nil; missing-- {
		if missing <= grown && r.total.Load() >= r.max/2 {
			return nil // the other half is for those that have not grown
		}
		if r.total.Add(1) > r.max {
			r.total.Add(-1)
			return nil
		}
		s, err := makeSocket(r.maker, st.endpoint, st.family)
		if err == nil {
			if err = s.fit(r.maker, st.endpoint, want); err != nil {
				closeFD(s.fd)
			}
		}
		if err != nil {
			r.total.Add(-1)
			return err
		}
		if !st.put(s) {
			r.discard(s)
			return nil
		}
	}
	return nil
}

// shrink closes what grown stocks have too much.
func (r *refiller) shrink() {
	for st := range r.grown {
		for _, s := range st.shrink() {
			r.discard(s)
		}
	}
	clear(r.grown)
}

// take gets a ready socket for a caller, or makes one on the spot. ready says which.
func (r *refiller) take(st *stock, want traits) (s socket, ready bool, refill need, err error) {
	s, refill, ready = st.take(want)
	if ready {
		r.total.Add(-1)
		return s, true, refill, nil
	}
	s, err = makeSocket(r.maker, st.endpoint, st.family)
	return s, false, refill, err
}

// giveBack returns a socket whose caller does not get it.
func (r *refiller) giveBack(st *stock, s socket) {
	r.total.Add(1)
	if !st.put(s) {
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
