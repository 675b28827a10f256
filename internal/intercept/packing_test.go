package intercept

import (
	"errors"
	"slices"
	"sync/atomic"
	"testing"

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
		maker: m, crates: make(chan *packing, 2), packed: new(atomic.Uint64),
		failed: func(_ model.EndpointID, err error) { *failures = append(*failures, err) },
	}
	r.doing.Store(int32(filling)) // nobody need be woken
	return r, &packing{crate: pair[0], endpoint: newEndpoint(testEndpoint), family: unix.AF_INET, want: traits{own: self()}, left: n}, pair[1], failures
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
		}
	})
}
