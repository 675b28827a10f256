package loadgen

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Syscalls is what `syscalls` prints: nanoseconds that a system call takes, by the names of
// SyscallNames.
type Syscalls struct {
	Ns map[string]float64 `json:"ns"`
}

// SyscallNames are the calls that syscalls makes, cheap ones that say most of what a filter adds:
// getpid does nothing, clock_gettime is the real call and not the one that libc makes without the
// kernel, ioctl and socket are what Heddle's filter looks at.
var SyscallNames = []string{"getpid", "clock_gettime", "read /dev/null", "ioctl FIONREAD", "socket and close, AF_UNIX"}

// syscallBatch is how many calls are made between two readings of the clock.
const syscallBatch = 500

// syscalls says that it is ready, waits for the end of its standard input, and then makes system
// calls.
func syscalls(ctx context.Context, s settings, streams Streams) error {
	if _, err := fmt.Fprintln(streams.Out, Ready); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.lifetime)
	defer cancel()
	select {
	case <-ended(streams.In):
	case <-ctx.Done():
		return ctx.Err()
	}
	type outcome struct {
		result Syscalls
		err    error
	}
	done := make(chan outcome, 1)
	go func() { // a thread of its own: see pin
		r, err := measureSyscalls(s)
		done <- outcome{r, err}
	}()
	o := <-done // it ends after s.duration
	if o.err != nil {
		return o.err
	}
	return json.NewEncoder(streams.Out).Encode(o.result)
}

func measureSyscalls(s settings) (_ Syscalls, err error) {
	if err := pin(s.cpu); err != nil {
		return Syscalls{}, err
	}
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Syscalls{}, fmt.Errorf("open /dev/null: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(null)) }()
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		return Syscalls{}, fmt.Errorf("make pipe: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(pipe[0]), unix.Close(pipe[1])) }()
	calls := syscallLoops(null, pipe[0])
	times := make([][]float64, len(calls))
	// Batches of all calls take turns, so that what the machine does meanwhile falls on all alike.
	for start := time.Now(); time.Since(start) < s.duration; {
		for i, call := range calls {
			began := time.Now()
			for range syscallBatch {
				if e := call(); e != 0 {
					return Syscalls{}, fmt.Errorf("%s: %w", SyscallNames[i], e)
				}
			}
			times[i] = append(times[i], float64(time.Since(began))/syscallBatch)
		}
	}
	r := Syscalls{Ns: make(map[string]float64)}
	for i, t := range times {
		slices.Sort(t)
		r.Ns[SyscallNames[i]] = t[len(t)/2]
	}
	return r, nil
}

// syscallLoops gives the calls, in the order of SyscallNames.
func syscallLoops(null, pipe int) []func() unix.Errno {
	var b [1]byte
	var n int32
	var now unix.Timespec
	return []func() unix.Errno{
		func() unix.Errno {
			_, _, e := unix.RawSyscall(unix.SYS_GETPID, 0, 0, 0)
			return e
		},
		func() unix.Errno {
			_, _, e := unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&now)), 0)
			return e
		},
		func() unix.Errno {
			_, _, e := unix.RawSyscall(unix.SYS_READ, uintptr(null), uintptr(unsafe.Pointer(&b)), 1)
			return e
		},
		func() unix.Errno {
			_, _, e := unix.RawSyscall(unix.SYS_IOCTL, uintptr(pipe), unix.TIOCINQ, uintptr(unsafe.Pointer(&n)))
			return e
		},
		func() unix.Errno {
			fd, _, e := unix.RawSyscall(unix.SYS_SOCKET, unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if e == 0 {
				_, _, e = unix.RawSyscall(unix.SYS_CLOSE, fd, 0, 0)
			}
			return e
		},
	}
}
