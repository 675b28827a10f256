package stacks

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/stacks/socket"
)

// acceptor is a call of accept() that waits. Who removes it from its listener's answers it.
type acceptor struct {
	call *call
	got  chan int      // the connection's socket
	end  chan struct{} // closed when there will be none
}

// accept gives the program the next connection, which lies in the queue of the listener's own
// socket: so the listener is readable when there is one, for epoll, too.
func (c *call) accept() {
	if c.acceptFlags()&^(unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC) != 0 {
		c.end(0, unix.EINVAL)
		return
	}
	fd, err := c.queued()
	if !errors.Is(err, unix.EAGAIN) || c.nonblocking() {
		c.accepts(fd, err)
		return
	}
	a := &acceptor{call: c, got: make(chan int, 1), end: make(chan struct{})}
	c.t.mu.Lock()
	h := c.t.held[c.n.ID]
	if h != nil {
		h.waiting = append(alive(h.waiting), a)
	}
	c.t.mu.Unlock()
	if h == nil {
		c.end(0, err)
		return
	}
	// One may have come between the look and the wait.
	if fd, err = c.queued(); errors.Is(err, unix.EAGAIN) {
		c.awaitConnection(h, a)
		return
	}
	c.passOn(h, a)
	c.accepts(fd, err)
}

// passOn says that a caller does not wait any more. What it got is another's, or the next agent's.
func (c *call) passOn(h *held, a *acceptor) {
	if c.t.withdraw(h, a) {
		return
	}
	select {
	case another := <-a.got:
		c.p.offer(c.t, h.id, another)
	default: // ended, or the listener is gone: who removed it has given what there is under the lock
	}
}

// acceptFlags are those of accept4(), as given.
func (c *call) acceptFlags() int {
	if d := c.Data(); d.Nr == unix.SYS_ACCEPT4 {
		return int(int32(d.Args[3]))
	}
	return 0
}

func (c *call) accepts(fd int, err error) {
	if err != nil {
		c.end(0, err)
	} else {
		c.deliver(fd)
	}
}

// queued takes the next connection out of the listener's own queue; EAGAIN if there is none. The
// tenant's lock is not held: the program may have the kernel make it wait.
func (c *call) queued() (fd int, err error) {
	err = c.locked(func() error {
		if c.n.State != socket.Listening {
			return unix.EINVAL
		}
		return c.mayBlock(func() error { fd, err = socket.Unpark(c.fd); return err })
	})
	return fd, err
}

// withdraw says that a caller does not wait any more; false: it has its answer.
func (t *tenant) withdraw(h *held, a *acceptor) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.Index(h.waiting, a)
	if i >= 0 {
		h.waiting = slices.Delete(h.waiting, i, i+1)
	}
	return i >= 0
}

// alive gives the callers that still wait, and ends the others. The tenant's lock is held.
func alive(waiting []*acceptor) []*acceptor {
	return slices.DeleteFunc(waiting, func(a *acceptor) bool {
		gone := a.call.StillWaits() != nil
		if gone {
			close(a.end)
		}
		return gone
	})
}

// awaitConnection waits for a connection, for as long as the program has said (SO_RCVTIMEO).
func (c *call) awaitConnection(h *held, a *acceptor) {
	var timer <-chan time.Time
	if limit, err := unix.GetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO); err == nil && limit.Nano() > 0 {
		timer = time.After(time.Duration(limit.Nano()))
	}
	c.leaveFile() // the program may close it
	select {
	case fd := <-a.got:
		c.deliver(fd)
	case <-a.end:
		c.end(0, unix.EINVAL)
	case <-c.Done(): // it is the next agent's
		c.passOn(h, a)
	case <-timer:
		if c.t.withdraw(h, a) {
			c.end(0, unix.EAGAIN)
			return
		}
		select {
		case fd := <-a.got:
			c.deliver(fd)
		case <-a.end:
			c.end(0, unix.EINVAL)
		}
	}
}

// deliver gives the program a connection. What is there is not trusted: the program may have put it
// into the queue of its socket itself.
func (c *call) deliver(fd int) {
	raw, ours, err := c.p.cfg.StackModules.Note(fd)
	n := socket.ParseNote(raw)
	if err != nil || !ours || !c.t.owns(&n) || n.State != socket.Connected {
		closeFD(fd)
		c.end(0, unix.ECONNABORTED)
		return
	}
	d, flags := c.Data(), c.acceptFlags()
	err = unix.SetNonblock(fd, flags&unix.SOCK_NONBLOCK != 0)
	if err == nil && d.Args[1] != 0 {
		err = c.writeValue(d.Args[1], d.Args[2], n.Sockaddr(n.Remote), true)
	}
	var st unix.Stat_t
	if err == nil {
		err = unix.Fstat(fd, &st)
	}
	if err == nil {
		left, err := c.giveConnection(n, fd, st.Ino, flags&unix.SOCK_CLOEXEC != 0)
		if err != nil && left >= 0 { // its caller was interrupted: the next one has it
			c.p.offer(c.t, n.Listener, left)
		} else {
			c.p.taken(c.t, n.ID)
		}
		return
	}
	if c.StillWaits() != nil { // it was interrupted: the connection is the next one's
		c.leaveFile()
		c.p.offer(c.t, n.Listener, fd)
		c.end(0, err)
		return
	}
	closeFD(fd)
	c.p.taken(c.t, n.ID)
	c.end(0, err)
}

// taken tells the module that a program has a connection.
func (p *Plane) taken(t *tenant, id uint64) {
	if l := t.module.Current(); l != nil {
		module.Send(l, &protocol.Plain{Head: t.head(protocol.TypeTaken, id)})
	}
}

// arrival is a connection that a listener has, and that no program can get yet.
type arrival struct {
	t            *tenant
	id, listener uint64
	fd           int
}

// arrivals are those whose descriptor the module may have, too, by tenant: who closed one would see
// events of it as long as it has. It says SENT of one before it gives the tenant's next.
type arrivals map[uint64]arrival

func (all arrivals) add(a arrival) {
	if before, is := all[a.t.number()]; is { // of whom SENT should have been said: it is lost
		closeFD(before.fd)
	}
	all[a.t.number()] = a
}

func (all arrivals) end() {
	for _, a := range all {
		closeFD(a.fd)
	}
}

// accepted hears of a connection that a listener has.
func (p *Plane) accepted(l *module.Link, all arrivals, message []byte, fd int) error {
	m, err := protocol.Parse[protocol.Accepted](message)
	if err == nil && fd < 0 {
		err = fmt.Errorf("%w: a connection without its socket", protocol.ErrMalformed)
	}
	if err != nil {
		if fd >= 0 {
			closeFD(fd)
		}
		return err
	}
	t := p.tenantOf(model.EndpointID(m.Head.Tenant))
	if t == nil {
		closeFD(fd)
		return nil
	}
	t.mu.Lock()
	h := t.held[m.Listener]
	t.mu.Unlock()
	if h == nil {
		closeFD(fd) // the listener was closed: the module hears of that next
		return nil
	}
	of := t.noteOf(h)
	n := socket.Note{
		ID: m.Head.ID, Tenant: t.number(), Generation: t.generation(), State: socket.Connected, Family: of.Family, Flags: of.Flags | socket.Told,
		Local: m.Local, Remote: m.Remote, Set: of.Set, Options: of.Options, Listener: m.Listener,
	}
	err = socket.LeastSendBuffer(fd)
	if err == nil {
		err = p.cfg.StackModules.SetNote(fd, n.Bytes())
	}
	if err != nil {
		closeFD(fd)
		p.cfg.Log.Error("a connection is lost", "endpoint", t.Name, "err", err)
		return nil
	}
	p.observe(t, flow.Open, n.ID, m.Local.AddrPort(), m.Remote.AddrPort(), func(o *flow.Observation) { o.Accepted = true })
	if l.TellsSent.Load() {
		all.add(arrival{t, m.Head.ID, m.Listener, fd})
	} else { // a module of before
		p.offer(t, m.Listener, fd)
	}
	return nil
}

// sent hears that the descriptor of a connection is the agent's alone.
func (p *Plane) sent(all arrivals, message []byte) error {
	m, err := protocol.Parse[protocol.Plain](message)
	if err != nil {
		return err
	}
	if a, is := all[m.Head.Tenant]; is && a.id == m.Head.ID {
		delete(all, m.Head.Tenant)
		p.offer(a.t, a.listener, a.fd)
	}
	return nil
}

// awaitOffers returns when whoever has put a connection into a queue has closed its descriptor.
func (t *tenant) awaitOffers() {
	t.mu.Lock()
	defer t.mu.Unlock()
}

// offer gives a connection to a caller that waits for one, or puts it into the listener's queue.
func (p *Plane) offer(t *tenant, listener uint64, fd int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.held[listener]
	if h == nil {
		closeFD(fd)
		return
	}
	for len(h.waiting) > 0 {
		a := h.waiting[0]
		h.waiting = h.waiting[1:]
		if a.call.StillWaits() == nil {
			a.got <- fd
			return
		}
		close(a.end)
	}
	raw, err := h.other.SyscallConn()
	if err == nil {
		ctl := raw.Control(func(other uintptr) { err = socket.Park(int(other), fd) })
		err = errors.Join(ctl, err)
	}
	closeFD(fd)
	if err != nil {
		p.why.queueFull.Add()
		p.cfg.Log.Debug("a connection is dropped: its listener takes no more", "endpoint", t.Name, "err", err)
	}
}
