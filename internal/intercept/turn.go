package intercept

import (
	"sync/atomic"
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

// take waits until the turn is the caller's.
func (t *turn) take() {
	if t.state.CompareAndSwap(turnFree, turnTaken) {
		return
	}
	for t.state.Swap(turnAwaited) != turnFree {
		t.futex(futexWait, turnAwaited)
	}
}

// pass gives the turn to one that waits for it.
func (t *turn) pass() {
	if t.state.Swap(turnFree) == turnAwaited {
		t.futex(futexWake, 1)
	}
}

// The operations of linux/futex.h, with FUTEX_PRIVATE_FLAG.
const (
	futexWait = 0 | 128
	futexWake = 1 | 128
)

// futex may return early, for any reason: take looks again.
func (t *turn) futex(op int, value uint32) {
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&t.state)), uintptr(op), uintptr(value), 0, 0, 0)
}
