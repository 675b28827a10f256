package intercept

import (
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// turn is a mutex for threads of their own: who waits sleeps in the kernel, and is woken by one system call. A sync.Mutex
// parks the goroutine, and a goroutine that is locked to its thread costs two more switches and work of Go's scheduler at
// each of them. The three states are those of U. Drepper, "Futexes Are Tricky", mutex 2.
type turn struct{ state atomic.Uint32 }

const (
	turnFree uint32 = iota
	turnTaken
	turnAwaited // taken, and perhaps somebody sleeps
)

// take waits until the turn is the caller's, but not longer than patience; less than 0 means for ever. It reports whether it is.
func (t *turn) take(patience time.Duration) bool {
	if t.state.CompareAndSwap(turnFree, turnTaken) {
		return true
	}
	var timeout *unix.Timespec
	if patience >= 0 {
		ts := unix.NsecToTimespec(int64(patience))
		timeout = &ts
	}
	for t.state.Swap(turnAwaited) != turnFree {
		if t.futex(futexWait, turnAwaited, timeout) == unix.ETIMEDOUT {
			return false
		}
	}
	return true
}

// pass gives the turn to one that waits for it.
func (t *turn) pass() {
	if t.state.Swap(turnFree) == turnAwaited {
		_ = t.futex(futexWake, 1, nil)
	}
}

// The operations of linux/futex.h, with FUTEX_PRIVATE_FLAG.
const (
	futexWait = 0 | 128
	futexWake = 1 | 128
)

// futex may return early, for any reason: take looks again.
func (t *turn) futex(op int, value uint32, timeout *unix.Timespec) unix.Errno {
	_, _, errno := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&t.state)), uintptr(op), uintptr(value),
		uintptr(unsafe.Pointer(timeout)), 0, 0)
	return errno
}
