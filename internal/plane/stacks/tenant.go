package stacks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/stacks/socket"
	"heddle.dev/heddle/internal/stack"
)

// tenant is an endpoint whose TCP the module runs.
type tenant struct {
	model.Endpoint
	veth   netcfg.EndpointDevice
	module *module.Module // that runs its TCP
	// active says that new sockets are the module's.
	active atomic.Bool
	// untold says that the module does not know all of the tenant: probe tells it again.
	untold atomic.Bool

	// closing is held while the module is told that a socket is closed.
	closing sync.Mutex

	// sockets serialise what is done to a socket, by its cookie; blocking are the calls that may
	// wait for their program in the kernel. A place is taken by sending.
	sockets  [64]chan struct{}
	blocking chan struct{}

	// begun is closed once the module has been told of the tenant, if it runs.
	begun chan struct{}

	// joining is held by who uses ends, as above.
	joining chan struct{}
	ends    *socket.Ends

	// mu guards the rest. It is never held across a request, nor across anything that waits for a
	// program: who hears the module takes it.
	mu sync.Mutex
	// held are sockets whose other end the plane has: bound ones, listeners, and those that were to
	// be or to be connected, by id.
	held map[uint64]*held
	// outgoing are those that the module was asked to connect, until a program has learnt what
	// became of it, by id.
	outgoing map[uint64]*outgoing
	// cutting are connections that policy forbids and the plane has asked the module to end.
	cutting  map[uint64]struct{}
	gone     bool
	calls    int // that are being answered
	settings stack.Settings
	wanted   stack.Kind // what its profile says
	counted  counted
}

// held is a bound socket or a listener; or a fresh one, which the module does not know.
type held struct {
	id    uint64
	other *os.File // the pair's other end; reads of it end when the program has closed its own
	// note is as of the socket, for a module that has to be told again; guarded by tenant.mu.
	note socket.Note
	// reuseAddress is what SO_REUSEADDR was at bind() or listen().
	reuseAddress bool
	// waiting are callers of accept(), first come first served; guarded by tenant.mu.
	waiting []*acceptor
	closed  bool // guarded by tenant.mu
}

// outgoing is a connection that the module was asked for.
type outgoing struct {
	done chan struct{} // closed when what follows is known
	// errno is why it was not connected, or 0; local is where from.
	errno unix.Errno
	local protocol.Address
	ended time.Time
	// waits says that the call that asked for it waits, and sets the state of a socket that is not
	// connected after all.
	waits bool
}

// maxBlocking is how many calls of a tenant may wait for their program in the kernel at a time.
const maxBlocking = 16

func newTenant(e model.Endpoint, veth netcfg.EndpointDevice, m *module.Module) *tenant {
	t := &tenant{Endpoint: e, veth: veth, module: m, begun: make(chan struct{}), held: map[uint64]*held{}, outgoing: map[uint64]*outgoing{}, blocking: make(chan struct{}, maxBlocking), joining: make(chan struct{}, 1), ends: socket.NewEnds()}
	for i := range t.sockets {
		t.sockets[i] = make(chan struct{}, 1)
	}
	return t
}

// configure takes over what the profile says, and reports whether that is news.
func (t *tenant) configure(c stack.Choice) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	news := t.wanted != c.Stack || !reflect.DeepEqual(t.settings, c.Settings)
	t.settings, t.wanted = c.Settings, c.Stack
	t.active.Store(true)
	return news
}

// inPlace reports that the tenant has another module than its profile says.
func (t *tenant) inPlace() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.wanted == t.module.Kind {
		return nil
	}
	return fmt.Errorf("%s runs its TCP until its sockets are closed: its profile says %s since then", t.module.Kind, t.wanted)
}

// number is the tenant's at the module; generation tells it from earlier endpoints with its id.
func (t *tenant) number() uint64     { return uint64(t.ID) }
func (t *tenant) generation() uint64 { return uint64(t.Created.UnixNano()) }

func (t *tenant) head(kind uint32, id uint64) protocol.Head {
	return protocol.Head{Type: kind, Tenant: t.number(), ID: id}
}

// owns reports whether a note is of a socket of this tenant.
func (t *tenant) owns(n *socket.Note) bool {
	return n.Tenant == t.number() && n.Generation == t.generation()
}

// message is TENANT.
func (t *tenant) message(dev netcfg.StackDevice, caps model.Limits) protocol.Tenant {
	m := protocol.Tenant{
		Head: t.head(protocol.TypeTenant, 0), Generation: t.generation(), Link: protocol.LinkEthernet, Offloads: 1, MTU: uint32(dev.MTU),
	}
	if a := t.Addr4(); a.IsValid() {
		m.Address4 = a.As4()
	}
	if a := t.Addr6(); a.IsValid() {
		m.Address6 = a.As16()
	}
	t.mu.Lock()
	m.Options, m.Limits = toldOf(t.settings)
	t.mu.Unlock()
	m.Limits.SendRate, m.Limits.ReceiveRate = pace(caps.Egress), pace(caps.Ingress)
	copy(m.MAC[:], dev.MAC)
	copy(m.Gateway[:], dev.Gateway)
	copy(m.Name[:], t.Name)
	return m
}

// introduce tells the module of the tenant, which it may know, and gives it a device if it does
// not.
func (p *Plane) introduce(ctx context.Context, l *module.Link, t *tenant) error {
	dev, err := p.cfg.StackModules.StackDevice(t.Endpoint, t.veth)
	if err != nil {
		return err
	}
	m := t.message(dev, p.capsOf(t.ID))
	_, _, err = module.Request[protocol.Tenant, protocol.Plain](ctx, l, &m, &m.Head, -1)
	if !errors.Is(err, unix.ENODEV) {
		return err
	}
	made, file, err := p.cfg.StackModules.OpenStackDevice(t.Endpoint, t.veth)
	if err != nil {
		return err
	}
	defer file.Close() // the module has its own
	m = t.message(made, p.capsOf(t.ID))
	_, _, err = module.Request[protocol.Tenant, protocol.Plain](ctx, l, &m, &m.Head, int(file.Fd()))
	return err
}

// restore gives the module the bound sockets and listeners of a tenant that it may not know.
func (p *Plane) restore(ctx context.Context, l *module.Link, t *tenant) error {
	t.mu.Lock()
	all := make([]*held, 0, len(t.held))
	for _, h := range t.held {
		all = append(all, h)
	}
	t.mu.Unlock()
	var errs []error
	for _, h := range all {
		var err error
		switch t.noteOf(h).State {
		case socket.Listening:
			_, err = p.listenAt(ctx, l, t, h)
		case socket.Bound:
			_, err = p.bindAt(ctx, l, t, h)
		}
		if err != nil && !errors.Is(err, unix.EEXIST) {
			errs = append(errs, fmt.Errorf("socket at %s: %w", h.note.Local.AddrPort(), err))
		}
	}
	return errors.Join(errs...)
}

// closeStrays has the module forget bound sockets and listeners that programs closed while no agent
// ran. None can be bound meanwhile: calls wait for the module that is being met.
func (p *Plane) closeStrays(ctx context.Context, l *module.Link, t *tenant) error {
	all, err := l.Sockets(ctx, t.number())
	if errors.Is(err, unix.ENODEV) {
		return nil // it could not be told of the tenant, which is a fault
	}
	if err != nil {
		return err
	}
	for _, s := range all {
		t.mu.Lock()
		known := t.held[s.Head.ID] != nil
		t.mu.Unlock()
		if known || s.Kind == protocol.KindConnection {
			continue
		}
		if err := l.CloseSocket(ctx, t.number(), s.Head.ID, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return nil
}

// noteOf gives a copy of what is noted of a held socket.
func (t *tenant) noteOf(h *held) socket.Note {
	t.mu.Lock()
	defer t.mu.Unlock()
	return h.note
}

// bindAt has the module keep an address.
func (p *Plane) bindAt(ctx context.Context, l *module.Link, t *tenant, h *held) (protocol.Named, error) {
	n := t.noteOf(h)
	m := protocol.Bind{Head: t.head(protocol.TypeBind, h.id), Address: n.Local, Flags: n.BindFlags(h.reuseAddress)}
	named, _, err := module.Request[protocol.Bind, protocol.Named](ctx, l, &m, &m.Head, -1)
	return named, err
}

// listenAt has the module listen.
func (p *Plane) listenAt(ctx context.Context, l *module.Link, t *tenant, h *held) (protocol.Named, error) {
	n := t.noteOf(h)
	m := protocol.Listen{
		Head: t.head(protocol.TypeListen, h.id), Address: n.Local, Flags: n.BindFlags(h.reuseAddress), Backlog: n.Backlog, Options: n.Told(),
	}
	named, _, err := module.Request[protocol.Listen, protocol.Named](ctx, l, &m, &m.Head, -1)
	return named, err
}

// hold keeps the other end of a socket, and has the module forget the socket when its program has
// closed it.
func (p *Plane) hold(t *tenant, h *held, fd int) error {
	if err := unix.SetNonblock(fd, true); err != nil { // of the file, which only the plane has
		closeFD(fd)
		return err
	}
	h.other = os.NewFile(uintptr(fd), "other end of a socket pair")
	if err := p.keepHeld(t, h, fd); err != nil {
		p.notKept(t, err)
	}
	t.mu.Lock()
	if t.gone {
		t.mu.Unlock()
		_ = h.other.Close()
		return unix.ENETDOWN
	}
	t.held[h.id] = h
	t.mu.Unlock()
	p.tasks.Go(func() { p.watch(t, h) })
	return nil
}

// watch waits until the program has closed its end, or the plane the other one.
func (p *Plane) watch(t *tenant, h *held) {
	if raw, err := h.other.SyscallConn(); err == nil {
		buf := make([]byte, 512)
		// Without waiting, whatever the file's flags are.
		_ = raw.Read(func(fd uintptr) bool { return socket.Ended(int(fd), buf) })
	}
	p.closeHeld(t, h)
}

// closeHeld gives up a held socket that its program has closed, and has the module forget it.
func (p *Plane) closeHeld(t *tenant, h *held) {
	t.closing.Lock()
	defer t.closing.Unlock()
	if !t.drop(h) {
		return
	}
	p.unkeep(t, h)
	if t.noteOf(h).State == socket.Fresh {
		return
	}
	p.forget(t, h.id)
}

// forget has the module close what it has by that id.
func (p *Plane) forget(t *tenant, id uint64) {
	ctx, cancel := context.WithTimeout(p.ctx, module.Answers)
	defer cancel()
	if l := t.module.Current(); l != nil {
		_ = l.CloseSocket(ctx, t.number(), id, 0) // it has ended, or knows no such socket
	}
}

// closeLeft has the module forget what programs have closed, before that is noticed: a program that
// closes a listener may bind its port at once.
func (p *Plane) closeLeft(t *tenant) {
	t.mu.Lock()
	all := make([]*held, 0, len(t.held))
	for _, h := range t.held {
		all = append(all, h)
	}
	t.mu.Unlock()
	for _, h := range all {
		if h.hungUp() {
			p.closeHeld(t, h)
		}
	}
	t.closing.Lock() // for what is being closed
	defer t.closing.Unlock()
}

// hungUp reports whether the program has closed its end.
func (h *held) hungUp() (is bool) {
	raw, err := h.other.SyscallConn()
	if err != nil {
		return false // it is closed
	}
	_ = raw.Control(func(fd uintptr) { is = socket.HungUp(int(fd)) })
	return is
}

// drop gives up a held socket; false: somebody else has, or has taken it over.
func (t *tenant) drop(h *held) bool {
	t.mu.Lock()
	if h.closed {
		t.mu.Unlock()
		return false
	}
	h.closed = true
	delete(t.held, h.id)
	waiting := h.waiting
	h.waiting = nil
	t.mu.Unlock()
	_ = h.other.Close()
	for _, a := range waiting {
		close(a.end)
	}
	return true
}

// release takes the other end from a held socket.
func (t *tenant) release(h *held) (fd int, err error) {
	t.mu.Lock()
	if h.closed {
		t.mu.Unlock()
		return -1, unix.EINVAL
	}
	h.closed = true
	delete(t.held, h.id)
	t.mu.Unlock()
	raw, err := h.other.SyscallConn()
	if err == nil {
		err = errors.Join(raw.Control(func(has uintptr) { fd, err = unix.FcntlInt(has, unix.F_DUPFD_CLOEXEC, 0) }), err)
	}
	_ = h.other.Close()
	return fd, err
}

// end gives up all that there is of the tenant.
func (t *tenant) end() {
	t.mu.Lock()
	t.gone = true
	all := make([]*held, 0, len(t.held))
	for _, h := range t.held {
		all = append(all, h)
	}
	t.mu.Unlock()
	for _, h := range all {
		t.drop(h)
	}
	t.leaveEnds()
}

// leaveEnds closes what joins ends, once nobody uses it.
func (t *tenant) leaveEnds() {
	go func() { // a program may hold up who does, for ever
		t.joining <- struct{}{}
		t.ends.Close()
	}()
}

// leave leaves what there is of the tenant to the next agent.
func (t *tenant) leave() {
	t.leaveEnds()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.gone = true
	for id, h := range t.held {
		h.closed = true
		delete(t.held, id)
		h.waiting = nil // their calls are the next agent's
		_ = h.other.Close()
	}
}
