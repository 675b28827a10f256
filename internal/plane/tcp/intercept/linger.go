package intercept

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/trap"
)

// A program can set SO_LINGER on a socket, have data under way and close it before the agent's own
// close(), which is the last then and waits for as long as the program said, if no signal
// interrupts it.

const (
	// lingerTimeout is how long a close() may wait if others wait for its thread.
	lingerTimeout = 50 * time.Millisecond
	// lingerSeen is more than any close() takes that does not linger, and less than Go lets a
	// thread go on without a signal.
	lingerSeen = time.Millisecond
)

// interruptTimer sends its thread trap.InterruptSignal again and again while it is set, by a timer
// of the kernel: timer_create(2).
type interruptTimer struct{ timer int32 }

// newInterruptTimer gives a timer of the calling thread.
func newInterruptTimer() (*interruptTimer, error) {
	// struct sigevent
	event := struct {
		value         uint64
		signo, notify int32
		tid           int32
		_             [44]byte
	}{signo: int32(trap.InterruptSignal), notify: 4 /* SIGEV_THREAD_ID */, tid: int32(unix.Gettid())}
	var a interruptTimer
	_, _, errno := unix.Syscall(unix.SYS_TIMER_CREATE, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&event)),
		uintptr(unsafe.Pointer(&a.timer)))
	if errno != 0 {
		return nil, fmt.Errorf("timer of a thread: %w", errno)
	}
	return &a, nil
}

// set sets the timer to ring in every and again each time that has passed; 0 turns it off. A timer
// that is nil never rings.
func (a *interruptTimer) set(every time.Duration) {
	if a == nil {
		return
	}
	spec := [2]unix.Timespec{unix.NsecToTimespec(int64(every)), unix.NsecToTimespec(int64(every))}
	// Fails only for a timer that is none.
	_, _, _ = unix.Syscall6(unix.SYS_TIMER_SETTIME, uintptr(a.timer), 0, uintptr(unsafe.Pointer(&spec)), 0, 0, 0)
}

// delete gives the timer back.
func (a *interruptTimer) delete() {
	_, _, _ = unix.Syscall(unix.SYS_TIMER_DELETE, uintptr(a.timer), 0, 0)
}

var errLingers = errors.New("a program keeps the agent waiting (SO_LINGER): its container gets no more batches")

// closeFD closes a descriptor of ours. The kernel always frees the number, and none of what we
// close can report lost data, so there is nothing to do about an error.
func closeFD(fd int) { _ = unix.Close(fd) }

// closeWaits closes the agent's descriptor of a socket that its program may have already, and
// reports whether that waited for what lingers, till it was interrupted perhaps. A thread that only
// has to wait for a processor does not give its own up; one that Go's scheduler stops does, so that
// the socket has to linger as well: it does if its program was very quick.
func closeWaits(fd int) bool {
	linger, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_LINGER) // struct linger: two ints, of which the first switches it on
	if err != nil || uint32(linger) == 0 {
		closeFD(fd)
		return false
	}
	before, began := timesGivenUp(), time.Now()
	_, _, _ = unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0)
	return timesGivenUp() != before && time.Since(began) >= lingerSeen
}

// timesGivenUp is how often the thread has given up its processor to wait for something.
func timesGivenUp() int64 {
	var usage unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_THREAD, &usage) // fails only for bad arguments
	return usage.Nvcsw
}
