package intercept

import (
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

// The reader of a thread that calls all the time is where that thread is, and may be anywhere when
// it stops.
func TestReaderFollowsCaller(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("TestReaderFollowsCaller: this process may run on one processor only")
	}
	eventually(t, "readers of other tests end", func() bool { return bound(t) == 0 })
	path := socketPath(t)
	s, _ := serve(t, testConfig(path, "", &testMaker{}))
	c := startChild(t, nil)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(c.fd), unix.SECCOMP_IOCTL_NOTIF_SET_FLAGS, unix.SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP); errno == unix.EINVAL {
		t.Skip("TestReaderFollowsCaller: the kernel cannot wake readers on their callers' processor (SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP, Linux 6.6)")
	}
	c.handOver(path, testName)
	most := 0
	for range 100 { // a busy machine moves the caller around
		stop, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			for {
				most = max(most, bound(t))
				select {
				case <-stop:
					return
				default:
					runtime.Gosched()
				}
			}
		}()
		const calls = 5000
		if o := c.do(command{Op: "storm", Family: unix.AF_INET, Type: unix.SOCK_STREAM, Threads: 1, N: calls}); o.OK != calls {
			t.Errorf("%d good of %d, first errno %v", o.OK, calls, unix.Errno(o.Errno))
		}
		close(stop)
		<-ended
		if t.Failed() || most > 0 {
			break
		}
	}
	if most != 1 {
		t.Errorf("%d threads stayed on one processor, want the reader", most)
	}
	eventually(t, "the reader may run anywhere again", func() bool { return bound(t) == 0 })
	if n := s.Stats().Readers; n != idleThreads {
		t.Errorf("%d threads, want %d", n, idleThreads)
	}
}

var allowedCPUs = regexp.MustCompile(`(?m)^Cpus_allowed_list:\t\d+$`)

// bound counts the threads of this process that may run on one processor only.
func bound(t *testing.T) (n int) {
	files, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil || len(files) == 0 {
		t.Errorf("no threads: %v", err)
	}
	for _, f := range files {
		status, err := os.ReadFile(f)
		if err == nil && allowedCPUs.Match(status) { // else it has ended
			n++
		}
	}
	return n
}

// TestMonitorOfServer: while an agent's readers are fewer than Go's processors one thread, Go's
// monitor, sleeps for longer, and readers' timers are exact.
func TestMonitorOfServer(t *testing.T) {
	testutil.NeedRoot(t, "changes a thread's timer slack")
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(32))
	patient := func() (n int) {
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		for _, thread := range threads {
			if slack, err := os.ReadFile("/proc/" + thread.Name() + "/timerslack_ns"); err == nil && strings.TrimSpace(string(slack)) == "4000000" {
				n++
			}
		}
		return n
	}
	path := socketPath(t)
	_, stop := serve(t, testConfig(path, "", &testMaker{}))
	before := patient()
	c := trapped(t, path, testName)
	if o := c.do(command{Op: "socket", Family: unix.AF_INET, Type: unix.SOCK_STREAM}); o.Errno != 0 {
		t.Fatal(unix.Errno(o.Errno))
	}
	eventually(t, "a thread more sleeps for longer", func() bool { return patient() > before })
	stop()
}
