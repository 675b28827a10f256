package intercept

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

// ownNetns is the inode of the network namespace that the tests run in, which testConfig gives the
// endpoint.
func ownNetns() uint64 {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &st); err != nil {
		panic(err)
	}
	return st.Ino
}

var testNetns = ownNetns()

// errnoIn gives the error number in err.
func errnoIn(err error) (e unix.Errno) {
	errors.As(err, &e)
	return e
}

// logBuffer collects what a server logs.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// A program that leaves its endpoint's network namespace has the sockets of the one it is in, as
// without Heddle; so has each of its threads.
func TestForeignNetns(t *testing.T) { bothWays(t, tryForeignNetns) }

func tryForeignNetns(t *testing.T) {
	testutil.NeedRoot(t, "changes the caller's user")
	path := socketPath(t)
	s, _ := serve(t, testConfig(path, "", &testMaker{}))
	c := trapped(t, path, testName)
	if o := c.tcp(unix.AF_INET); o.Errno != 0 || o.Priority != int(testEndpoint) {
		t.Fatalf("in the endpoint's namespace: %+v", o)
	}
	for i, op := range []string{"unshare", "return"} {
		if o := c.do(command{Op: op}); o.Errno != 0 {
			t.Fatalf("%s: %v", op, unix.Errno(o.Errno))
		}
		want := int(testEndpoint) * i
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			if o := c.tcp(family); o.Errno != 0 || o.Priority != want || o.Protocol != unix.IPPROTO_TCP {
				t.Errorf("after %s: %+v, want a TCP socket with priority %d", op, o, want)
			}
		}
	}
	eventually(t, "counters", func() bool {
		st := s.Stats()
		return st.Failed["foreign_netns"] == 2 && st.Continued == 2
	})
}

// A container that names an endpoint whose network namespace is not its own gets nothing of it, and
// the operator is told.
func TestBundleThatLies(t *testing.T) { bothWays(t, tryBundleThatLies) }

func tryBundleThatLies(t *testing.T) {
	testutil.NeedRoot(t, "changes the caller's user")
	for _, known := range []bool{true, false} {
		path, logs := socketPath(t), &logBuffer{}
		cfg := testConfig(path, "", &testMaker{})
		cfg.Log = slog.New(slog.NewTextHandler(logs, nil))
		if !known { // forgotten between the hand-off and the call
			cfg.NetnsOf = func(model.EndpointID) (uint64, bool) { return ownNetns(), false }
		}
		s, _ := serve(t, cfg)
		c := startChild(t, &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET})
		c.handOver(path, testName)
		if o := c.tcp(unix.AF_INET); o.Errno != 0 || o.Priority != 0 {
			t.Errorf("known %v: %+v, want a socket that is not the endpoint's", known, o)
		}
		eventually(t, "a line in the log", func() bool {
			return strings.Contains(logs.String(), "names: it gets none") && strings.Contains(logs.String(), "reason=foreign_netns")
		})
		if n := s.Stats().Answered; n != 0 {
			t.Errorf("known %v: %d sockets given", known, n)
		}
	}
}

// firstNetns is the one that changeNetns left.
var firstNetns *os.File

// changeNetns moves the calling thread of a child to a network namespace of its own, or back.
func changeNetns(op string) (err error) {
	if op == "return" {
		return unix.Setns(int(firstNetns.Fd()), unix.CLONE_NEWNET)
	}
	if firstNetns, err = os.Open("/proc/thread-self/ns/net"); err != nil {
		return err
	}
	return unix.Unshare(unix.CLONE_NEWNET)
}

// A listener whose endpoint is that of its callers' network namespace: none yet, one, its removal,
// another one, and a program that leaves for a namespace without.
func TestEndpointByNetns(t *testing.T) { bothWays(t, tryEndpointByNetns) }

func tryEndpointByNetns(t *testing.T) {
	testutil.NeedRoot(t, "changes the caller's user")
	path := socketPath(t)
	cfg := testConfig(path, "", &testMaker{})
	var in atomic.Uint32 // the endpoint of testNetns, 0: none
	cfg.EndpointIn = func(inode uint64) (model.EndpointID, bool) {
		return model.EndpointID(in.Load()), inode == testNetns && in.Load() != 0
	}
	cfg.NetnsOf = func(id model.EndpointID) (uint64, bool) { return testNetns, uint32(id) == in.Load() }
	s, _ := serve(t, cfg)
	c := trapped(t, path, model.EndpointByNetns)
	want := func(what string, priority int, errno unix.Errno) {
		t.Helper()
		if o := c.tcp(unix.AF_INET); unix.Errno(o.Errno) != errno || errno == 0 && o.Priority != priority {
			t.Errorf("%s: %+v, want priority %d, %v", what, o, priority, errno)
		}
	}
	want("without an endpoint", 0, 0)
	in.Store(7)
	want("with one", 7, 0)
	if o := c.do(command{Op: "unshare"}); o.Errno != 0 {
		t.Fatal(unix.Errno(o.Errno))
	}
	want("in another namespace", 0, 0)
	if o := c.do(command{Op: "return"}); o.Errno != 0 {
		t.Fatal(unix.Errno(o.Errno))
	}
	in.Store(0)
	s.Forget(7)
	want("after its removal", 0, unix.ENETDOWN)
	in.Store(8)
	want("with another", 8, 0)
	st := s.Stats()
	if st.Failed["no_endpoint"] != 1 || st.Failed["foreign_netns"] != 1 || st.Failed["refuse_unknown_endpoint"] != 1 {
		t.Errorf("counters %v", st.Failed)
	}
}
