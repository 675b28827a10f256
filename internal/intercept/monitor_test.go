package intercept

import (
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestMonitorThread: the thread that is taken for Go's monitor is the one that sleeps for microseconds while others wait in system
// calls. A new release of Go may start its threads in another order.
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
	eventually(t, fmt.Sprintf("thread %d sleeps for a moment", tid), func() bool {
		call, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/syscall", tid))
		return err == nil && strings.HasPrefix(string(call), nanosleep)
	})
}

// TestMonitorSlack: the monitor sleeps longer only while there are more processors of Go's scheduler than readers.
func TestMonitorSlack(t *testing.T) {
	needRoot(t)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(sparePs + 2))
	m := newMonitor(slog.Default())
	defer m.close()
	for _, step := range []struct{ by, want int }{{1, longSlack}, {1, longSlack}, {1, defaultSlack}, {-1, longSlack}, {5, defaultSlack}, {-7, longSlack}} {
		m.change(step.by)
		got, err := os.ReadFile(m.path)
		if err != nil {
			t.Fatal(err)
		}
		if strings.TrimSpace(string(got)) != fmt.Sprint(step.want) {
			t.Errorf("%d readers: slack %s ns, want %d", m.readers, strings.TrimSpace(string(got)), step.want)
		}
	}
	m.close()
	if got, err := os.ReadFile(m.path); err != nil || strings.TrimSpace(string(got)) != fmt.Sprint(defaultSlack) {
		t.Errorf("in the end %s, %v", got, err)
	}
}
