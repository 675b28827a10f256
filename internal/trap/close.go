package trap

import (
	"time"

	"golang.org/x/sys/unix"
)

// A program can set SO_LINGER on a socket, have data under way and close it before the agent's own
// close(), which is the last then and waits for as long as the program said, if no signal
// interrupts it.

// InterruptSignal interrupts a close() that waits. Nothing else uses it: Go ignores it, and readers
// do not block it.
const InterruptSignal = unix.Signal(40)

// closeTimeout is how long a close() may wait when the agent ends.
const closeTimeout = 50 * time.Millisecond

// closeFD closes a descriptor of ours. The kernel always frees the number, and none of what we
// close can report lost data, so there is nothing to do about an error.
func closeFD(fd int) { _ = unix.Close(fd) }

// closeGiven closes the agent's descriptor of what its program may have already.
func (r *reader) closeGiven(fd int) {
	closing := &r.closing[r.slot]
	closing.Store(r.tid)
	closeFD(fd)
	closing.Store(0)
}

// interruptCloses interrupts what readers wait for in close(), until done is closed: an agent that
// ends does not wait for a program.
func (s *Server) interruptCloses(done <-chan struct{}) {
	tick := time.NewTicker(closeTimeout)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		s.mu.Lock()
		for l := range s.listeners {
			for i := range l.closing {
				if tid := l.closing[i].Load(); tid != 0 {
					_ = unix.Tgkill(unix.Getpid(), int(tid), InterruptSignal) // fails if it has just ended
				}
			}
		}
		s.mu.Unlock()
	}
}
