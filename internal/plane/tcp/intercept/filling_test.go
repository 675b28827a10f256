package intercept

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/internal/trap/task"
)

// testFilling gives a prefiller that nobody runs, a batch that is to get so many sockets, and the
// program's end of it.
func testFilling(t *testing.T, m *testMaker, n int) (r *prefiller, p *filling, program int, failures *[]error) {
	t.Helper()
	testutil.NeedRoot(t, "changes the caller's user") // for the tag that testMaker gives
	failures = new([]error)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeFD(pair[0]); closeFD(pair[1]) })
	r = &prefiller{
		maker: m, batches: make(chan *filling, 8), filled: new(atomic.Uint64),
		failed: func(_ model.EndpointID, err error) { *failures = append(*failures, err) },
	}
	r.doing.Store(int32(working)) // nobody need be woken
	own, err := unix.FcntlInt(uintptr(pair[0]), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return r, &filling{batch: own, pools: testPools(testEndpoint), family: unix.AF_INET, want: socketOptions{own: task.Self()}, left: n}, pair[1], failures
}

// inBatch takes what is there: how many sockets, and whether the agent said that no more come.
func inBatch(t *testing.T, program int) (sockets int, ended bool) {
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

// TestFillingTakesTurns: several batches are filled side by side, some sockets of each at a time,
// and what is more urgent comes between.
func TestFillingTakesTurns(t *testing.T) {
	r, a, ofA, failures := testFilling(t, &testMaker{}, 2*filledAtATime+1)
	_, b, ofB, _ := testFilling(t, &testMaker{}, filledAtATime)
	r.startFilling(a, true, nothing)
	r.startFilling(b, true, nothing)
	var got []int
	var ends []bool
	for r.fillSome(t.Context()) {
		na, ea := inBatch(t, ofA)
		nb, eb := inBatch(t, ofB)
		got, ends = append(got, na, nb), append(ends, ea, eb)
	}
	if want := []int{filledAtATime, 0, 0, filledAtATime, filledAtATime, 0, 1, 0}; !slices.Equal(got, want) {
		t.Errorf("sockets %v, want %v", got, want)
	}
	if want := []bool{false, false, false, true, false, false, true, false}; !slices.Equal(ends, want) {
		t.Errorf("ends %v, want %v", ends, want)
	}
	if r.filled.Load() != 3*filledAtATime+1 || len(*failures) != 0 {
		t.Errorf("counted %d, failures %v", r.filled.Load(), *failures)
	}
}

// TestFillingIsFair: endpoints with many batches have no more turns than one with a single batch.
func TestFillingIsFair(t *testing.T) {
	r, one, ofOne, _ := testFilling(t, &testMaker{}, 3*filledAtATime)
	neighbours := []*pools{testPools(testEndpoint + 1), testPools(testEndpoint + 2)}
	for i := range 6 {
		_, other, _, _ := testFilling(t, &testMaker{}, 9*filledAtATime)
		other.pools = neighbours[i%2]
		r.startFilling(other, true, nothing)
	}
	r.startFilling(one, true, nothing)
	for range 9 {
		r.fillSome(t.Context())
	}
	if n, ended := inBatch(t, ofOne); n != 3*filledAtATime || !ended {
		t.Errorf("%d sockets in three of nine turns, ended %v", n, ended)
	}
	r.endFillings()
}

// TestFillingEnds: a program hears it when no more sockets come, whatever the reason.
func TestFillingEnds(t *testing.T) {
	for name, c := range map[string]struct {
		before   func(m *testMaker, p *filling)
		sockets  int
		failures int
	}{
		"no room for another socket": {func(m *testMaker, _ *filling) { m.quota = new(atomic.Int64); m.quota.Store(3) }, 3, 0},
		"endpoint has gone":          {func(_ *testMaker, p *filling) { p.pools.endpoint.Remove() }, 0, 0},
		"sockets cannot be made": {func(m *testMaker, _ *filling) {
			err := errors.New("injected")
			m.err.Store(&err)
		}, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			m := &testMaker{}
			r, p, program, failures := testFilling(t, m, 2*filledAtATime)
			c.before(m, p)
			r.startFilling(p, true, nothing)
			if !r.fillSome(t.Context()) || r.fillSome(t.Context()) {
				t.Error("want one turn for a batch that gets no more")
			}
			if n, ended := inBatch(t, program); n != c.sockets || !ended || len(*failures) != c.failures {
				t.Errorf("%d sockets, ended %v, failures %v; want %d, true, and %d", n, ended, *failures, c.sockets, c.failures)
			}
		})
	}
	t.Run("closed by the program", func(t *testing.T) {
		r, p, program, failures := testFilling(t, &testMaker{}, 2*filledAtATime)
		if err := unix.Shutdown(program, unix.SHUT_RDWR); err != nil {
			t.Fatal(err)
		}
		r.startFilling(p, true, nothing)
		if !r.fillSome(t.Context()) || r.fillSome(t.Context()) || len(*failures) != 0 {
			t.Errorf("want one turn and no failure: %v", *failures)
		}
	})
	t.Run("agent ends", func(t *testing.T) {
		r, begun, _, _ := testFilling(t, &testMaker{}, 2*filledAtATime)
		_, waits, _, _ := testFilling(t, &testMaker{}, 2*filledAtATime)
		r.startFilling(begun, true, nothing)
		r.fillSome(t.Context())
		r.startFilling(waits, true, nothing)
		r.endFillings()
		for name, p := range map[string]*filling{"begun": begun, "waiting": waits} {
			if _, err := unix.FcntlInt(uintptr(p.batch), unix.F_GETFD, 0); !errors.Is(err, unix.EBADF) {
				t.Errorf("the %s one's descriptor is still open: %v", name, err)
			}
			if !p.done.Load() {
				t.Errorf("the %s one is not done", name)
			}
		}
	})
}

// TestFillingClosedAtOnce: a program may close its batch as soon as it has it, before the prefiller
// has begun. The listener then closes its descriptor, whose number may be another container's batch
// next: so what is filled goes by one that nobody else closes.
func TestFillingClosedAtOnce(t *testing.T) {
	prefiller, p, _, failures := testFilling(t, &testMaker{}, filledAtATime)
	closeFD(p.batch)
	listening, err := unixSocket(unix.SOCK_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer closeFD(listening)
	name, err := unix.Getsockname(listening)
	if err := errors.Join(err, unix.Listen(listening, 4)); err != nil {
		t.Fatal(err)
	}
	h, out := &Handler{}, &outstanding{}
	m := &h.maker
	m.requests, m.spare = make(chan func(int, unix.Sockaddr)), make(chan batch, 1)
	m.ready.Store(true)
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan struct{})
	go func() { defer close(served); m.serve(ctx, listening, name) }()
	defer func() { stop(); <-served }()

	c, ok := h.emptyBatch(ctx, p)
	if !ok || p.batch == c.own {
		t.Fatalf("%v, filling has descriptor %d and the listener %d", ok, p.batch, c.own)
	}
	out.add(c)
	closeFD(c.fd)
	if !out.room(ctx, m) || len(out.batches) != 1 {
		t.Errorf("%d batches count while one is to be filled still", len(out.batches))
	}
	prefiller.startFilling(p, true, nothing)
	if !prefiller.fillSome(ctx) || prefiller.fillSome(ctx) || prefiller.filled.Load() != 0 || len(*failures) != 0 {
		t.Errorf("%d sockets filled, failures %v; want none for a batch that was closed", prefiller.filled.Load(), *failures)
	}
	if !out.room(ctx, m) || len(out.batches) != 0 {
		t.Errorf("%d batches count after all were closed and filled", len(out.batches))
	}
}
