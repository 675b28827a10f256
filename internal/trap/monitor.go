package trap

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// monitor is the thread of Go's runtime (sysmon) that takes the processors (Ps) of its scheduler
// from threads that wait in system calls. Whenever it took one it looks every 20 us, 50 times,
// before it sleeps for longer; a reader that waits for the next call loses its P after 10 ms. So a
// container with some hundred calls a second kept it awake: 200 us of processor time a call, four
// times what the answer takes. With a longer timer slack (prctl(2), PR_SET_TIMERSLACK) the kernel
// wakes it at most every few milliseconds. That is soon enough as long as each reader can have a P:
// else one whose P another one holds waits for the monitor. docs/decisions/0041.
type monitor struct {
	log *slog.Logger

	mu      sync.Mutex // guards the rest
	path    string     // the thread's timerslack_ns; empty: not known, or it cannot be changed
	readers int
	slack   int // ns, as set
}

const (
	defaultSlack = 0         // makes the kernel take the thread's own default
	longSlack    = 4_000_000 // less than the 10 ms that the monitor sleeps for when nothing happens
	// sparePs are Ps for what the agent does besides answering.
	sparePs = 8
)

func newMonitor(log *slog.Logger) *monitor {
	m := &monitor{log: log}
	tid, err := monitorThread()
	if err != nil {
		log.Warn("answers take more processor time", "err", err)
		return m
	}
	m.path = fmt.Sprintf("/proc/%d/timerslack_ns", tid)
	return m
}

// monitorThread gives the monitor's number: the runtime starts it before any other thread. Should
// the numbers of threads have come round since, it may be another one, whose timers are then a
// little late.
func monitorThread() (tid int, err error) {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return 0, fmt.Errorf("find Go's monitor thread: %w", err)
	}
	var later, all []int
	for _, t := range tasks {
		n, err := strconv.Atoi(t.Name())
		if err != nil || n == os.Getpid() {
			continue
		}
		if all = append(all, n); n > os.Getpid() {
			later = append(later, n)
		}
	}
	switch {
	case len(later) > 0:
		return slices.Min(later), nil
	case len(all) > 0: // numbers have come round
		return slices.Min(all), nil
	}
	return 0, errors.New("find Go's monitor thread: there is none")
}

// change notes that there are so many readers more.
func (m *monitor) change(by int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.readers += by
	if m.readers+sparePs <= runtime.GOMAXPROCS(0) {
		m.set(longSlack)
	} else {
		m.set(defaultSlack)
	}
}

// close undoes it.
func (m *monitor) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.set(defaultSlack)
}

// set changes the thread's slack; the caller holds mu.
func (m *monitor) set(slack int) {
	if m.path == "" || m.slack == slack {
		return
	}
	if err := os.WriteFile(m.path, []byte(strconv.Itoa(slack)), 0); err != nil {
		m.log.Warn("answers take more processor time", "err", fmt.Errorf("timer slack of Go's monitor thread: %w", err))
		if slack == longSlack { // what was never changed need not be changed back
			m.path = ""
		}
		return
	}
	m.slack = slack
}

// ownSlack gives the calling thread the kernel's slack: a thread inherits that of the one which
// started it, and the monitor starts some.
func ownSlack() {
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 50_000, 0, 0, 0) // cannot fail
}
