package intercept

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/internal/trap"
)

// priorities is a handler as another plane may have one: it answers getpriority(), by what is asked
// for.
type priorities struct {
	refused trap.Reason
	gave    atomic.Uint64 // files
}

// What getpriority()'s second argument asks priorities for.
const (
	wantValue = iota + 1
	wantErrno
	wantFile
	wantOwn
	wantFailure
)

func (h *priorities) Owns(d *trap.Data) bool {
	return d.Arch == trap.NativeArch && d.Nr == unix.SYS_GETPRIORITY && d.Args[0] == unix.PRIO_USER
}

func (h *priorities) Answer(c *trap.Call) error {
	switch c.Data().Args[1] {
	case wantValue:
		return c.Return(42)
	case wantErrno:
		return c.Refuse(unix.EXDEV)
	case wantFile:
		fd, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		if err := c.Give(trap.Descriptor{FD: fd}); err != nil {
			return err
		}
		h.gave.Add(1)
		return nil
	case wantOwn:
		return c.PassThrough()
	}
	return h.refused.Because(errors.New("cannot"))
}

func (h *priorities) Reasons() []*trap.Reason { return []*trap.Reason{&h.refused} }

// TestAnotherHandler: a handler of another plane answers its calls by the same listener, in its own
// ways, and changes nothing for the others; what is nobody's call the kernel carries out.
func TestAnotherHandler(t *testing.T) {
	h := &priorities{refused: trap.Reason{Name: "no_priority", Errno: unix.EDOM}}
	path := socketPath(t)
	cfg := testConfig(path, "", &testMaker{})
	cfg.others = []trap.Handler{h}
	s, _ := serve(t, cfg)
	for _, container := range []struct {
		metadata string
		sockets  uint64 // of the agent's
	}{{testName, 1}, {model.EndpointNone, 1}} {
		c := trapped(t, path, container.metadata)
		own := c.do(command{Op: "priority", Type: unix.PRIO_PROCESS})
		for ask, want := range map[int]outcome{
			wantValue: {OK: 42}, wantErrno: {Errno: int(unix.EXDEV), OK: -1}, wantFailure: {Errno: int(unix.EDOM), OK: -1}, wantOwn: {Errno: int(unix.ESRCH), OK: -1},
		} {
			if got := c.do(command{Op: "priority", Type: unix.PRIO_USER, N: ask}); got.Errno != want.Errno || want.Errno == 0 && got.OK != want.OK {
				t.Errorf("%q asks for %d: %+v, want %+v", container.metadata, ask, got, want)
			}
		}
		if got := c.do(command{Op: "priority", Type: unix.PRIO_USER, N: wantFile}); got.Errno != 0 || got.OK < 3 {
			t.Errorf("%q asks for a file: %+v", container.metadata, got)
		}
		if own.Errno != 0 || own.OK == 0 || own.OK == 42 {
			t.Errorf("%q: nobody's call: %+v", container.metadata, own)
		}
		if o := c.tcp(unix.AF_INET); o.Errno != 0 {
			t.Errorf("%q: socket(): %v", container.metadata, unix.Errno(o.Errno))
		}
		// A call is counted once it is answered, when the caller may go on already.
		testutil.Eventually(t, container.metadata+": sockets counted", func() (bool, string) {
			given := s.Stats().Answered
			return given == container.sockets, fmt.Sprintf("%d, want %d", given, container.sockets)
		})
	}
	testutil.Eventually(t, "calls of the other handler counted", func() (bool, string) {
		gave, failed := h.gave.Load(), s.Stats().Failed["no_priority"]
		return gave == 2 && failed == 2,
			fmt.Sprintf("%d files given and %d calls failed, want 2 and 2", gave, failed)
	})
}

// deferring defers getpriority() and gives a file.
type deferring struct {
	priorities
	errs chan error
}

func (h *deferring) Answer(c *trap.Call) error {
	d := c.Defer()
	go func() {
		fd, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			var left trap.Left
			left, err = d.Give(trap.Descriptor{FD: fd})
			if _, open := unix.FcntlInt(uintptr(left.FD), unix.F_GETFD, 0); err != nil && open != nil {
				err = fmt.Errorf("the descriptor that nobody got is closed: %w", open)
			} else if err != nil {
				_ = unix.Close(left.FD)
			}
		}
		h.errs <- err
	}()
	return nil
}

// TestDeferredFile: a deferred call gives a file, and one whose caller can have no more files has an
// answer, too, while the file stays the agent's.
func TestDeferredFile(t *testing.T) {
	h := &deferring{errs: make(chan error, 1)}
	path := socketPath(t)
	cfg := testConfig(path, "", &testMaker{})
	cfg.others = []trap.Handler{h}
	serve(t, cfg)
	c := trapped(t, path, testName)
	ask := command{Op: "priority", Type: unix.PRIO_USER}
	if o := c.do(ask); o.Errno != 0 || o.OK < 3 {
		t.Errorf("a file: %+v", o)
	}
	testutil.NoError(t, <-h.errs)
	c.do(command{Op: "nofile", N: 3})
	if o := c.do(ask); unix.Errno(o.Errno) != unix.EMFILE {
		t.Errorf("one more than it may have: %+v, want EMFILE", o)
	}
	if err := <-h.errs; !errors.Is(err, unix.EMFILE) {
		t.Errorf("the handler heard %v, want EMFILE", err)
	}
}

// deferredSockets defers socket() and gives sockets. One that a thread has and was not told of it
// gets when it comes again, as those have it that plane/stacks gives.
type deferredSockets struct {
	trap.Handler // TCP's, which owns the same calls
	mu           sync.Mutex
	left         map[uint32]trap.Left // by thread
	interrupted  atomic.Uint64
}

func (h *deferredSockets) Answer(c *trap.Call) error {
	d := c.Defer()
	go func() {
		h.mu.Lock()
		before, is := h.left[d.Thread()]
		delete(h.left, d.Thread())
		h.mu.Unlock()
		if !is {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err == nil {
				err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PRIORITY, int(testEndpoint))
			}
			if err != nil {
				_ = d.Refuse(unix.ENOBUFS)
				return
			}
			before = trap.Left{FD: fd, Number: -1}
		}
		var st unix.Stat_t
		_ = unix.Fstat(before.FD, &st) // of an open file
		left, err := d.GiveAgain(before, trap.Descriptor{FD: before.FD, Inode: st.Ino})
		if err != nil {
			h.interrupted.Add(1)
		}
		if err != nil && left.FD >= 0 {
			h.mu.Lock()
			h.left[d.Thread()] = left
			h.mu.Unlock()
		}
	}()
	return nil
}

func (h *deferredSockets) Reasons() []*trap.Reason { return nil }
func (h *deferredSockets) Bound(*trap.Endpoint)    {}
func (h *deferredSockets) Released(*trap.Endpoint) {}

// TestDeferredAndInterrupted: once signals have been seen to interrupt callers, each of them has the
// descriptor that a deferred call returned, or none: an answer in two steps may be lost after the
// first one, and nobody hears of that.
func TestDeferredAndInterrupted(t *testing.T) {
	h := &deferredSockets{Handler: &Handler{}, left: map[uint32]trap.Left{}}
	path := socketPath(t)
	cfg := testConfig(path, "", &testMaker{})
	cfg.others = []trap.Handler{h}
	serve(t, cfg)
	c := startChild(t, nil, "HEDDLE_INTERRUPTIBLE=1")
	c.handOver(path, testName)
	const threads = 16
	storm := func(calls int) outcome {
		t.Helper()
		o := c.do(command{Op: "storm", Family: unix.AF_INET, Type: unix.SOCK_STREAM, Threads: threads, N: calls / threads, Signals: true})
		if o.OK != calls || o.Errno != 0 || o.Strange != 0 {
			t.Fatalf("%d good of %d, %d strange, first errno %v", o.OK, calls, o.Strange, unix.Errno(o.Errno))
		}
		return o
	}
	open := 0
	eventually(t, "a call is interrupted", func() bool {
		open = storm(threads).Open
		return h.interrupted.Load() > 0
	})
	if o := storm(threads * 1000); o.Open > open {
		t.Errorf("%d descriptors that no call returned", o.Open-open)
	}
}

// again gives a socket, and gives it again by the number that a caller is said to have.
type again struct {
	priorities
	socket int
	inode  uint64
	left   chan trap.Left
	errs   chan error
}

func (h *again) Answer(c *trap.Call) error {
	d := c.Defer()
	go func() {
		own, err := unix.FcntlInt(uintptr(h.socket), unix.F_DUPFD_CLOEXEC, 0)
		if err == nil {
			_, err = d.GiveAgain(<-h.left, trap.Descriptor{FD: own, Inode: h.inode})
		}
		h.errs <- err
	}()
	return nil
}

// TestGivenAgain: a caller that was interrupted, and has the socket already, is told of the number by
// which it has it; if it has it no more, it gets it once more.
func TestGivenAgain(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testutil.NoError(t, err)
	t.Cleanup(func() { _, _ = unix.Close(pair[0]), unix.Close(pair[1]) })
	var st unix.Stat_t
	testutil.NoError(t, unix.Fstat(pair[0], &st))
	h := &again{socket: pair[0], inode: st.Ino, left: make(chan trap.Left, 1), errs: make(chan error, 1)}
	path := socketPath(t)
	cfg := testConfig(path, "", &testMaker{})
	cfg.others = []trap.Handler{h}
	serve(t, cfg)
	c := trapped(t, path, testName)
	ask := func(has int) int {
		t.Helper()
		h.left <- trap.Left{FD: -1, Number: has}
		o := c.do(command{Op: "priority", Type: unix.PRIO_USER})
		if err := <-h.errs; err != nil || o.Errno != 0 {
			t.Fatalf("%v, %+v", err, o)
		}
		return o.OK
	}
	first := ask(-1)
	if got := ask(first); got != first {
		t.Errorf("given again: %d, want %d, which it has", got, first)
	}
	if got := ask(first + 100); got == first || got == first+100 {
		t.Errorf("given again: %d, which is another one's", got)
	}
}

// chosen is a handler as a plane may have one that endpoints choose: their socket() gives one end of
// a socket pair, but for IPv6, which it leaves to whoever comes next.
type chosen struct {
	trap.Handler // TCP's, which owns the same calls
	by           atomic.Uint32
	gave         atomic.Uint64
	closed       atomic.Bool
	mu           sync.Mutex // guards ends
	ends         []int      // that the plane keeps
}

func (h *chosen) Answer(c *trap.Call) error {
	if uint32(c.Endpoint.ID) != h.by.Load() || c.Data().Args[0] != unix.AF_INET {
		return c.Next()
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	h.mu.Lock()
	h.ends = append(h.ends, pair[1])
	h.mu.Unlock()
	if err := c.Give(trap.Descriptor{FD: pair[0]}); err != nil {
		return err
	}
	h.gave.Add(1)
	return nil
}

func (h *chosen) Reasons() []*trap.Reason { return nil }
func (h *chosen) Bound(*trap.Endpoint)    {}
func (h *chosen) Released(*trap.Endpoint) {}
func (h *chosen) Close()                  { h.closed.Store(true) }

// TestHandlerThatEndpointsChoose: a handler that is registered after TCP's is asked first; what is
// not for it, by endpoint or by call, TCP answers as if there were no other.
func TestHandlerThatEndpointsChoose(t *testing.T) {
	h := &chosen{Handler: &Handler{}}
	t.Cleanup(func() {
		for _, fd := range h.ends {
			closeFD(fd)
		}
	})
	path := socketPath(t)
	cfg := testConfig(path, "", &testMaker{})
	cfg.others = []trap.Handler{h}
	s, stop := serve(t, cfg)
	c := trapped(t, path, testName)
	const own, pair = unix.IPPROTO_TCP, 0
	want := func(what string, family, protocol int, gave, answered uint64) {
		t.Helper()
		if o := c.tcp(family); o.Errno != 0 || o.Protocol != protocol {
			t.Errorf("%s: %+v, want a socket of protocol %d", what, o, protocol)
		}
		// A call is counted once it is answered, when the caller may go on already.
		testutil.Eventually(t, what+": calls counted", func() (bool, string) {
			st := s.Stats()
			return h.gave.Load() == gave && st.Answered == answered && st.Continued == 0,
				fmt.Sprintf("%d of the chosen, %d of TCP, %d continued; want %d, %d and 0",
					h.gave.Load(), st.Answered, st.Continued, gave, answered)
		})
	}
	want("not chosen", unix.AF_INET, own, 0, 1)
	h.by.Store(uint32(testEndpoint))
	want("chosen", unix.AF_INET, pair, 1, 1)
	want("chosen, but left to TCP", unix.AF_INET6, own, 1, 2)
	h.by.Store(uint32(testEndpoint) + 1)
	want("another has chosen it", unix.AF_INET, own, 1, 3)
	stop()
	if !h.closed.Load() {
		t.Error("the server has not closed the handler")
	}
}
