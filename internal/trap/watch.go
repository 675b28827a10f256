package trap

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// fewestWaiting is how many threads wait for listeners' calls at first, mostWaiting how many
	// stay to do so.
	fewestWaiting = 2
	mostWaiting   = 16
	// maxThreads bounds those that answer calls of listeners and are no helpers: Go ends a process
	// with 10,000 threads.
	maxThreads = 4096
	// A thread that came for a listener's call stays until there was none for this long, but where
	// there are more than manyThreads only if the listener is busy: threads came for its calls
	// busyAfter times within busyWithin.
	stays       = time.Second
	manyThreads = 48
	busyAfter   = 4
	busyWithin  = 10 * time.Millisecond
)

// watch has a few threads wait for the calls of all listeners that nobody reads, by one epoll set.
// The thread that finds a call becomes the listener's primary reader, as a rule for as long as
// there are calls: the kernel wakes a thread that polls a listener on its caller's processor, and
// one that waits at an epoll set where it likes. Each listener is in the set for one event at a
// time (EPOLLONESHOT), so that it has one primary. An answer waits for its caller, which a
// container can keep from running: so before the last thread that waits leaves the set another one
// begins to wait, and no container holds the threads that others need. docs/decisions/0106.
type watch struct {
	srv     *Server
	fd      int
	waiting atomic.Int32 // threads that wait at the set, or are about to
	threads atomic.Int32 // all

	mu   sync.Mutex          // guards what follows; never held across a system call
	byFD map[int32]*Listener // those in the set
}

// open makes the set, which has the server's end in it.
func (w *watch) open(s *Server) (err error) {
	w.srv, w.byFD = s, make(map[int32]*Listener)
	if w.fd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("epoll_create1: %w", err)
	}
	end := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(s.stopFD)}
	if err := unix.EpollCtl(w.fd, unix.EPOLL_CTL_ADD, s.stopFD, &end); err != nil {
		return fmt.Errorf("watch the server's end: %w", err)
	}
	return nil
}

// add has l watched. It is called with Server.mu held, while the server is not closed.
func (w *watch) add(l *Listener) error {
	left := l.anyLeft()
	l.hasLeft.Store(left)
	w.mu.Lock()
	w.byFD[int32(l.fd)] = l
	w.mu.Unlock()
	for range fewestWaiting - w.waiting.Load() { // start may have none to give
		w.start(nil)
	}
	if left {
		w.start(l)
		return nil
	}
	return w.arm(l)
}

// arm has the next call of l, or its end, told once.
func (w *watch) arm(l *Listener) error {
	event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLONESHOT, Fd: int32(l.fd)}
	err := unix.EpollCtl(w.fd, unix.EPOLL_CTL_MOD, l.fd, &event)
	if err == unix.ENOENT { // the first time
		err = unix.EpollCtl(w.fd, unix.EPOLL_CTL_ADD, l.fd, &event)
	}
	if err != nil {
		return fmt.Errorf("watch listener: %w", err)
	}
	return nil
}

// remove takes l out of the set: the keeper may have it open for longer, and then the kernel does
// not.
func (w *watch) remove(l *Listener) {
	w.mu.Lock()
	delete(w.byFD, int32(l.fd))
	w.mu.Unlock()
	_ = unix.EpollCtl(w.fd, unix.EPOLL_CTL_DEL, l.fd, nil) // fails if it is not in the set
}

// start starts a thread, which answers calls of first before it waits, unless that is nil. Whoever
// calls keeps Server.tasks from being done.
func (w *watch) start(first *Listener) {
	if w.threads.Add(1) > maxThreads && first == nil {
		w.threads.Add(-1)
		return // those that there are come back
	}
	if first == nil {
		w.waiting.Add(1)
	}
	w.srv.tasks.Go(func() { w.run(first) })
}

// run waits for listeners' calls and answers them, until the server closes or enough others wait.
func (w *watch) run(first *Listener) {
	defer w.threads.Add(-1)
	r := &reader{primary: true}
	if !r.prepare(w.srv) {
		if first == nil {
			w.waiting.Add(-1)
		}
		return
	}
	defer w.srv.leaves()
	if first != nil {
		w.serve(r, first)
		if !w.stays() {
			return
		}
	}
	for {
		l, ok := w.next()
		if w.waiting.Add(-1) == 0 && ok {
			w.start(nil)
		}
		if !ok {
			return
		}
		if l != nil {
			w.serve(r, l)
		}
		if !w.stays() {
			return
		}
	}
}

// stays reports whether the calling thread is to wait at the set, and counts it if so.
func (w *watch) stays() bool {
	if w.waiting.Add(1) <= mostWaiting {
		return true
	}
	w.waiting.Add(-1)
	return false
}

// next waits for a listener that has a call or has ended; nil if that is not to be served any more.
// ok is false when the server closes.
func (w *watch) next() (l *Listener, ok bool) {
	var events [1]unix.EpollEvent
	for {
		n, err := unix.EpollWait(w.fd, events[:], -1)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 || events[0].Fd == int32(w.srv.stopFD) {
			if err != nil {
				w.srv.log.Error("calls of listeners are not waited for any more; restart the agent", "err", err)
			}
			return nil, false
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.byFD[events[0].Fd], true
	}
}

// serve answers calls of l until there are none, and has it watched again; or ends it, if its
// filter has no users any more or it cannot be read. One that the server's end interrupts is
// Close's.
func (w *watch) serve(r *reader, l *Listener) {
	how := l.visit(r)
	if how == endIdle {
		err := w.arm(l)
		if err == nil {
			return
		}
		l.fail(&w.srv.why.receive, err)
		how = endBroken
	}
	l.readers.Wait()
	if how != endServer {
		w.srv.end(l, how == endFilter)
	}
}

// visit has r answer calls of l.
func (l *Listener) visit(r *reader) end {
	r.becomeReaderOf(l, 0)
	defer r.affinity.unbind() // the thread may be the process's first, which does not end
	if l.hasLeft.Swap(false) && !r.finishLeft() {
		return endServer
	}
	for r.stays = l.staysFor(time.Now()); ; r.stays = stays {
		if how := r.read(); how != endIdle || !l.hasHelpers() {
			return how
		}
	}
}

// staysFor says how long a thread that comes for a call is to wait for the next one. Only primaries
// call it, one at a time.
func (l *Listener) staysFor(now time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.visitsSince) > busyWithin {
		l.visitsSince, l.visits = now, 0
	}
	if l.visits++; l.visits < busyAfter && l.srv.watch.threads.Load() > manyThreads {
		return 0
	}
	return stays
}

// hasHelpers reports whether others read calls beside the primary.
func (l *Listener) hasHelpers() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reads != [maxReaders]bool{true}
}
