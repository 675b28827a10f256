package stacks

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/planetest"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/internal/trap"
)

func TestDeclares(t *testing.T) { planetest.CheckDeclaration(t, "stacks", Declaration) }

func TestNoteFits(t *testing.T) {
	if n := binary.Size(note{}); n > plane.NoteBytes {
		t.Fatalf("a note has %d bytes, more than %d", n, plane.NoteBytes)
	}
	n := note{ID: 1, Tenant: 3, Generation: 4, State: connected, Family: unix.AF_INET6, Flags: told, Error: 5, Listener: 6, Congestion: 7,
		Local: protocol.AddressOf(netip.MustParseAddrPort("10.0.0.1:80")), Set: 1 << 23, Options: [optionCount]int32{23: -9}}
	if got := parseNote(n.bytes()); got != n {
		t.Errorf("%+v, want %+v", got, n)
	}
}

// TestSockaddr: addresses are read and shown as the kernel's TCP does.
func TestSockaddr(t *testing.T) {
	at := netip.MustParseAddrPort("10.0.0.1:80")
	for _, family := range []uint32{unix.AF_INET, unix.AF_INET6} {
		n := note{Family: family}
		shown := n.sockaddr(protocol.AddressOf(at))
		if got, errno := n.parseSockaddr(shown); errno != 0 || got != at {
			t.Errorf("family %d: %x is %v, %v", family, shown, got, errno)
		}
		if _, errno := n.parseSockaddr(shown[:len(shown)-5]); errno != unix.EINVAL {
			t.Errorf("family %d, too short: %v", family, errno)
		}
		if _, errno := n.parseSockaddr(make([]byte, 2)); errno != unix.EINVAL && errno != unix.EAFNOSUPPORT {
			t.Errorf("family %d, no address: %v", family, errno)
		}
	}
	n := note{Family: unix.AF_INET}
	if _, errno := n.parseSockaddr((&note{Family: unix.AF_INET6}).sockaddr(protocol.AddressOf(at))); errno != unix.EAFNOSUPPORT {
		t.Errorf("IPv6 for a socket of IPv4: %v", errno)
	}
}

func FuzzSockaddr(f *testing.F) {
	n := note{Family: unix.AF_INET6}
	f.Add(uint32(unix.AF_INET6), n.sockaddr(protocol.AddressOf(netip.MustParseAddrPort("[2001:db8::1]:80"))))
	f.Fuzz(func(t *testing.T, family uint32, b []byte) {
		n := note{Family: family}
		if a, errno := n.parseSockaddr(b); errno == 0 && !a.IsValid() {
			t.Errorf("%x is %v", b, a)
		}
	})
}

func FuzzOption(f *testing.F) {
	f.Add(unix.SOL_SOCKET, unix.SO_LINGER, []byte{1, 0, 0, 0, 2, 0, 0, 0})
	f.Add(unix.SOL_IP, unix.IP_TOS, []byte{4})
	f.Fuzz(func(t *testing.T, level, name int, b []byte) {
		v, err := number(level, name, b)
		if err != nil {
			return
		}
		if place, known := optionAt(level, name); known {
			var n note
			if _, errno := n.set(place, v); errno == 0 && n.value(place) != v {
				t.Errorf("set to %d, is %d", v, n.value(place))
			}
		}
	})
}

// joined gives a program's end and the other one.
func joined(t *testing.T) (program, other int) {
	t.Helper()
	p, err := makePair()
	testutil.NoError(t, err)
	e := ends{-1, -1}
	defer e.close()
	other, err = e.join(t.TempDir(), p.program)
	testutil.NoError(t, err)
	return p.program, other
}

// TestPair: the program's end is not writable once it is filled, and whoever has the other end makes
// it so; if that is closed then, the program has ECONNRESET.
func TestPair(t *testing.T) {
	for _, asked := range []int32{0, 4096, 1 << 30} { // by SO_SNDBUF; 0: nothing
		t.Run(fmt.Sprint(asked), func(t *testing.T) { testPair(t, asked) })
	}
}

func testPair(t *testing.T, asked int32) {
	program, other := joined(t)
	if asked > 0 {
		testutil.NoError(t, setSendBufferTo(program, asked))
	}
	fill, err := fillBytes(program)
	if err != nil || fill < sendBuffer/4 || fill > len(zeroes) {
		t.Fatalf("%d bytes fill it, %v", fill, err)
	}
	if n, err := unix.SendmsgN(program, zeroes[:fill], nil, nil, unix.MSG_DONTWAIT); n != fill || err != nil {
		t.Fatalf("filled with %d bytes of %d, %v", n, fill, err)
	}
	if shows(program) {
		t.Error("it is writable")
	}
	left := make([]byte, fill-1)
	for len(left) > 0 {
		n, err := unix.Read(other, left)
		testutil.NoError(t, err)
		left = left[n:]
	}
	if !shows(program) {
		t.Error("it is not writable")
	}
	closeFD(other)
	if _, err := unix.Read(program, make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("read after the end: %v", err)
	}
}

// TestOtherEndIsNobodysElse: a program finds no descriptor in its socket, neither before nor after
// that is connected. One that it has connected itself, to somebody of its own, is not taken.
func TestOtherEndIsNobodysElse(t *testing.T) {
	looks := func(fd int, want unix.Errno) {
		t.Helper()
		_, m, _, _, err := unix.Recvmsg(fd, make([]byte, 8), make([]byte, 64), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		if !errors.Is(err, want) || m > 0 {
			t.Errorf("looks into its socket: %v, %d bytes of descriptors, want %v", err, m, want)
		}
	}
	p, err := makePair()
	testutil.NoError(t, err)
	defer closeFD(p.program)
	looks(p.program, unix.EINVAL) // not connected
	program, other := joined(t)
	looks(program, unix.EAGAIN)
	closeFD(other)

	own, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testutil.NoError(t, err)
	defer closeFD(own)
	at := &unix.SockaddrUnix{Name: filepath.Join(t.TempDir(), "own")}
	testutil.NoError(t, errors.Join(unix.Bind(own, at), unix.Listen(own, 1), unix.Connect(p.program, at)))
	e := ends{-1, -1}
	defer e.close()
	if _, err := e.join(t.TempDir(), p.program); !errors.Is(err, errQueue) {
		t.Errorf("a socket that its program has connected: %v", err)
	}
	// Who comes next gets its own end.
	next, err := makePair()
	testutil.NoError(t, err)
	defer closeFD(next.program)
	other, err = e.join(t.TempDir(), next.program)
	testutil.NoError(t, err)
	defer closeFD(other)
	testutil.NoError(t, unix.Send(next.program, []byte("x"), 0))
	if n, err := unix.Read(other, make([]byte, 2)); n != 1 || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// TestBlockingEnd: who has the other end, too, and makes it block keeps no thread.
func TestBlockingEnd(t *testing.T) {
	program, other := joined(t)
	defer closeFD(other)
	testutil.NoError(t, unix.SetNonblock(other, false))
	_, err := unix.Write(program, []byte("bytes"))
	testutil.NoError(t, err)
	done := make(chan bool, 1)
	go func() { done <- ended(other, make([]byte, 4)) }()
	select {
	case is := <-done:
		if is {
			t.Error("it has ended")
		}
	case <-time.After(10 * time.Second):
		t.Error("who looks whether it has ended is kept")
	}
}

// TestPlaces: a tenant whose calls hold all of its places keeps no other tenant, and the agent's end
// ends who waits for one.
func TestPlaces(t *testing.T) {
	one, another := newTenant(model.Endpoint{ID: 1}, netcfg.EndpointDevice{}, newModules()[stack.Smoltcp]), newTenant(model.Endpoint{ID: 2}, netcfg.EndpointDevice{}, newModules()[stack.Smoltcp])
	p := &Plane{}
	p.ctx, p.stop = context.WithCancel(t.Context())
	for i := range one.sockets {
		one.sockets[i] <- struct{}{}
	}
	for range maxBlocking {
		one.blocking <- struct{}{}
	}
	one.joining <- struct{}{}
	testutil.NoError(t, (&call{p: p, t: another}).mayBlock(func() error { return nil }))
	for i := range another.sockets {
		testutil.NoError(t, (&call{p: p, t: another}).acquire(another.sockets[i]))
	}
	p.stop()
	if err := (&call{p: p, t: one}).mayBlock(func() error { return nil }); !errors.Is(err, trap.ErrAgentEnds) {
		t.Errorf("at the agent's end: %v, want %v", err, trap.ErrAgentEnds)
	}
}

// TestModuleIsToldAgain: a module is told of tenants, gets a device for those that it does not know,
// and after its end another one is told of listeners, too. When a program closes one, it hears so.
func TestModuleIsToldAgain(t *testing.T) {
	dir, err := os.MkdirTemp("", "stacks") // t's own is too long for a socket's path
	testutil.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Setenv("PATH", dir) // no module is found
	played, notes := play(t, filepath.Join(dir, programs[stack.Smoltcp].socket), false), &modules{}
	p, _ := runPlane(t, dir, notes)
	e := model.Endpoint{ID: 7, Name: "n1/c1", Addrs: []netip.Addr{netip.MustParseAddr("10.244.0.2")}, Created: time.Unix(5, 9)}
	played.hear(protocol.TypeHello)
	played.hear(protocol.TypeBegin)
	played.hear(protocol.TypeEnd)
	testutil.NoError(t, p.SetStack(e, stack.Choice{Profile: &stack.Profile{}, Stack: stack.Smoltcp}))
	testutil.NoError(t, p.Attach(e, netcfg.EndpointDevice{}))
	played.hear(protocol.TypeTenant)
	played.hear(protocol.TypeTenant)
	program, other := joined(t)
	tenant := p.tenantOf(e.ID)
	h := &held{id: 1, note: note{ID: 1, State: listening}}
	testutil.NoError(t, p.hold(tenant, h, other))

	played.listener.Close()
	next := play(t, filepath.Join(dir, programs[stack.Smoltcp].socket), false)
	if l := p.current(p.modules[stack.Smoltcp]); l == nil {
		t.Fatal("no module")
	} else {
		l.Close()
	}
	next.hear(protocol.TypeHello)
	next.hear(protocol.TypeBegin)
	next.hear(protocol.TypeTenant)
	next.hear(protocol.TypeTenant)
	if told := next.hear(protocol.TypeListen); told.ID != 1 || told.Tenant != 7 {
		t.Errorf("%+v", told)
	}
	next.hear(protocol.TypeList)
	if told := next.hear(protocol.TypeClose); told.ID != 99 {
		t.Errorf("%+v, want the listener that nobody has", told)
	}
	next.hear(protocol.TypeEnd)
	next.hear(protocol.TypeList) // of which policy forbids some
	notes.mu.Lock()
	if notes.opened != 2 {
		t.Errorf("%d devices, want one for each module", notes.opened)
	}
	notes.mu.Unlock()
	testutil.EventuallyTrue(t, "the module is there", func() bool { return p.current(p.modules[stack.Smoltcp]) != nil })
	closeFD(program)
	if told := next.hear(protocol.TypeClose); told.ID != 1 {
		t.Errorf("%+v", told)
	}
	testutil.NoError(t, p.Detach(e))
	next.hear(protocol.TypeTenantGone)
}

// TestDeviceBusy: a module hears of a tenant whose device another process had, when that has ended.
func TestDeviceBusy(t *testing.T) {
	dir, err := os.MkdirTemp("", "stacks") // t's own is too long for a socket's path
	testutil.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Setenv("PATH", dir) // no module is found
	played, notes := play(t, filepath.Join(dir, programs[stack.Smoltcp].socket), false), &modules{busy: 2}
	p, f := runPlane(t, dir, notes)
	e := model.Endpoint{ID: 7, Name: "n1/c1", Addrs: []netip.Addr{netip.MustParseAddr("10.244.0.2")}, Created: time.Unix(5, 9)}
	played.hear(protocol.TypeHello)
	played.hear(protocol.TypeBegin)
	played.hear(protocol.TypeEnd)
	testutil.NoError(t, p.SetStack(e, stack.Choice{Profile: &stack.Profile{}, Stack: stack.Smoltcp}))
	testutil.NoError(t, p.Attach(e, netcfg.EndpointDevice{}))
	fault := FaultModule + api.FaultReason(e.Name)
	if !f.Has(fault) {
		t.Error("no fault while the device is busy")
	}
	testutil.EventuallyTrue(t, "the module has the device, and no fault is left", func() bool {
		notes.mu.Lock()
		defer notes.mu.Unlock()
		return notes.opened == 1 && !f.Has(fault)
	})
}

// TestOpened: policy is asked about who opened a connection, to which port of whom.
func TestOpened(t *testing.T) {
	own, peer := netip.MustParseAddrPort("10.244.0.2:80"), netip.MustParseAddrPort("10.244.0.3:40000")
	s := protocol.Info{Kind: protocol.KindConnection, State: 1, Local: protocol.AddressOf(own), Remote: protocol.AddressOf(peer)}
	if from, to, ok := opened(&s); !ok || from != own.Addr() || to != peer {
		t.Errorf("of the endpoint: %s to %s, %v", from, to, ok)
	}
	s.Listener = 7
	if from, to, ok := opened(&s); !ok || from != peer.Addr() || to != own {
		t.Errorf("accepted: %s to %s, %v", from, to, ok)
	}
	for _, state := range []uint32{tcpSynSent, tcpSynRecv, tcpTimeWait, tcpClose} {
		s.State = state
		if _, _, ok := opened(&s); ok {
			t.Errorf("state %d is a connection", state)
		}
	}
	s.State, s.Remote = 1, protocol.AddressOf(netip.MustParseAddrPort("127.0.0.1:5"))
	if _, _, ok := opened(&s); ok {
		t.Error("a connection of the container with itself")
	}
}

// TestAskedAgain: what a module that ends has not answered, the next one is asked.
func TestAskedAgain(t *testing.T) {
	p, m := &Plane{cfg: Config{Faults: &faults{}}}, newModules()[stack.Smoltcp]
	p.ctx, p.stop = context.WithCancel(t.Context())
	defer p.stop()
	first, second := &link{}, &link{}
	p.setLink(m, first)
	var asked []*link
	err := (&call{p: p, t: &tenant{module: m}}).ask(func(_ context.Context, l *link) error {
		asked = append(asked, l)
		if l == first {
			time.AfterFunc(2*pollOutcome, func() { p.setLink(m, nil); p.setLink(m, second) })
			return process.ErrGone
		}
		return nil
	})
	if err != nil || len(asked) != 2 || asked[1] != second {
		t.Errorf("%v, asked %v", err, asked)
	}
}

// TestRetired: an endpoint whose profile says otherwise is no tenant any more once it has nothing at
// the module, and what was counted for it stays.
func TestRetired(t *testing.T) {
	tn := newTenant(model.Endpoint{ID: 7}, netcfg.EndpointDevice{}, newModules()[stack.Smoltcp])
	tn.outgoing[1] = &outgoing{done: make(chan struct{})}
	if tn.idle() {
		t.Error("idle, with a connect under way")
	}
	close(tn.outgoing[1].done)
	if !tn.idle() {
		t.Error("not idle, with a connect that nobody asks about")
	}
	tn.held[2] = &held{}
	if tn.idle() {
		t.Error("idle, with a bound socket")
	}
	delete(tn.held, 2)
	p := &Plane{
		tenants: map[model.EndpointID]*tenant{7: tn}, retired: map[model.EndpointID]model.Traffic{}, cfg: Config{Faults: &faults{}, StackModules: &modules{}, Log: slog.New(slog.DiscardHandler)},
	}
	p.ctx, p.stop = context.WithCancel(t.Context())
	defer p.stop()
	ended := &link{Requests: process.Requests{Conn: process.Conn{UnixConn: new(net.UnixConn)}}}
	ended.Close()
	p.retire(ended, tn, &protocol.Stats{Accepted: 3, Connections: 1, TimeWait: 1, BytesSent: 5})
	if p.tenantOf(7) != nil {
		t.Error("it is a tenant still")
	}
	if got := p.countedOf(7); got.Accepted != 3 || got.Closed != 3 || got.BytesSent != 5 || len(got.Live) != 0 {
		t.Errorf("counted: %+v", got)
	}
	again := newTenant(model.Endpoint{ID: 7}, netcfg.EndpointDevice{}, newModules()[stack.Smoltcp])
	again.counted.last = p.countedOf(7)
	if got := again.count(9, &protocol.Stats{Accepted: 1, Connections: 1}); got.Accepted != 4 || got.Live[Path] != 1 {
		t.Errorf("as a tenant again: %+v", got)
	}
}

// TestMoved: an endpoint whose profile names another module has that one at once, and as soon as its
// last socket at the first one is closed; a call that comes meanwhile is the next one's.
func TestMoved(t *testing.T) {
	dir, err := os.MkdirTemp("", "stacks") // t's own is too long for a socket's path
	testutil.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Setenv("PATH", dir)
	smoltcp := play(t, filepath.Join(dir, programs[stack.Smoltcp].socket), false)
	netstack := play(t, filepath.Join(dir, programs[stack.Netstack].socket), false)
	p, f := runPlane(t, dir, &modules{})
	for _, m := range []*played{smoltcp, netstack} {
		m.hear(protocol.TypeHello)
		m.hear(protocol.TypeBegin)
		m.hear(protocol.TypeEnd)
	}
	has := func(kind stack.Kind) func() bool {
		return func() bool { return p.tenantOf(7).module.kind == kind }
	}
	e := model.Endpoint{ID: 7, Name: "n1/c1", Addrs: []netip.Addr{netip.MustParseAddr("10.244.0.2")}, Created: time.Unix(5, 9)}
	for _, kind := range Kinds {
		testutil.EventuallyTrue(t, string(kind)+" is there", func() bool { return p.current(p.modules[kind]) != nil })
	}
	testutil.NoError(t, p.SetStack(e, stack.Choice{Profile: &stack.Profile{}, Stack: stack.Netstack}))
	testutil.NoError(t, p.Attach(e, netcfg.EndpointDevice{}))
	first := p.tenantOf(e.ID)
	testutil.NoError(t, p.SetStack(e, stack.Choice{Profile: &stack.Profile{}, Stack: stack.Smoltcp}))
	if !has(stack.Smoltcp)() || f.Has(FaultModule+"n1/c1") {
		t.Fatal("an endpoint with nothing at its module stays there")
	}
	second, err := p.startCall(first)
	if testutil.NoError(t, err); second != p.tenantOf(e.ID) {
		t.Error("a call of before is not the new module's")
	}
	testutil.NoError(t, p.SetStack(e, stack.Choice{Profile: &stack.Profile{}, Stack: stack.Netstack}))
	if !has(stack.Smoltcp)() || !f.Has(FaultModule+"n1/c1") {
		t.Fatal("a module is left while it is asked for something")
	}
	second.endCall()
	testutil.EventuallyTrue(t, "the endpoint has the other module", has(stack.Netstack))
	testutil.EventuallyTrue(t, "the fault is over", func() bool { return !f.Has(FaultModule + "n1/c1") })
}

// TestRenewed: a module that runs another build than the one installed is ended, but not while
// connections live, and not if only the file is another one.
func TestRenewed(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	installed := filepath.Join(dir, programs[stack.Smoltcp].name)
	cmd := exec.Command("sleep", "600")
	testutil.NoError(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	bytes, err := os.ReadFile(cmd.Path)
	testutil.NoError(t, err)
	p, m, b := &Plane{cfg: Config{Self: filepath.Join(dir, "heddled"), Drain: time.Hour, Log: slog.New(slog.DiscardHandler)}}, newModules()[stack.Smoltcp], build{}
	l := &link{Requests: process.Requests{Conn: process.Conn{PID: cmd.Process.Pid}}}
	testutil.NoError(t, os.WriteFile(installed, bytes, 0o755))
	testutil.NoError(t, p.renew(m, l, &b, &protocol.Stats{}))
	testutil.NoError(t, os.Remove(installed))
	testutil.NoError(t, os.WriteFile(installed, append(bytes, 0), 0o755))
	testutil.NoError(t, p.renew(m, l, &b, &protocol.Stats{Connections: 2, TimeWait: 1}))
	select {
	case <-ended:
		t.Fatal("it is ended, with a connection")
	default:
	}
	if m.drains == nil || m.drains.Until == nil || time.Until(*m.drains.Until) < time.Hour/2 {
		t.Errorf("it drains %+v, want an hour", m.drains)
	}
	if err := p.renew(m, l, &b, &protocol.Stats{Connections: 1, TimeWait: 1}); err == nil {
		t.Error("it stays, without a connection")
	}
	select {
	case <-ended:
	case <-time.After(testutil.WaitTimeout):
		t.Error("it has not ended")
	}
	// A module that has drained for as long as it may ends with its connections, but for 0.
	gone, busy := &link{Requests: process.Requests{Conn: process.Conn{PID: 1 << 30}}}, &protocol.Stats{Connections: 2, TimeWait: 1}
	past := time.Now()
	m.drains = &api.StackDrain{Until: &past}
	if err := p.renew(m, gone, &b, busy); err == nil || !strings.Contains(err.Error(), "ended with 1 connections") {
		t.Errorf("after its time: %v", err)
	}
	m.drains = &api.StackDrain{}
	testutil.NoError(t, p.renew(m, gone, &b, busy))
	b.same = true
	if err := p.renew(m, gone, &b, busy); err != nil || m.drains != nil {
		t.Errorf("with the same build again: %v, drains %+v", err, m.drains)
	}
}

// TestServeStack: a node without the program, or whose module knows a setting not, cannot serve.
func TestServeStack(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	devices := &modules{}
	p := &Plane{cfg: Config{Self: filepath.Join(dir, "heddled"), StackModules: devices}, modules: newModules()}
	if err := p.ServeStack(stack.Kernel, stack.Settings{}); !errors.Is(err, plane.ErrOtherStack) {
		t.Errorf("the kernel's: %v", err)
	}
	if err := p.ServeStack(stack.Smoltcp, stack.Settings{}); err == nil {
		t.Error("served without the program")
	}
	testutil.NoError(t, os.WriteFile(filepath.Join(dir, programs[stack.Smoltcp].name), nil, 0o755))
	testutil.NoError(t, p.ServeStack(stack.Smoltcp, stack.Settings{Congestion: "reno"}))
	for _, s := range []stack.Settings{{Congestion: "dctcp"}, {MSS: 1000}} {
		if err := p.ServeStack(stack.Smoltcp, s); err == nil {
			t.Errorf("%s is served", s)
		}
	}
	testutil.NoError(t, os.WriteFile(filepath.Join(dir, programs[stack.Netstack].name), nil, 0o755))
	testutil.NoError(t, p.ServeStack(stack.Netstack, stack.Settings{Congestion: "cubic", Processors: 0.5}))
	for _, s := range []stack.Settings{{Congestion: "bbr"}, {Congestion: "none"}, {DelayedACK: stack.Duration(40 * time.Millisecond)}, {ECN: true}} {
		if err := p.ServeStack(stack.Netstack, s); err == nil || !strings.Contains(err.Error(), "netstack") {
			t.Errorf("%s: %v", s, err)
		}
	}
	p.cfg.OwnModules, p.lacking = dir, map[stack.Kind]bool{}
	if err := p.ServeStack(stack.ModuleKind("mine"), stack.Settings{}); err == nil || !strings.Contains(err.Error(), filepath.Join(dir, "mine")) || !p.lacking[stack.ModuleKind("mine")] {
		t.Errorf("a module of the operator's own that is not there: %v", err)
	}
	if err := stack.ModuleKind("mine").Check(stack.Settings{Congestion: "bbr", DelayedACK: stack.Duration(40 * time.Millisecond)}); err != nil {
		t.Error(err)
	}
	for _, s := range []stack.Settings{{Congestion: "dctcp"}, {MSS: 1000}} {
		if err := stack.ModuleKind("mine").Check(s); err == nil {
			t.Errorf("%s is told to a module", s)
		}
	}
	devices.none = unix.ENODEV
	if err := p.ServeStack(stack.Smoltcp, stack.Settings{}); !errors.Is(err, unix.ENODEV) {
		t.Errorf("a node without devices for modules: %v", err)
	}
	p.modules[stack.Smoltcp].failed = process.ErrEnded
	if err := p.ServeStack(stack.Smoltcp, stack.Settings{}); !errors.Is(err, process.ErrEnded) {
		t.Errorf("a module that does not run: %v", err)
	}
}

// TestCounted: what one module counted stays counted when it is another's turn, and no count falls.
func TestCounted(t *testing.T) {
	tn := newTenant(model.Endpoint{ID: 7}, netcfg.EndpointDevice{}, newModules()[stack.Smoltcp])
	first := &protocol.Stats{Connected: 3, Accepted: 2, Connections: 4, HalfOpen: 1, TimeWait: 1, BytesSent: 1000, BytesReceived: 10, Retransmits: 1}
	if got := tn.count(1, first); got.Opened != 3 || got.Accepted != 2 || got.Live[Path] != 2 || got.Closed != 3 || got.BytesSent != 1000 {
		t.Errorf("the first module: %+v", got)
	}
	if got := tn.countedBefore(); got.Closed != 5 || got.Live[Path] != 0 || got.BytesReceived != 10 {
		t.Errorf("without a module: %+v", got)
	}
	got := tn.count(2, &protocol.Stats{Accepted: 1, Connections: 1, BytesSent: 5})
	if got.Opened != 3 || got.Accepted != 3 || got.Live[Path] != 1 || got.Closed != 5 || got.BytesSent != 1005 || got.BytesReceived != 10 {
		t.Errorf("the next module: %+v", got)
	}
	if got := tn.count(2, &protocol.Stats{}); got.Accepted != 3 || got.BytesSent != 1005 {
		t.Errorf("counts that fall: %+v", got)
	}
}
