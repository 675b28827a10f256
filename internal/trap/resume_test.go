package trap

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/fdkeep"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

// trappedNr is a call that nothing in this process makes but threads with a filter for it.
const trappedNr = unix.SYS_GETPRIORITY

// filtered gives a listener of a thread whose trappedNr is trapped; call has the thread make it.
// The descriptor is the caller's.
func filtered(t *testing.T) (fd int, call func() <-chan unix.Errno) {
	t.Helper()
	calls, listener, failed := make(chan chan<- unix.Errno), make(chan int), make(chan unix.Errno, 1)
	go func() {
		runtime.LockOSThread() // not unlocked: the filter goes with the thread
		filter := []unix.SockFilter{
			{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // the number
			{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: trappedNr, Jf: 1},
			{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_USER_NOTIF},
			{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
		}
		prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
		_ = unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) // else seccomp fails
		r, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
			unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, uintptr(unsafe.Pointer(&prog)))
		if errno != 0 {
			failed <- errno
			return
		}
		listener <- int(r)
		for answer := range calls {
			_, _, errno := unix.Syscall(trappedNr, unix.PRIO_PROCESS, 0, 0)
			answer <- errno
		}
	}()
	select {
	case fd = <-listener:
	case errno := <-failed:
		if errno != unix.EBUSY {
			t.Fatalf("seccomp listener: %v", errno)
		}
		t.Skip("this process has a seccomp filter with a listener already, of which the kernel allows one")
	}
	t.Cleanup(func() { close(calls) })
	return fd, func() <-chan unix.Errno {
		answer := make(chan unix.Errno, 1)
		calls <- answer
		return answer
	}
}

// serveTest serves cfg, with what all tests need, until the test ends or stop is called.
func serveTest(t *testing.T, cfg Config) (s *Server, stop func()) {
	t.Helper()
	cfg.SocketPath, cfg.Log = filepath.Join(t.TempDir(), "s"), slog.New(slog.DiscardHandler)
	if cfg.Resolve == nil {
		cfg.Resolve = func(string, specs.ContainerProcessState) (model.EndpointID, error) { return 1, nil }
	}
	s = New()
	testutil.NoError(t, s.Listen(cfg))
	done := make(chan error, 1)
	go func() { done <- s.Serve(context.Background()) }()
	stop = sync.OnceFunc(func() {
		s.Close()
		testutil.NoError(t, <-done)
	})
	t.Cleanup(stop)
	return s, stop
}

// mute is a keeper that does not give what an earlier agent kept, and does not hear of agents while
// deaf.
type mute struct {
	*fdkeep.Client
	deaf atomic.Bool
}

func (m *mute) Take(prefix string) ([]fdkeep.Kept, error) {
	if prefix == "" {
		return nil, errors.New("mute")
	}
	return m.Client.Take(prefix)
}

func (m *mute) Serve() (io.Closer, fdkeep.Settled, error) {
	if m.deaf.Load() {
		return nil, fdkeep.Settled{}, errors.New("deaf")
	}
	return m.Client.Serve()
}

// While the keeper settles the calls of what it does not give, those of a server's own listeners are
// spared, but after the server's end they continue as well.
func TestOwnCallsContinueAfterLending(t *testing.T) {
	path := filepath.Join(t.TempDir(), "k")
	ctx, end := context.WithCancel(context.Background())
	kept := make(chan error, 1)
	go func() { kept <- fdkeep.Run(ctx, path) }()
	t.Cleanup(func() { end(); testutil.NoError(t, <-kept) }) // calls that still wait get ENOSYS
	m := &mute{Client: fdkeep.NewClient(path)}
	eventually(t, "an earlier agent ends", func() bool {
		hold, _, err := m.Serve()
		return err == nil && hold.Close() == nil
	})
	m.deaf.Store(true)
	missing := make(chan struct{})
	var once sync.Once
	s, stop := serveTest(t, Config{
		Keeper:   m,
		Resuming: func(error) { once.Do(func() { close(missing) }) },
		Away:     func(*Listener, model.EndpointID) (int32, bool) { return trappedNr, true },
	})
	<-missing
	fd, call := filtered(t)
	l := newListener(s, fd, specs.ContainerProcessState{Metadata: "n1/c1", State: specs.State{ID: "c1"}})
	s.prepareKeep(l)
	s.keep(l)
	if !s.serveListener(l) {
		t.Fatal("not served")
	}
	m.deaf.Store(false)
	stop()
	select {
	case errno := <-call():
		if errno != 0 {
			t.Errorf("the call: %v", errno)
		}
	case <-time.After(5 * time.Second):
		t.Error("the call waits for the next agent")
	}
}

// replaced is a keeper that ends once it has given its one listener, and then has none.
type replaced struct {
	state   specs.ContainerProcessState
	fd      int
	tries   atomic.Int32
	watches atomic.Int32
	dead    chan struct{}

	mu   sync.Mutex
	kept map[string]int // how often, by key
}

func (r *replaced) Put(key string, _ []byte, _, _ int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kept[key]++
	return nil
}

func (r *replaced) Drop(string) error { return nil }

func (r *replaced) Serve() (io.Closer, fdkeep.Settled, error) {
	return io.NopCloser(nil), fdkeep.Settled{}, nil
}

func (r *replaced) Take(prefix string) ([]fdkeep.Kept, error) {
	if prefix != "" {
		return nil, nil
	}
	if r.tries.Add(1) == 1 {
		return nil, errors.New("not yet")
	}
	meta, err := json.Marshal(r.state)
	if err != nil {
		return nil, err
	}
	page, err := unix.MemfdCreate("page", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	return []fdkeep.Kept{{Key: "c1", Meta: meta, FD: r.fd, Page: page}}, unix.Ftruncate(page, fdkeep.PageBytes)
}

func (r *replaced) Watch(ctx context.Context) error {
	if r.watches.Add(1) == 1 {
		select {
		case <-r.dead:
			return nil
		case <-ctx.Done():
		}
	}
	<-ctx.Done()
	return ctx.Err()
}

func (r *replaced) count(key string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.kept[key]
}

// A keeper that ends while what it gave is unpacked is replaced by one that has all of it.
func TestKeeperEndsWhileResuming(t *testing.T) {
	fd, _ := filtered(t)
	r := &replaced{fd: fd, dead: make(chan struct{}), kept: map[string]int{},
		state: specs.ContainerProcessState{Metadata: "n1/c1", State: specs.State{ID: "c1"}}}
	var once sync.Once
	s, _ := serveTest(t, Config{
		Keeper: r, StartKeeper: func() error { return nil },
		Resolve: func(string, specs.ContainerProcessState) (model.EndpointID, error) {
			once.Do(func() {
				close(r.dead)
				eventually(t, "the next keeper has what is served", func() bool { return r.watches.Load() == 2 })
			})
			return 1, nil
		},
	})
	eventually(t, "the listener is served", func() bool { return s.Stats().Listeners == 1 })
	eventually(t, "the next keeper has it", func() bool { return r.count("c1") == 1 })
}

// slow is a keeper that takes its time to give a listener.
type slow struct {
	dying
	asked, gives chan struct{}
	kept         fdkeep.Kept
}

func (k slow) Watch(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

func (k slow) Take(prefix string) ([]fdkeep.Kept, error) {
	if prefix != "" {
		return nil, nil
	}
	close(k.asked)
	<-k.gives
	return []fdkeep.Kept{k.kept}, nil
}

// The end of a server does not wait for what its keeper gives, which is closed.
func TestEndDoesNotWaitForKeeper(t *testing.T) {
	var p, q [2]int
	testutil.NoError(t, unix.Pipe2(p[:], unix.O_CLOEXEC))
	testutil.NoError(t, unix.Pipe2(q[:], unix.O_CLOEXEC))
	t.Cleanup(func() { closeFD(p[0]); closeFD(q[0]) })
	k := slow{asked: make(chan struct{}), gives: make(chan struct{}), kept: fdkeep.Kept{Key: "c1", FD: p[1], Page: q[1]}}
	_, stop := serveTest(t, Config{Keeper: k})
	<-k.asked
	ended := make(chan struct{})
	go func() { defer close(ended); stop() }()
	select {
	case <-ended:
	case <-time.After(5 * time.Second):
		t.Error("the end waits for the keeper")
	}
	close(k.gives)
	<-ended
	for _, fd := range []int{p[0], q[0]} {
		eventually(t, "it is closed", func() bool {
			poll := []unix.PollFd{{Fd: int32(fd)}}
			n, err := unix.Poll(poll, 0)
			return err == nil && n == 1 && poll[0].Revents&unix.POLLHUP != 0
		})
	}
}
