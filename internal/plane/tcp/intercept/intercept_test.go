package intercept

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

func TestFlagsAndFamilies(t *testing.T) { bothWays(t, tryFlagsAndFamilies) }

func tryFlagsAndFamilies(t *testing.T) {
	path := socketPath(t)
	s, _ := serve(t, testConfig(path, "", &testMaker{}))
	c := trapped(t, path, testName)
	n := uint64(0)
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		for _, flags := range []int{0, unix.SOCK_CLOEXEC, unix.SOCK_NONBLOCK, unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK} {
			for _, proto := range []int{0, unix.IPPROTO_TCP, unix.IPPROTO_MPTCP} {
				o := c.socket(family, unix.SOCK_STREAM|flags, proto)
				n++
				if o.Errno != 0 {
					t.Fatalf("socket(%d, %#x, %d): %v", family, flags, proto, unix.Errno(o.Errno))
				}
				if o.CloExec != (flags&unix.SOCK_CLOEXEC != 0) || o.Nonblock != (flags&unix.SOCK_NONBLOCK != 0) {
					t.Errorf("socket(%d, %#x, %d): close-on-exec %v, non-blocking %v", family, flags, proto, o.CloExec, o.Nonblock)
				}
				if o.Priority != int(testEndpoint) || o.Protocol != unix.IPPROTO_TCP || o.UID != uint32(os.Geteuid()) {
					t.Errorf("socket(%d, %#x, %d): %+v is not a TCP socket of the agent's", family, flags, proto, o)
				}
			}
		}
	}
	eventually(t, "counters", func() bool {
		st := s.Stats()
		return st.Answered == n && st.PoolHits+st.PoolMisses == n && st.Continued == 0
	})
	// The prefiller gives way to all: on a busy machine it comes late.
	eventually(t, "a socket that was ready", func() bool {
		c.socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		return s.Stats().PoolHits > 0
	})
}

// What is not a TCP socket ends as if it had not been trapped.
func TestOthersContinue(t *testing.T) {
	path := socketPath(t)
	s, _ := serve(t, testConfig(path, "", &testMaker{}))
	c := trapped(t, path, testName)
	plain := startChildPlain(t)
	calls := [][3]int{
		{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP},
		{unix.AF_INET6, unix.SOCK_STREAM, unix.IPPROTO_SCTP},
		{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_UDP},
		{unix.AF_INET, unix.SOCK_STREAM, -1},
		{unix.AF_INET, unix.SOCK_STREAM | 0x100, 0},
		{unix.AF_INET, unix.SOCK_STREAM | 0x40000000, 0},
	}
	for _, a := range calls {
		got, want := c.socket(a[0], a[1], a[2]), plain.socket(a[0], a[1], a[2])
		if got.Errno != want.Errno || got.Errno == 0 && got.Protocol != want.Protocol {
			t.Errorf("socket(%d, %#x, %d): %v, without Heddle %v", a[0], a[1], a[2], unix.Errno(got.Errno), unix.Errno(want.Errno))
		}
	}
	eventually(t, "counters", func() bool { return s.Stats().Continued == uint64(len(calls)) })
}

func TestErrnos(t *testing.T) { bothWays(t, tryErrnos) }

func tryErrnos(t *testing.T) {
	path := socketPath(t)
	m := &testMaker{}
	cfg := testConfig(path, "", m)
	cfg.ReadyPerFamily = -1
	s, _ := serve(t, cfg)
	c := trapped(t, path, testName)
	for _, e := range []struct {
		err    error
		want   unix.Errno
		reason string
	}{
		{unix.EMFILE, unix.ENFILE, "agent_nofile"},
		{fmt.Errorf("tag: %w", unix.ENOMEM), unix.ENOMEM, "make_socket"},
		{unix.EAFNOSUPPORT, unix.EAFNOSUPPORT, "make_socket"},
		{unix.EPERM, unix.ENETDOWN, "make_socket"},
		{errors.New("no map"), unix.ENETDOWN, "make_socket"},
	} {
		m.err.Store(&e.err)
		before := s.Stats().Failed[e.reason]
		if o := c.tcp(unix.AF_INET); unix.Errno(o.Errno) != e.want {
			t.Errorf("%v: caller got %v, want %v", e.err, unix.Errno(o.Errno), e.want)
		}
		eventually(t, "counter", func() bool { return s.Stats().Failed[e.reason] == before+1 })
	}
	m.err.Store(nil)
	if o := c.tcp(unix.AF_INET); o.Errno != 0 {
		t.Errorf("after failures: %v", unix.Errno(o.Errno))
	}
}

func TestCallerOutOfDescriptors(t *testing.T) {
	path := socketPath(t)
	s, _ := serve(t, testConfig(path, "", &testMaker{}))
	c := trapped(t, path, testName)
	if o := c.do(command{Op: "nofile", N: 3}); o.Errno != 0 {
		t.Fatal(unix.Errno(o.Errno))
	}
	for range 3 {
		if o := c.tcp(unix.AF_INET); unix.Errno(o.Errno) != unix.EMFILE {
			t.Fatalf("got %v, want EMFILE", unix.Errno(o.Errno))
		}
	}
	c.do(command{Op: "nofile", N: 1024})
	if o := c.tcp(unix.AF_INET); o.Errno != 0 {
		t.Fatal(unix.Errno(o.Errno))
	}
	if n := s.Stats().Failed["caller_nofile"]; n != 3 {
		t.Errorf("caller_nofile = %d, want 3", n)
	}
}

func TestOwner(t *testing.T) { bothWays(t, tryOwner) }

func tryOwner(t *testing.T) {
	testutil.NeedRoot(t, "changes the caller's user")
	path := socketPath(t)
	serve(t, testConfig(path, "", &testMaker{}))
	c := trapped(t, path, testName)
	for _, uid := range []int{0, 1000, 1000, 0, 65534, 0, 0} {
		if o := c.do(command{Op: "euid", N: uid}); o.Errno != 0 {
			t.Fatal(unix.Errno(o.Errno))
		}
		if o := c.tcp(unix.AF_INET); o.Errno != 0 || o.UID != uint32(uid) {
			t.Errorf("as uid %d: errno %v, socket of uid %d", uid, unix.Errno(o.Errno), o.UID)
		}
	}
	nobody := startChild(t, &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}})
	nobody.handOver(path, testName)
	if o := nobody.tcp(unix.AF_INET6); o.Errno != 0 || o.UID != 65534 {
		t.Errorf("program of uid 65534: %+v", o)
	}
}

func TestKilledCallerLeavesNothing(t *testing.T) { bothWays(t, tryKilledCallerLeavesNothing) }

func tryKilledCallerLeavesNothing(t *testing.T) {
	path := socketPath(t)
	received := make(chan struct{}, 256)
	m := &testMaker{gate: make(chan struct{}), entered: func() { received <- struct{}{} }}
	s, _ := serve(t, testConfig(path, "", m))
	keeps, dies := trapped(t, path, testName), trapped(t, path, testName)
	<-received // the first of the IPv4 pool
	dies.tell(command{Op: "socket", Family: unix.AF_INET6, Type: unix.SOCK_STREAM})
	<-received
	dies.kill()
	close(m.gate)
	eventually(t, "caller gone, loop ended", func() bool {
		st := s.Stats()
		return st.Failed["caller_gone"] == 1 && st.Listeners == 1
	})
	if o := keeps.tcp(unix.AF_INET6); o.Errno != 0 {
		t.Fatal(unix.Errno(o.Errno))
	}
	eventually(t, "answered", func() bool { return s.Stats().Answered == 1 })
}

// An endpoint that has as many sockets as it may is told ENFILE, and gets sockets again when it
// may. No socket is lost.
func TestQuota(t *testing.T) { bothWays(t, tryQuota) }

func tryQuota(t *testing.T) {
	path := socketPath(t)
	m := &testMaker{quota: new(atomic.Int64)}
	m.quota.Store(3)
	s, _ := serve(t, testConfig(path, "", m))
	c := trapped(t, path, testName)
	for i := range 6 {
		want := unix.Errno(0)
		if i >= 3 {
			want = unix.ENFILE
		}
		if o := c.tcp(unix.AF_INET); unix.Errno(o.Errno) != want {
			t.Errorf("socket %d: %v, want %v", i, unix.Errno(o.Errno), want)
		}
	}
	m.quota.Store(1)
	if o := c.tcp(unix.AF_INET6); o.Errno != 0 {
		t.Errorf("when it may again: %v", unix.Errno(o.Errno))
	}
	if n := s.Stats().Failed["socket_quota"]; n != 3 {
		t.Errorf("socket_quota = %d, want 3", n)
	}
}

func TestManyThreadsAndSignals(t *testing.T) { bothWays(t, tryManyThreadsAndSignals) }

func tryManyThreadsAndSignals(t *testing.T) {
	path := socketPath(t)
	s, _ := serve(t, testConfig(path, "", &testMaker{}))
	killable, interruptible := trapped(t, path, testName), startChild(t, nil, "HEDDLE_INTERRUPTIBLE=1")
	interruptible.handOver(path, testName)
	const calls = 16 * 200
	storm := func(c *child, signals bool) (o outcome, allowed int) {
		began := time.Now()
		o = c.do(command{Op: "storm", Family: unix.AF_INET, Type: unix.SOCK_STREAM, Threads: 16, N: calls / 16, Signals: signals})
		// A signal that comes to an interruptible caller between the agent's last step and the
		// caller's next takes the answer away unseen (decision 0011): about three times a second
		// under this many signals, however many calls there are. Without the wait for a thread's
		// earlier calls it is as often in a tenth of a second.
		if signals && c == interruptible {
			allowed = 2 + int(time.Since(began)/(50*time.Millisecond))
		}
		return o, allowed
	}
	leaked := 0
	for what, c := range map[string]*child{"killable": killable, "interruptible": interruptible} {
		for _, signals := range []bool{false, true} {
			o, allowed := storm(c, signals)
			// The program's handlers restart system calls (SA_RESTART), so none of them may end in
			// EINTR.
			if o.OK != calls || o.Errno != 0 || o.Ended != 0 || o.Strange != 0 {
				t.Errorf("%s, signals %v: %d good of %d, %d EINTR, %d strange, first errno %v", what, signals, o.OK, calls, o.Ended, o.Strange, unix.Errno(o.Errno))
			}
			if c == interruptible && signals {
				leaked = o.Open
			}
			if o.Open > allowed {
				t.Errorf("%s, signals %v: %d leaked descriptors", what, signals, o.Open)
			}
		}
	}
	eventually(t, "all are counted", func() bool { return s.Stats().Answered >= 4*calls })
	// Answers are quick, so few signals come in between. Go on until one has, or this tested
	// nothing.
	eventually(t, "a call is interrupted", func() bool {
		o, allowed := storm(interruptible, true)
		if o.OK != calls || o.Open > leaked+allowed {
			t.Errorf("%d good of %d, %d leaked descriptors, first errno %v", o.OK, calls, o.Open, unix.Errno(o.Errno))
		}
		leaked = o.Open
		return s.Stats().Failed["caller_gone"] > 0
	})
}

// idleThreads are those that wait for listeners' calls, or answer the calls of one listener
// (trap.fewestWaiting).
const idleThreads = 2

// mostReaders counts the threads of readers there are at a time while during runs.
func mostReaders(s *testAgent, during func()) (most int) {
	stop, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		for {
			select {
			case <-stop:
				return
			default:
				most = max(most, s.Stats().Readers)
				runtime.Gosched()
			}
		}
	}()
	during()
	close(stop)
	<-watched
	return most
}

// A thread that calls as fast as it can is there again before its reader. It has no use for another
// one, and would wait for both.
func TestOneCallerOneReader(t *testing.T) {
	path := socketPath(t)
	s, _ := serve(t, testConfig(path, "", &testMaker{}))
	c := trapped(t, path, testName)
	const calls = 5000
	most := mostReaders(s, func() {
		if o := c.do(command{Op: "storm", Family: unix.AF_INET, Type: unix.SOCK_STREAM, Threads: 1, N: calls}); o.OK != calls || o.Open != 0 {
			t.Errorf("%d good of %d, %d left open, first errno %v", o.OK, calls, o.Open, unix.Errno(o.Errno))
		}
	})
	if most != idleThreads {
		t.Errorf("%d threads for one caller, want one and the one that waits for others", most)
	}
}

// When the callers of one filter wait for their turn, more threads answer them; those that have
// nothing to do end, and so do those that joined when one thread makes all the calls.
func TestHelpersJoin(t *testing.T) {
	path := socketPath(t)
	s, _ := serve(t, testConfig(path, "", &testMaker{}))
	c := trapped(t, path, testName)
	if o := c.tcp(unix.AF_INET); o.Errno != 0 {
		t.Fatal(unix.Errno(o.Errno))
	}
	testutil.Eventually(t, "threads for one caller", func() (ok bool, saw string) { // one more begins to wait for others
		n := s.Stats().Readers
		return n == idleThreads, fmt.Sprint(n)
	})
	const threads, calls = 16, 16 * 500
	most := 0
	for range 100 { // nobody waits for as long as the machine runs one thread at a time
		most = mostReaders(s, func() {
			o := c.do(command{Op: "storm", Family: unix.AF_INET, Type: unix.SOCK_STREAM, Threads: threads, N: calls / threads})
			if o.OK != calls || o.Errno != 0 || o.Strange != 0 || o.Open != 0 {
				t.Errorf("%d good of %d, %d strange, %d left open, first errno %v", o.OK, calls, o.Strange, o.Open, unix.Errno(o.Errno))
			}
		})
		if t.Failed() || most > idleThreads {
			break
		}
	}
	const helpers = 3 // of package trap, at most
	if most <= idleThreads || most > idleThreads+helpers {
		t.Errorf("at most %d threads at a time, want %d to %d", most, idleThreads+1, idleThreads+helpers)
	}
	const alone = 20000
	c.tell(command{Op: "storm", Family: unix.AF_INET, Type: unix.SOCK_STREAM, Threads: 1, N: alone})
	heard := make(chan outcome, 1)
	go func() { heard <- c.hear() }()
	for one := false; ; {
		select {
		case o := <-heard:
			if !one || o.OK != alone {
				t.Errorf("%d good of %d; one reader at last: %v", o.OK, alone, one)
			}
		default:
			one = one || s.Stats().Readers == idleThreads
			runtime.Gosched()
			continue
		}
		break
	}
	eventually(t, "helpers end", func() bool { return s.Stats().Readers == idleThreads })
}

func TestIdentityFailsClosed(t *testing.T) {
	path := socketPath(t)
	s, _ := serve(t, testConfig(path, "", &testMaker{}))
	known, unknown := trapped(t, path, testName), trapped(t, path, "n1/other")
	if o := unknown.tcp(unix.AF_INET); unix.Errno(o.Errno) != unix.ENETDOWN {
		t.Errorf("unknown endpoint: %v", unix.Errno(o.Errno))
	}
	if o := known.tcp(unix.AF_INET); o.Errno != 0 {
		t.Errorf("known endpoint: %v", unix.Errno(o.Errno))
	}
	eventually(t, "pool is filled", func() bool { return s.Stats().Ready >= firstReady-1 })
	s.Forget(testEndpoint)
	// One may just be being made.
	eventually(t, "pool is closed", func() bool { return s.Stats().Ready == 0 })
	if o := known.tcp(unix.AF_INET6); unix.Errno(o.Errno) != unix.ENETDOWN {
		t.Errorf("removed endpoint: %v", unix.Errno(o.Errno))
	}
	// A new container under the same id is not the removed one.
	if o := trapped(t, path, testName).tcp(unix.AF_INET); o.Errno != 0 {
		t.Errorf("new container: %v", unix.Errno(o.Errno))
	}
	if n := s.Stats().Failed["refuse_unknown_endpoint"]; n != 2 {
		t.Errorf("refuse_unknown_endpoint = %d, want 2", n)
	}
}

func TestLimits(t *testing.T) {
	path := socketPath(t)
	cfg := testConfig(path, "", &testMaker{})
	cfg.MaxListeners, cfg.MaxReady = 1, 3
	s, _ := serve(t, cfg)
	first := trapped(t, path, testName)
	eventually(t, "pool is filled to MaxReady", func() bool { return s.Stats().Ready == 3 })
	second := trapped(t, path, testName)
	if o := second.tcp(unix.AF_INET); unix.Errno(o.Errno) != unix.ENOSYS {
		t.Errorf("listener above the limit: %v", unix.Errno(o.Errno))
	}
	if o := first.tcp(unix.AF_INET); o.Errno != 0 {
		t.Errorf("listener within the limit: %v", unix.Errno(o.Errno))
	}
	if n := s.Stats().Failed["too_many_listeners"]; n != 1 {
		t.Errorf("too_many_listeners = %d", n)
	}
}

func count(t testing.TB, dir string) int {
	t.Helper()
	e, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

func TestNothingLeaks(t *testing.T) { bothWays(t, tryNothingLeaks) }

func tryNothingLeaks(t *testing.T) {
	path := socketPath(t)
	s, stop := serve(t, testConfig(path, "", &testMaker{}))
	trapped(t, path, testName).kill() // whatever the runtime opens once is open now
	eventually(t, "idle", func() bool { return s.Stats().Listeners == 0 && s.Stats().Ready == 0 })
	const n = 40 // half of which is more than the threads that stay to wait for calls
	fds, threads := count(t, "/proc/self/fd"), count(t, "/proc/self/task")
	var children []*child
	for range n {
		c := trapped(t, path, testName)
		if o := c.tcp(unix.AF_INET6); o.Errno != 0 {
			t.Fatal(unix.Errno(o.Errno))
		}
		children = append(children, c)
	}
	if s.Stats().Listeners != n {
		t.Errorf("%d listeners, want %d", s.Stats().Listeners, n)
	}
	for _, c := range children {
		c.kill()
	}
	eventually(t, "loops, sockets and threads have gone", func() bool {
		st := s.Stats()
		return st.Listeners == 0 && st.Ready == 0 && count(t, "/proc/self/fd") <= fds &&
			count(t, "/proc/self/task") < threads+n/2
	})
	stop()
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("hand-off socket after Close: %v", err)
	}
}

func TestListenRefuses(t *testing.T) {
	path := socketPath(t)
	serve(t, testConfig(path, "", &testMaker{}))
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("hand-off socket: %v %v, want mode 0600", st.Mode(), err)
	}
	for what, change := range map[string]func(*agentConfig){
		"another agent": func(*agentConfig) {},
		"SocketPath":    func(c *agentConfig) { c.SocketPath = "/" + strings.Repeat("x", 120) },
		"Maker":         func(c *agentConfig) { c.Maker = nil },
		"Resolve":       func(c *agentConfig) { c.Resolve = nil },
	} {
		c := testConfig(path, "", &testMaker{})
		change(&c)
		if s, err := listen(c); err == nil {
			s.Close()
			t.Errorf("%s: accepted", what)
		} else if !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v does not say so", what, err)
		}
	}
}

// TestCountsNeverFall: what is reported while sockets are given is never less than before, which
// would be taken for a restart.
func TestCountsNeverFall(t *testing.T) {
	path := socketPath(t)
	s, _ := serve(t, testConfig(path, "", &testMaker{}))
	c := trapped(t, path, testName)
	c.tell(command{Op: "time", Family: unix.AF_INET, Type: unix.SOCK_STREAM, N: 20000})
	done := make(chan outcome, 1)
	go func() { done <- c.hear() }()
	for before := s.Stats(); ; {
		now := s.Stats()
		if now.Answered < before.Answered || now.PoolMisses < before.PoolMisses || now.PoolHits < before.PoolHits {
			t.Fatalf("%d answered, %d hits, %d misses after %d, %d, %d", now.Answered, now.PoolHits, now.PoolMisses,
				before.Answered, before.PoolHits, before.PoolMisses)
		}
		before = now
		select {
		case o := <-done:
			if o.Errno != 0 || now.Answered == 0 {
				t.Errorf("%v; %d answered", unix.Errno(o.Errno), now.Answered)
			}
			return
		default:
		}
	}
}
