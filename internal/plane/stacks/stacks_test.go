package stacks

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
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
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/stacks/socket"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/internal/trap"
)

func TestDeclares(t *testing.T) { planetest.CheckDeclaration(t, "stacks", Declaration) }

// joined gives a program's end and the other one.
func joined(t *testing.T) (program, other int) {
	t.Helper()
	p, err := socket.MakePair()
	testutil.NoError(t, err)
	e := socket.NewEnds()
	defer e.Close()
	other, err = e.Join(t.TempDir(), p.Program)
	testutil.NoError(t, err)
	return p.Program, other
}

// TestPlaces: a tenant whose calls hold all of its places keeps no other tenant, and the agent's end
// ends who waits for one.
func TestPlaces(t *testing.T) {
	one, another := newTenant(model.Endpoint{ID: 1}, netcfg.EndpointDevice{}, new(module.Module)), newTenant(model.Endpoint{ID: 2}, netcfg.EndpointDevice{}, new(module.Module))
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
	played, notes := play(t, filepath.Join(dir, socketOf[stack.Smoltcp]), false), &modules{}
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
	h := &held{id: 1, note: socket.Note{ID: 1, State: socket.Listening}}
	testutil.NoError(t, p.hold(tenant, h, other))

	played.listener.Close()
	next := play(t, filepath.Join(dir, socketOf[stack.Smoltcp]), false)
	if l := p.modules[stack.Smoltcp].Current(); l == nil {
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
	testutil.EventuallyTrue(t, "the module is there", func() bool { return p.modules[stack.Smoltcp].Current() != nil })
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
	played, notes := play(t, filepath.Join(dir, socketOf[stack.Smoltcp]), false), &modules{busy: 2}
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
	p := &Plane{cfg: Config{Faults: &faults{}}}
	m := p.newModule(stack.Smoltcp)
	p.ctx, p.stop = context.WithCancel(t.Context())
	defer p.stop()
	first, second := &module.Link{}, &module.Link{}
	m.SetLink(first)
	var asked []*module.Link
	err := (&call{p: p, t: &tenant{module: m}}).ask(func(_ context.Context, l *module.Link) error {
		asked = append(asked, l)
		if l == first {
			time.AfterFunc(2*pollOutcome, func() { m.SetLink(nil); m.SetLink(second) })
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
	tn := newTenant(model.Endpoint{ID: 7}, netcfg.EndpointDevice{}, new(module.Module))
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
		tenants: map[model.EndpointID]*tenant{7: tn}, retired: map[model.EndpointID]model.Traffic{}, cfg: Config{Faults: &faults{}, StackModules: &modules{}, Config: module.Config{Log: slog.New(slog.DiscardHandler)}},
	}
	p.ctx, p.stop = context.WithCancel(t.Context())
	defer p.stop()
	ended := &module.Link{Requests: process.Requests{Conn: process.Conn{UnixConn: new(net.UnixConn)}}}
	ended.Close()
	p.retire(ended, tn, &protocol.Stats{Accepted: 3, Connections: 1, TimeWait: 1, BytesSent: 5})
	if p.tenantOf(7) != nil {
		t.Error("it is a tenant still")
	}
	if got := p.countedOf(7); got.Accepted != 3 || got.Closed != 3 || got.BytesSent != 5 || len(got.Live) != 0 {
		t.Errorf("counted: %+v", got)
	}
	again := newTenant(model.Endpoint{ID: 7}, netcfg.EndpointDevice{}, new(module.Module))
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
	smoltcp := play(t, filepath.Join(dir, socketOf[stack.Smoltcp]), false)
	netstack := play(t, filepath.Join(dir, socketOf[stack.Netstack]), false)
	p, f := runPlane(t, dir, &modules{})
	for _, m := range []*played{smoltcp, netstack} {
		m.hear(protocol.TypeHello)
		m.hear(protocol.TypeBegin)
		m.hear(protocol.TypeEnd)
	}
	has := func(kind stack.Kind) func() bool {
		return func() bool { return p.tenantOf(7).module.Kind == kind }
	}
	e := model.Endpoint{ID: 7, Name: "n1/c1", Addrs: []netip.Addr{netip.MustParseAddr("10.244.0.2")}, Created: time.Unix(5, 9)}
	for _, kind := range module.Kinds {
		testutil.EventuallyTrue(t, string(kind)+" is there", func() bool { return p.modules[kind].Current() != nil })
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

// TestServeStack: a node without the program, or whose module knows a setting not, cannot serve.
func TestServeStack(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	devices := &modules{}
	p := &Plane{
		cfg: Config{
			Config:       module.Config{Programs: module.Programs{StateDir: dir, Self: filepath.Join(dir, "heddled")}, Log: slog.New(slog.DiscardHandler)},
			StackModules: devices, Faults: &faults{}, StacksChanged: func() {},
		},
		modules: map[stack.Kind]*module.Module{}, tenants: map[model.EndpointID]*tenant{},
	}
	if err := p.ServeStack(stack.Kernel, stack.Settings{}); !errors.Is(err, plane.ErrOtherStack) {
		t.Errorf("the kernel's: %v", err)
	}
	if err := p.ServeStack(stack.Smoltcp, stack.Settings{}); err == nil {
		t.Error("served without the program")
	}
	testutil.NoError(t, os.WriteFile(filepath.Join(dir, "heddle-stack"), nil, 0o755))
	testutil.NoError(t, p.ServeStack(stack.Smoltcp, stack.Settings{Congestion: "reno"}))
	for _, s := range []stack.Settings{{Congestion: "dctcp"}, {MSS: 1000}} {
		if err := p.ServeStack(stack.Smoltcp, s); err == nil {
			t.Errorf("%s is served", s)
		}
	}
	testutil.NoError(t, os.WriteFile(filepath.Join(dir, "heddle-netstack"), nil, 0o755))
	testutil.NoError(t, p.ServeStack(stack.Netstack, stack.Settings{Congestion: "cubic", Processors: 0.5}))
	for _, s := range []stack.Settings{{Congestion: "bbr"}, {Congestion: "none"}, {DelayedACK: stack.Duration(40 * time.Millisecond)}, {ECN: true}} {
		if err := p.ServeStack(stack.Netstack, s); err == nil || !strings.Contains(err.Error(), "netstack") {
			t.Errorf("%s: %v", s, err)
		}
	}
	p.cfg.Own, p.lacking = dir, map[stack.Kind]bool{}
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
	// One that is no program does not run.
	m := p.newModule(stack.Smoltcp)
	p.modules[stack.Smoltcp], p.tenants[1] = m, &tenant{module: m}
	ctx, cancel := context.WithCancel(t.Context())
	kept := make(chan struct{})
	go func() { m.Keep(ctx); close(kept) }()
	testutil.EventuallyTrue(t, "the module is tried for", func() bool { return m.Failure() != nil })
	if err := p.ServeStack(stack.Smoltcp, stack.Settings{}); !errors.Is(err, m.Failure()) {
		t.Errorf("a module that does not run: %v", err)
	}
	cancel()
	<-kept
}

// TestCounted: what one module counted stays counted when it is another's turn, and no count falls.
func TestCounted(t *testing.T) {
	tn := newTenant(model.Endpoint{ID: 7}, netcfg.EndpointDevice{}, new(module.Module))
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
