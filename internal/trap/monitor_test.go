package trap

import (
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

// TestMonitorThread: the thread that is taken for Go's monitor is the one that sleeps for
// microseconds while others wait in system calls. A new release of Go may start its threads in
// another order.
func TestMonitorThread(t *testing.T) {
	tid, err := monitorThread()
	if err != nil {
		t.Fatal(err)
	}
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer closeFD(pipe[0])
	stop := make(chan struct{})
	ended := make(chan struct{})
	go func() { // keeps the monitor awake
		defer close(ended)
		fds := []unix.PollFd{{Fd: int32(pipe[0]), Events: unix.POLLIN}}
		for {
			select {
			case <-stop:
				return
			default:
				_, _ = unix.Poll(fds, 1)
			}
		}
	}()
	defer func() { close(stop); <-ended; closeFD(pipe[1]) }()
	nanosleep := fmt.Sprintf("%d ", unix.SYS_NANOSLEEP)
	inRow := 0 // other threads of Go's sleep like that for a moment, now and then
	eventually(t, fmt.Sprintf("thread %d sleeps for moments", tid), func() bool {
		call, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/syscall", tid))
		if inRow++; err != nil || !strings.HasPrefix(string(call), nanosleep) {
			inRow = 0
		}
		return inRow == 5
	})
}

// slackOf gives the monitor's timer slack, in ns.
func slackOf(t *testing.T, m *monitor) string {
	t.Helper()
	got, err := os.ReadFile(m.path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(got))
}

// TestMonitorSlack: the monitor sleeps longer only while there are more processors of Go's
// scheduler than readers.
func TestMonitorSlack(t *testing.T) {
	testutil.NeedRoot(t, "changes the caller's user")
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(sparePs + 2))
	m := newMonitor(slog.Default())
	before, long := slackOf(t, m), fmt.Sprint(longSlack)
	for _, step := range []struct {
		by   int
		want string
	}{{1, long}, {1, long}, {1, before}, {-1, long}, {5, before}, {-7, long}} {
		m.change(step.by)
		if got := slackOf(t, m); got != step.want {
			t.Errorf("%d readers: slack %s ns, want %s", m.readers, got, step.want)
		}
	}
	m.close()
	if got := slackOf(t, m); got != before || got == long {
		t.Errorf("in the end %s, before %s", got, before)
	}
}
