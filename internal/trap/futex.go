package trap

import (
	"math"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// futexMutex is a mutex for threads of their own: who waits sleeps in the kernel, and is woken by
// one system call. A sync.Mutex parks the goroutine, and a goroutine that is locked to its thread
// costs two more switches and work of Go's scheduler at each of them. The three states are those of
// U. Drepper, "Futexes Are Tricky", mutex 2.
type futexMutex struct{ state atomic.Uint32 }

const (
	mutexFree uint32 = iota
	mutexTaken
	mutexAwaited // taken, and perhaps somebody sleeps
)

// lock waits until the mutex is the caller's, but not longer than timeout; less than 0 means for
// ever. It reports whether it is.
func (m *futexMutex) lock(timeout time.Duration) bool {
	if m.state.CompareAndSwap(mutexFree, mutexTaken) {
		return true
	}
	var ends *unix.Timespec
	if timeout >= 0 {
		ts := unix.NsecToTimespec(int64(timeout))
		ends = &ts
	}
	for m.state.Swap(mutexAwaited) != mutexFree {
		if futex(&m.state, futexWait, mutexAwaited, ends) == unix.ETIMEDOUT {
			return false
		}
	}
	return true
}

// unlock gives the mutex to one that waits for it.
func (m *futexMutex) unlock() {
	if m.state.Swap(mutexFree) == mutexAwaited {
		_ = futex(&m.state, futexWake, 1, nil)
	}
}

// futexEvent lets threads of their own wait until something is so, as futexMutex does and for the
// same reason.
type futexEvent struct{ signals, waiting atomic.Uint32 }

// wait waits until done gives true. Whoever makes it true must signal.
func (e *futexEvent) wait(done func() bool) {
	if done() {
		return
	}
	e.waiting.Add(1)
	defer e.waiting.Add(^uint32(0))
	for {
		before := e.signals.Load()
		if done() {
			return
		}
		_ = futex(&e.signals, futexWait, before, nil)
	}
}

// signal makes all that wait look again.
func (e *futexEvent) signal() {
	e.signals.Add(1)
	if e.waiting.Load() > 0 {
		_ = futex(&e.signals, futexWake, math.MaxInt32, nil)
	}
}

// The operations of linux/futex.h, with FUTEX_PRIVATE_FLAG.
const (
	futexWait = 0 | 128
	futexWake = 1 | 128
)

// futex may return early, for any reason: who waits looks again.
func futex(word *atomic.Uint32, op int, value uint32, timeout *unix.Timespec) unix.Errno {
	_, _, errno := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), uintptr(op), uintptr(value),
		uintptr(unsafe.Pointer(timeout)), 0, 0)
	return errno
}
