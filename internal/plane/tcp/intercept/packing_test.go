package intercept

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// testPacking gives a refiller that nobody runs, a crate that is to get so many sockets, and the program's end of it.
func testPacking(t *testing.T, m *testMaker, n int) (r *refiller, p *packing, program int, failures *[]error) {
	t.Helper()
	needRoot(t) // for the tag that testMaker gives
	failures = new([]error)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeFD(pair[0]); closeFD(pair[1]) })
	r = &refiller{
		maker: m, crates: make(chan *packing, 8), packed: new(atomic.Uint64),
		failed: func(_ model.EndpointID, err error) { *failures = append(*failures, err) },
	}
	r.doing.Store(int32(filling)) // nobody need be woken
	own, err := unix.FcntlInt(uintptr(pair[0]), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return r, &packing{crate: own, endpoint: newEndpoint(testEndpoint), family: unix.AF_INET, want: traits{own: self()}, left: n}, pair[1], failures
}

// inCrate takes what is there: how many sockets, and whether the agent said that no more come.
func inCrate(t *testing.T, program int) (sockets int, ended bool) {
	t.Helper()
	for {
		data, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(4))
		_, n, _, _, err := unix.Recvmsg(program, data, oob, unix.MSG_DONTWAIT)
		if err == unix.EAGAIN {
			return sockets, ended
		}
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			return sockets, true
		}
		fds, err := descriptors(oob[:n])
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			closeFD(fd)
		}
		sockets += len(fds)
	}
}

// TestPackingTakesTurns: several crates are packed side by side, some sockets of each at a time, and what is more urgent comes between.
func TestPackingTakesTurns(t *testing.T) {
	r, a, ofA, failures := testPacking(t, &testMaker{}, 2*packedAtATime+1)
	_, b, ofB, _ := testPacking(t, &testMaker{}, packedAtATime)
	r.pack(a, true, nothing)
	r.pack(b, true, nothing)
	var got []int
	var ends []bool
	for r.packSome(t.Context()) {
		na, ea := inCrate(t, ofA)
		nb, eb := inCrate(t, ofB)
		got, ends = append(got, na, nb), append(ends, ea, eb)
	}
	if want := []int{packedAtATime, 0, 0, packedAtATime, packedAtATime, 0, 1, 0}; !slices.Equal(got, want) {
		t.Errorf("sockets %v, want %v", got, want)
	}
	if want := []bool{false, false, false, true, false, false, true, false}; !slices.Equal(ends, want) {
		t.Errorf("ends %v, want %v", ends, want)
	}
	if r.packed.Load() != 3*packedAtATime+1 || len(*failures) != 0 {
		t.Errorf("counted %d, failures %v", r.packed.Load(), *failures)
	}
}

// TestPackingIsFair: endpoints with many crates have no more turns than one with a single crate.
func TestPackingIsFair(t *testing.T) {
	r, one, ofOne, _ := testPacking(t, &testMaker{}, 3*packedAtATime)
	neighbours := []*endpoint{newEndpoint(testEndpoint + 1), newEndpoint(testEndpoint + 2)}
	for i := range 6 {
		_, other, _, _ := testPacking(t, &testMaker{}, 9*packedAtATime)
		other.endpoint = neighbours[i%2]
		r.pack(other, true, nothing)
	}
	r.pack(one, true, nothing)
	for range 9 {
		r.packSome(t.Context())
	}
	if n, ended := inCrate(t, ofOne); n != 3*packedAtATime || !ended {
		t.Errorf("%d sockets in three of nine turns, ended %v", n, ended)
	}
	r.endPackings()
}

// TestPackingEnds: a program hears it when no more sockets come, whatever the reason.
func TestPackingEnds(t *testing.T) {
	for name, c := range map[string]struct {
		before   func(m *testMaker, p *packing)
		sockets  int
		failures int
	}{
		"no room for another socket": {func(m *testMaker, _ *packing) { m.quota = new(atomic.Int64); m.quota.Store(3) }, 3, 0},
		"endpoint has gone":          {func(_ *testMaker, p *packing) { p.endpoint.removed.Store(true) }, 0, 0},
		"sockets cannot be made": {func(m *testMaker, _ *packing) {
			err := errors.New("injected")
			m.err.Store(&err)
		}, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			m := &testMaker{}
			r, p, program, failures := testPacking(t, m, 2*packedAtATime)
			c.before(m, p)
			r.pack(p, true, nothing)
			if !r.packSome(t.Context()) || r.packSome(t.Context()) {
				t.Error("want one turn for a crate that gets no more")
			}
			if n, ended := inCrate(t, program); n != c.sockets || !ended || len(*failures) != c.failures {
				t.Errorf("%d sockets, ended %v, failures %v; want %d, true, and %d", n, ended, *failures, c.sockets, c.failures)
			}
		})
	}
	t.Run("closed by the program", func(t *testing.T) {
		r, p, program, failures := testPacking(t, &testMaker{}, 2*packedAtATime)
		if err := unix.Shutdown(program, unix.SHUT_RDWR); err != nil {
			t.Fatal(err)
		}
		r.pack(p, true, nothing)
		if !r.packSome(t.Context()) || r.packSome(t.Context()) || len(*failures) != 0 {
			t.Errorf("want one turn and no failure: %v", *failures)
		}
	})
	t.Run("agent ends", func(t *testing.T) {
		r, begun, _, _ := testPacking(t, &testMaker{}, 2*packedAtATime)
		_, waits, _, _ := testPacking(t, &testMaker{}, 2*packedAtATime)
		r.pack(begun, true, nothing)
		r.packSome(t.Context())
		r.pack(waits, true, nothing)
		r.endPackings()
		for name, p := range map[string]*packing{"begun": begun, "waiting": waits} {
			if _, err := unix.FcntlInt(uintptr(p.crate), unix.F_GETFD, 0); !errors.Is(err, unix.EBADF) {
				t.Errorf("the %s one's descriptor is still open: %v", name, err)
			}
			if !p.done.Load() {
				t.Errorf("the %s one is not done", name)
			}
		}
	})
}

// TestPackingClosedAtOnce: a program may close its crate as soon as it has it, before the refiller has begun. The listener then closes
// its descriptor, whose number may be another container's crate next: so what is packed goes by one that nobody else closes.
func TestPackingClosedAtOnce(t *testing.T) {
	refiller, p, _, failures := testPacking(t, &testMaker{}, packedAtATime)
	closeFD(p.crate)
	listening, err := unixSocket(unix.SOCK_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer closeFD(listening)
	name, err := unix.Getsockname(listening)
	if err := errors.Join(err, unix.Listen(listening, 4)); err != nil {
		t.Fatal(err)
	}
	r := &reader{listener: newListener(&Server{}, -1, specs.ContainerProcessState{})}
	m := &r.srv.crates
	m.requests, m.spare = make(chan func(int, unix.Sockaddr)), make(chan crate, 1)
	m.ready.Store(true)
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan struct{})
	go func() { defer close(served); m.serve(ctx, listening, name) }()
	defer func() { stop(); <-served }()

	r.srv.ctx = ctx
	c, ok := r.emptyCrate(p)
	if !ok || p.crate == c.own {
		t.Fatalf("%v, packing has descriptor %d and the listener %d", ok, p.crate, c.own)
	}
	r.crates.add(c)
	closeFD(c.fd)
	if !r.crates.room(ctx, m) || len(r.crates.crates) != 1 {
		t.Errorf("%d crates count while one is to be packed still", len(r.crates.crates))
	}
	refiller.pack(p, true, nothing)
	if !refiller.packSome(ctx) || refiller.packSome(ctx) || refiller.packed.Load() != 0 || len(*failures) != 0 {
		t.Errorf("%d sockets packed, failures %v; want none for a crate that was closed", refiller.packed.Load(), *failures)
	}
	if !r.crates.room(ctx, m) || len(r.crates.crates) != 0 {
		t.Errorf("%d crates count after all were closed and packed", len(r.crates.crates))
	}
}
