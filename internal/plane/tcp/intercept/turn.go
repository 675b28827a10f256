package intercept

import (
	"math"
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
		if futex(&t.state, futexWait, turnAwaited, timeout) == unix.ETIMEDOUT {
			return false
		}
	}
	return true
}

// pass gives the turn to one that waits for it.
func (t *turn) pass() {
	if t.state.Swap(turnFree) == turnAwaited {
		_ = futex(&t.state, futexWake, 1, nil)
	}
}

// bell lets threads of their own wait until something is so, as turn does and for the same reason.
type bell struct{ rung, waiting atomic.Uint32 }

// await waits until done gives true. Whoever makes it true must ring.
func (b *bell) await(done func() bool) {
	if done() {
		return
	}
	b.waiting.Add(1)
	defer b.waiting.Add(^uint32(0))
	for {
		before := b.rung.Load()
		if done() {
			return
		}
		_ = futex(&b.rung, futexWait, before, nil)
	}
}

// ring makes all that wait look again.
func (b *bell) ring() {
	b.rung.Add(1)
	if b.waiting.Load() > 0 {
		_ = futex(&b.rung, futexWake, math.MaxInt32, nil)
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
