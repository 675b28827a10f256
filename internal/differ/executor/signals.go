package main

import (
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/differ"
)

// sigset is the kernel's: 64 signals.
type sigset uint64

func sigaction[T any](sig unix.Signal, act, old *T) error {
	_, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(sig), uintptr(unsafe.Pointer(act)), uintptr(unsafe.Pointer(old)), 8, 0, 0)
	if e != 0 {
		return fmt.Errorf("rt_sigaction: %w", e)
	}
	return nil
}

// withSigpipe calls f with SIGPIPE blocked on this thread, and reports whether it came: the signal
// goes to the thread that writes.
func withSigpipe(f func()) bool {
	pipe := sigset(1) << (unix.SIGPIPE - 1)
	var old sigset
	sigprocmask(unix.SIG_BLOCK, &pipe, &old)
	f()
	var none unix.Timespec
	_, _, e := unix.RawSyscall6(unix.SYS_RT_SIGTIMEDWAIT, uintptr(unsafe.Pointer(&pipe)), 0, uintptr(unsafe.Pointer(&none)), 8, 0, 0)
	sigprocmask(unix.SIG_SETMASK, &old, nil)
	return e == 0
}

func sigprocmask(how int, set, old *sigset) {
	unix.RawSyscall6(unix.SYS_RT_SIGPROCMASK, uintptr(how), uintptr(unsafe.Pointer(set)), uintptr(unsafe.Pointer(old)), 8, 0, 0)
}

// interrupt ends the calls that are pending by a signal, and gives what they returned.
func (w *worker) interrupt(q differ.Request) differ.Reply {
	var child differ.Reply
	if w.child != 0 && q.Kind != "" {
		child = w.askChild(q)
	}
	// A signal that comes before the call sleeps again is lost: repeat it.
	for range 2000 {
		w.mu.Lock()
		waiting := len(w.pending)
		for _, c := range w.pending {
			_ = unix.Tgkill(unix.Getpid(), c.tid, unix.SIGUSR1)
		}
		w.mu.Unlock()
		if waiting == 0 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.pending) > 0 {
		return differ.Reply{Mistake: fmt.Sprintf("%d calls cannot be interrupted", len(w.pending))}
	}
	reply := differ.Reply{Done: append(w.done, child.Done...), Mistake: child.Mistake}
	w.done = nil
	return reply
}
