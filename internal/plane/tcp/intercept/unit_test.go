package intercept

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"testing"

	"heddle.dev/heddle/internal/trap"
	"heddle.dev/heddle/internal/trap/task"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

func TestClassify(t *testing.T) {
	call := func(family, typ, proto uint64) trap.Data {
		return trap.Data{Nr: unix.SYS_SOCKET, Arch: trap.NativeArch, Args: [6]uint64{family, typ, proto}}
	}
	const high = 0xdeadbeef << 32
	yes := map[trap.Data]request{
		call(unix.AF_INET, unix.SOCK_STREAM, 0):                                            {TCPSocket: trap.TCPSocket{Family: unix.AF_INET}},
		call(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, unix.IPPROTO_TCP):         {TCPSocket: trap.TCPSocket{Family: unix.AF_INET6, Nonblock: true}},
		call(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP):         {TCPSocket: trap.TCPSocket{Family: unix.AF_INET, MPTCP: true, CloseOnExec: true}},
		call(high|unix.AF_INET, high|unix.SOCK_STREAM, high|unix.IPPROTO_TCP):              {TCPSocket: trap.TCPSocket{Family: unix.AF_INET}},
		call(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 6|1<<40): {TCPSocket: trap.TCPSocket{Family: unix.AF_INET, CloseOnExec: true, Nonblock: true}},
	}
	for d, want := range yes {
		if got, ok := parse(&d); !ok || got != want {
			t.Errorf("%+v: %+v %v, want %+v", d, got, ok, want)
		}
	}
	other := call(unix.AF_INET, unix.SOCK_STREAM, 0)
	otherNr, otherArch, x32 := other, other, other
	otherNr.Nr, otherArch.Arch, x32.Nr = unix.SYS_IOCTL, unix.AUDIT_ARCH_I386, unix.SYS_SOCKET|0x40000000
	for _, d := range []trap.Data{
		otherNr, otherArch, x32,
		call(unix.AF_UNIX, unix.SOCK_STREAM, 0),
		call(unix.AF_INET, unix.SOCK_DGRAM, 0),
		call(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_TCP),
		call(unix.AF_INET, unix.SOCK_STREAM|0x10, 0),
		call(unix.AF_INET, unix.SOCK_STREAM|1<<31, 0),
		call(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP),
		call(unix.AF_INET, unix.SOCK_STREAM, 1<<32-1),
	} {
		if got, ok := parse(&d); ok {
			t.Errorf("%+v: %+v, want it to continue", d, got)
		}
	}
}

// testPools are those of an endpoint.
func testPools(id model.EndpointID) *pools { return newPools(&trap.Endpoint{ID: id}) }

func TestSocketPool(t *testing.T) {
	m := &testMaker{}
	r := &prefiller{log: slog.Default(), maker: m, target: 4, max: 6, pools: map[*socketPool]bool{}, queue: make(chan *socketPool, 1), wakeFD: -1}
	e := testPools(testEndpoint)
	ctx := context.Background()
	own := task.Self()
	if _, ready, prefill, err := take(t, r, &e.v4, socketOptions{own: own, nonblock: true}); ready || prefill != needNow || err != nil {
		t.Fatalf("empty pool: ready %v, prefill %v, %v", ready, prefill, err)
	}
	if made, err := r.prefill(ctx, &e.v4); err != nil || made != 4 || len(e.v4.ready) != 4 {
		t.Fatalf("filled to %d with %d, %v", len(e.v4.ready), made, err)
	}
	for i, wantPrefill := range []need{needNot, needSoon, needNow, needSoon} {
		s, ready, prefill, err := take(t, r, &e.v4, socketOptions{own: own, nonblock: true})
		if !ready || prefill != wantPrefill || err != nil || !s.has.nonblock {
			t.Errorf("take %d: ready %v, prefill %v, %v, %+v", i, ready, prefill, err, s.has)
		}
	}
	for _, st := range []*socketPool{&e.v4, &e.v6} {
		if _, err := r.prefill(ctx, st); err != nil {
			t.Fatal(err)
		}
	}
	if len(e.v4.ready) != 4 || len(e.v6.ready) != 2 || r.total.Load() != 6 {
		t.Errorf("%d and %d ready, total %d: want 4 and 2, the limit is 6", len(e.v4.ready), len(e.v6.ready), r.total.Load())
	}
	bad := errors.New("no")
	m.err.Store(&bad)
	r.max = 100
	if _, err := r.prefill(ctx, &e.v6); !errors.Is(err, bad) || r.total.Load() != 6 {
		t.Errorf("fill with a maker that fails: %v, total %d", err, r.total.Load())
	}
	r.drop(e)
	if r.total.Load() != 0 {
		t.Errorf("total %d after drop", r.total.Load())
	}
	m.err.Store(nil)
	if _, err := r.prefill(ctx, &e.v4); err != nil || r.total.Load() != 0 {
		t.Errorf("fill after drop: %v, total %d", err, r.total.Load())
	}
	r.request(&e.v4, needSoon, nothing)
	r.request(&e.v4, needSoon, nothing)
	r.request(&e.v6, needSoon, nothing)
	if len(r.queue) != 1 || e.v6.queued.Load() {
		t.Errorf("queue holds %d; a pool that did not fit counts as queued: %v", len(r.queue), e.v6.queued.Load())
	}
}

// A prefiller that sleeps fills a pool that wants it, and sleeps again.
func TestPrefiller(t *testing.T) {
	wakeFD, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	r := &prefiller{log: slog.Default(), maker: &testMaker{}, target: 4, max: 100, pools: map[*socketPool]bool{}, queue: make(chan *socketPool, 1), wakeFD: wakeFD,
		failed: func(_ model.EndpointID, err error) { t.Error(err) }}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); r.run(ctx) }()
	e := testPools(testEndpoint)
	for range 3 {
		eventually(t, "it sleeps", func() bool { return phase(r.doing.Load()) == sleeping })
		r.request(&e.v4, needSoon, nothing)
		eventually(t, "the pool is full", func() bool { missing, _ := e.v4.shortfall(r.target); return missing == 0 })
		for range 6 {
			if s, _, _, err := r.take(&e.v4, socketOptions{own: task.Self()}); err != nil {
				t.Fatal(err)
			} else {
				closeFD(s.fd)
			}
		}
	}
	stop()
	r.wake()
	<-ended
	r.drop(e)
	closeFD(wakeFD)
	if r.total.Load() != 0 {
		t.Errorf("total %d", r.total.Load())
	}
}

// Who asks wakes the prefiller once, and only if it would not look in time by itself.
func TestPrefillerIsWoken(t *testing.T) {
	wakeFD, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer closeFD(wakeFD)
	for _, c := range []struct {
		doing phase
		wants need
		wakes uint64
	}{
		{working, needSoon, 0}, {working, needNow, 0},
		{resting, needNot, 0}, {resting, needSoon, 0}, {resting, needNow, 1},
		{sleeping, needNot, 0}, {sleeping, needSoon, 1}, {sleeping, needNow, 1},
	} {
		r := &prefiller{target: 4, queue: make(chan *socketPool, 1), wakeFD: wakeFD}
		r.doing.Store(int32(c.doing))
		e := testPools(testEndpoint)
		r.request(&e.v4, c.wants, nothing)
		r.request(&e.v4, c.wants, nothing)
		var count [8]byte
		_, err := unix.Read(wakeFD, count[:])
		if err != nil && err != unix.EAGAIN {
			t.Fatal(err)
		}
		if n := binary.NativeEndian.Uint64(count[:]); n != c.wakes {
			t.Errorf("phase %d, need %d: woken %d times, want %d", c.doing, c.wants, n, c.wakes)
		}
	}
}

// take takes a socket and closes it when the test ends.
func take(t *testing.T, r *prefiller, st *socketPool, want socketOptions) (s socket, ready bool, prefill need, err error) {
	t.Helper()
	s, ready, prefill, err = r.take(st, want)
	if err == nil {
		t.Cleanup(func() { closeFD(s.fd) })
	}
	return s, ready, prefill, err
}

func TestApply(t *testing.T) {
	m := &testMaker{}
	s, err := makeSocket(m, testEndpoint, unix.AF_INET)
	if err != nil {
		t.Fatal(err)
	}
	defer closeFD(s.fd)
	own := s.has.own
	for _, nonblock := range []bool{true, true, false} {
		if err := s.apply(m, testEndpoint, socketOptions{own: own, nonblock: nonblock, mptcp: nonblock}); err != nil {
			t.Fatal(err)
		}
		mptcp, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE)
		if err != nil || mptcp != 0 != nonblock {
			t.Errorf("mptcp %v: maker set %d, %v", nonblock, mptcp, err)
		}
		flags, err := unix.FcntlInt(uintptr(s.fd), unix.F_GETFL, 0)
		if err != nil || flags&unix.O_NONBLOCK != 0 != nonblock {
			t.Errorf("non-blocking %v: flags %#x, %v", nonblock, flags, err)
		}
	}
}

// TestReasons: what of the interception can fail, as the agent reports it. The names are public.
func TestReasons(t *testing.T) {
	s, _ := serve(t, testConfig(socketPath(t), "", &testMaker{}))
	want := []string{
		"agent_nofile", "answer", "caller_gone", "caller_netns", "caller_nofile", "caller_owner", "foreign_netns", "handoff", "ioctl",
		"lingering_close", "make_socket", "no_agent", "no_agent_asked", "no_endpoint", "park", "receive", "refuse_unknown_endpoint", "resume", "socket_quota",
		"stack_refused", "too_many_listeners",
	}
	if got := slices.Sorted(maps.Keys(s.Stats().Failed)); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestRequestKey: requests for different things have different keys.
func TestRequestKey(t *testing.T) {
	seen := map[uint64]request{}
	for i := range 8 {
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			for _, batch := range []int{0, 1, 256, maxBatch} {
				r := request{trap.TCPSocket{Family: family, MPTCP: i&1 != 0, CloseOnExec: i&2 != 0, Nonblock: i&4 != 0}, batch}
				if other, taken := seen[r.key()]; taken || r.key() == 0 {
					t.Errorf("%+v has the key of %+v", r, other)
				}
				seen[r.key()] = r
			}
		}
	}
}
