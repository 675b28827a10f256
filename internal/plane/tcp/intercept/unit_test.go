package intercept

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// The structures are the kernel's: their sizes are part of the ioctl numbers.
func TestKernelStructs(t *testing.T) {
	for _, s := range []struct {
		name    string
		size    uintptr
		request uint
	}{
		{"notification", unsafe.Sizeof(notification{}), unix.SECCOMP_IOCTL_NOTIF_RECV},
		{"response", unsafe.Sizeof(response{}), unix.SECCOMP_IOCTL_NOTIF_SEND},
		{"addFD", unsafe.Sizeof(addFD{}), unix.SECCOMP_IOCTL_NOTIF_ADDFD},
	} {
		if want := uintptr(s.request >> 16 & 0x3fff); s.size != want {
			t.Errorf("%s: %d bytes, the kernel's has %d", s.name, s.size, want)
		}
	}
}

func TestClassify(t *testing.T) {
	call := func(family, typ, proto uint64) callData {
		return callData{Nr: unix.SYS_SOCKET, Arch: auditArch, Args: [6]uint64{family, typ, proto}}
	}
	const high = 0xdeadbeef << 32
	yes := map[callData]request{
		call(unix.AF_INET, unix.SOCK_STREAM, 0):                                            {family: unix.AF_INET},
		call(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, unix.IPPROTO_TCP):         {family: unix.AF_INET6, nonblock: true},
		call(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_MPTCP):         {family: unix.AF_INET, mptcp: true, closeOnExec: true},
		call(high|unix.AF_INET, high|unix.SOCK_STREAM, high|unix.IPPROTO_TCP):              {family: unix.AF_INET},
		call(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 6|1<<40): {family: unix.AF_INET, closeOnExec: true, nonblock: true},
	}
	for d, want := range yes {
		if got, ok := classify(&d); !ok || got != want {
			t.Errorf("%+v: %+v %v, want %+v", d, got, ok, want)
		}
	}
	other := call(unix.AF_INET, unix.SOCK_STREAM, 0)
	otherNr, otherArch, x32 := other, other, other
	otherNr.Nr, otherArch.Arch, x32.Nr = unix.SYS_IOCTL, unix.AUDIT_ARCH_I386, unix.SYS_SOCKET|0x40000000
	for _, d := range []callData{
		otherNr, otherArch, x32,
		call(unix.AF_UNIX, unix.SOCK_STREAM, 0),
		call(unix.AF_INET, unix.SOCK_DGRAM, 0),
		call(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_TCP),
		call(unix.AF_INET, unix.SOCK_STREAM|0x10, 0),
		call(unix.AF_INET, unix.SOCK_STREAM|1<<31, 0),
		call(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP),
		call(unix.AF_INET, unix.SOCK_STREAM, 1<<32-1),
	} {
		if got, ok := classify(&d); ok {
			t.Errorf("%+v: %+v, want it to continue", d, got)
		}
	}
}

func TestErrnoTable(t *testing.T) {
	for _, c := range []struct {
		f    failure
		err  error
		want unix.Errno
	}{
		{failUnknown, errUnknownEndpoint, unix.ENETDOWN},
		{failOwner, unix.ENOENT, unix.ENETDOWN},
		{injectFailure(unix.EMFILE), unix.EMFILE, unix.EMFILE},
		{injectFailure(unix.ENOMEM), unix.ENOMEM, unix.ENOMEM},
		{injectFailure(unix.EACCES), unix.EACCES, unix.EACCES},
		{injectFailure(unix.EINVAL), unix.EINVAL, unix.ENETDOWN},
		{makeFailure(unix.EMFILE), unix.EMFILE, unix.ENFILE},
		{makeFailure(unix.ENFILE), unix.ENFILE, unix.ENFILE},
		{makeFailure(unix.ENOBUFS), fmt.Errorf("x: %w", unix.ENOBUFS), unix.ENOBUFS},
		{makeFailure(unix.EINTR), unix.EINTR, unix.ENETDOWN},
	} {
		if got := errnoOf(c.f, c.err); got != c.want {
			t.Errorf("%v of %v: %v, want %v", c.f, c.err, got, c.want)
		}
	}
	for _, e := range []unix.Errno{unix.ENOENT, unix.ESRCH, unix.EINPROGRESS} {
		if injectFailure(e) != failCallerGone {
			t.Errorf("%v: not taken for a caller that has gone", e)
		}
	}
	seen := map[string]bool{}
	for f := range numFailures {
		if f.String() == "" || seen[f.String()] {
			t.Errorf("failure %d: name %q is empty or taken", f, f)
		}
		seen[f.String()] = true
	}
}

func TestSocketPool(t *testing.T) {
	m := &testMaker{}
	r := &prefiller{log: slog.Default(), maker: m, target: 4, max: 6, queue: make(chan *socketPool, 1), wakeFD: -1}
	e := newEndpoint(testEndpoint)
	ctx := context.Background()
	own := self()
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
	r := &prefiller{log: slog.Default(), maker: &testMaker{}, target: 4, max: 100, queue: make(chan *socketPool, 1), wakeFD: wakeFD,
		failed: func(_ model.EndpointID, err error) { t.Error(err) }}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); r.run(ctx) }()
	e := newEndpoint(testEndpoint)
	for range 3 {
		eventually(t, "it sleeps", func() bool { return phase(r.doing.Load()) == sleeping })
		r.request(&e.v4, needSoon, nothing)
		eventually(t, "the pool is full", func() bool { missing, _ := e.v4.shortfall(r.target); return missing == 0 })
		for range 6 {
			if s, _, _, err := r.take(&e.v4, socketOptions{own: self()}); err != nil {
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
		e := newEndpoint(testEndpoint)
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

// The trapped ioctls are told by the lower halves of the registers, of the native and of the 32-bit interface.
func TestClassifyIoctl(t *testing.T) {
	const high = 0xdeadbeef << 32
	native := func(fd, cmd, arg uint64) callData {
		return callData{Nr: unix.SYS_IOCTL, Arch: auditArch, Args: [6]uint64{fd, cmd, arg}}
	}
	for d, want := range map[callData]ioctlCall{
		native(3, unix.SIOCGIFCONF, 7<<40): {fd: 3, cmd: unix.SIOCGIFCONF, arg: 7 << 40},
		native(high|3, high|0x89ff, 1):     {fd: 3, cmd: 0x89ff, arg: 1},
		native(1<<32-1, 0x8b00, 0):         {fd: -1, cmd: 0x8b00},
		native(3, 0x8bff, high|1):          {fd: 3, cmd: 0x8bff, arg: high | 1},
	} {
		if got, ok := classifyIoctl(&d); !ok || got != want {
			t.Errorf("%+v: %+v %v, want %+v", d, got, ok, want)
		}
	}
	for _, cmd := range []uint64{0, 0x5401, 0x88ff, 0x8a00, 0x8aff, 0x8c00, 0x18900, 0x80108906, high} {
		d := native(3, cmd, 0)
		if got, ok := classifyIoctl(&d); ok {
			t.Errorf("%#x: %+v", cmd, got)
		}
	}
	socket := callData{Nr: unix.SYS_SOCKET, Arch: auditArch, Args: [6]uint64{3, 0x8912}}
	if got, ok := classifyIoctl(&socket); ok {
		t.Errorf("socket(): %+v", got)
	}
}

// No request that is made as it stands may have a pointer in its structure. These are all of linux/sockios.h that do.
func TestIoctlArguments(t *testing.T) {
	for cmd, want := range map[uint32]argument{
		0x890b: argRoute, 0x890c: argRoute, 0x8912: argConf, 0x8940: argBridge, 0x8941: argBridge, 0x8946: argData,
		0x894a: argNoData, 0x8993: argData, 0x8994: argData, 0x89b0: argData, 0x89b1: argData, 0x89f0: argNoData, 0x89ff: argNoData,
		0x8b00: argWireless, 0x8bff: argWireless, 0x894c: argNetns, 0x89e0: argPrivate, 0x89ef: argPrivate, 0x8905: argState,
		0x8901: argSetOwner, 0x8904: argGetOwner, 0x8913: argFlat, 0x8955: argFlat, 0x89a3: argFlat,
		0x8900: argUnknown, 0x890a: argUnknown, 0x893f: argUnknown, 0x8950: argUnknown, 0x8999: argUnknown, 0x89c0: argUnknown,
	} {
		if got := argumentOf(cmd); got != want {
			t.Errorf("%#x: %d, want %d", cmd, got, want)
		}
	}
}

// What the kernel gets ends where the caller's memory did.
func TestScratchEnds(t *testing.T) {
	for _, n := range []int{0, 1, 20, 4096, 4097, dataBytes} {
		content := make([]byte, n)
		for i := range content {
			content[i] = byte(i)
		}
		s, err := newScratch(content)
		if err != nil {
			t.Fatal(err)
		}
		var pipe [2]int
		if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(uintptr(pipe[1]), unix.F_SETPIPE_SZ, 2*dataBytes); err != nil {
			t.Fatal(err)
		}
		// The kernel can read it, and not a byte more.
		got, _, errno := unix.Syscall(unix.SYS_WRITE, uintptr(pipe[1]), s.addr(), uintptr(n))
		if errno != 0 || int(got) != n || string(s.bytes()) != string(content) {
			t.Errorf("%d bytes: the kernel read %d (%v)", n, int(got), errno)
		}
		if _, _, errno := unix.Syscall(unix.SYS_WRITE, uintptr(pipe[1]), s.addr()+uintptr(n), 1); errno != unix.EFAULT {
			t.Errorf("%d bytes: one more: %v", n, errno)
		}
		s.free()
		closeFD(pipe[0])
		closeFD(pipe[1])
	}
}

func TestTaskIDs(t *testing.T) {
	var ids taskIDs
	ids.thread.outer, ids.thread.inner = 1001, 6
	ids.process.outer, ids.process.inner = 1000, 5
	ids.group.outer, ids.group.inner = 900, 1
	for inner, outer := range map[int32]int{0: 0, 5: 1000, 6: 1001, -1: -900} {
		if got, errno := ids.outer(inner); got != outer || errno != 0 {
			t.Errorf("outer(%d) = %d, %v", inner, got, errno)
		}
		if got := ids.inner(outer); got != inner {
			t.Errorf("inner(%d) = %d", outer, got)
		}
	}
	for _, other := range []int32{1, -5, 1000, 99} {
		if _, errno := ids.outer(other); errno != unix.ESRCH {
			t.Errorf("outer(%d): %v", other, errno)
		}
	}
	if got := ids.inner(1); got != 0 {
		t.Errorf("the agent's own init shows as %d", got)
	}
}
