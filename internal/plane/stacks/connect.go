package stacks

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/stacks/socket"
)

const (
	// failedStays is how long it is kept why a connection was not established, for a program that
	// has yet to ask; maxOutgoing is of how many connections something is kept.
	failedStays = time.Minute
	maxOutgoing = 65536
	// pollOutcome is how often the module is asked for a connection of which an earlier agent had
	// the answer.
	pollOutcome = 50 * time.Millisecond
	// outcomeIsNear bounds the time between what a socket shows of a connection and the answer.
	outcomeIsNear = time.Second
)

// connect connects the socket. A program that waits is answered when that is done; of one that does
// not, the socket becomes writable then.
func (c *call) connect() {
	d := c.Data()
	raw, err := c.readSockaddr(d.Args[1], d.Args[2])
	if err != nil {
		c.end(0, err)
		return
	}
	unlock, ok := c.lock()
	if !ok {
		return
	}
	c.resolve()
	switch c.n.State {
	case socket.Fresh, socket.Bound:
		to, errno := c.n.ParseSockaddr(raw)
		from := c.n.Local.AddrPort().Addr()
		bound6 := from.Is6() && !from.Is4In6() && !from.IsUnspecified()
		if errno == 0 && to.Addr().Is4() && (c.n.Flags&socket.V6Only != 0 || bound6) {
			errno = unix.ENETUNREACH
		}
		if errno != 0 {
			unlock()
			c.end(0, errno)
			return
		}
		c.n.Remote = protocol.AddressOf(reachable(to))
		begun, err := c.begin()
		unlock()
		if err != nil {
			c.end(0, err)
		} else {
			c.establish(begun)
		}
	case socket.Connecting:
		o := c.t.outgoingOf(c.n.ID)
		unlock()
		if c.nonblocking() {
			c.end(0, unix.EALREADY)
		} else {
			c.awaitOutcome(o)
		}
	case socket.Connected:
		// The first call after the connection is there says so.
		o := c.t.outgoingOf(c.n.ID)
		if first := c.n.Flags&socket.Told == 0; first || o != nil {
			c.tellConnected(cmp.Or(o, over()))
			unlock()
			return
		}
		unlock()
		c.end(0, unix.EISCONN)
	case socket.Failed:
		// Why, once: the program may not have been told, as one that was interrupted. Then as the
		// kernel does.
		errno := cmp.Or(unix.Errno(c.n.Error), unix.ECONNABORTED)
		c.n.Error = 0
		c.write()
		unlock()
		c.end(0, errno)
	default:
		unlock()
		c.end(0, unix.EISCONN)
	}
}

// tellConnected has connect() succeed. A caller that was interrupted meanwhile calls again, by
// itself, and is told then: of a connection that is there something is kept for as long as nobody
// could be told. Calls that were interrupted come here in any order. The socket's lock is held.
func (c *call) tellConnected(o *outgoing) {
	// Then this call is one that was interrupted: the caller has been told by a later one.
	known := c.n.Flags&socket.Told != 0 && c.t.outgoingOf(c.n.ID) == nil
	c.n.Flags |= socket.Told
	c.write()
	c.leaveFile()
	if c.Return(0) == nil {
		c.t.forget(c.n.ID)
	} else if !known {
		c.t.expect(c.n.ID, o)
	}
}

// over is a connection of which all is known.
func over() *outgoing {
	o := &outgoing{done: make(chan struct{})}
	close(o.done)
	return o
}

// reachable gives where a connect to the unspecified address goes: the own host.
func reachable(to netip.AddrPort) netip.AddrPort {
	switch {
	case !to.Addr().IsUnspecified():
		return to
	case to.Addr().Is4():
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), to.Port())
	}
	return netip.AddrPortFrom(netip.IPv6Loopback(), to.Port())
}

// begun is a connection that the module is about to be asked for.
type begun struct {
	*outgoing
	other int // the module's end
	skip  int // bytes in the pair that are not the program's
	wait  bool
}

// begin takes the other end of a socket that is to be connected, and fills it: with one byte that
// stays (see "The pair" of the protocol), or with as many as keep the program's end from being
// writable, for a program that waits for that. The socket's lock is held.
func (c *call) begin() (b begun, err error) {
	id, to := c.n.ID, c.n.Remote // of a bound socket the module knows the id
	if c.n.State == socket.Fresh {
		id = c.p.ids.Add(1)
	}
	if b.other, err = c.takeOther(); err != nil {
		return b, err
	}
	b.wait = !c.nonblocking()
	b.outgoing = &outgoing{done: make(chan struct{}), waits: b.wait}
	if b.skip, err = socket.Fill(c.fd, !b.wait); err != nil {
		c.unbegin(b.other)
		return b, err
	}
	if !c.t.expect(id, b.outgoing) {
		c.unbegin(b.other)
		return b, unix.EAGAIN
	}
	c.n.State, c.n.ID, c.n.Remote = socket.Connecting, id, to
	c.write()
	return b, nil
}

// expect notes that an answer will come; false: too many are expected.
func (t *tenant) expect(id uint64, o *outgoing) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.outgoing) >= maxOutgoing {
		for id, old := range t.outgoing {
			if old.over() && old.errno != 0 && time.Since(old.ended) > failedStays {
				delete(t.outgoing, id)
			}
		}
	}
	if len(t.outgoing) >= maxOutgoing {
		return false
	}
	t.outgoing[id] = o
	return true
}

func (t *tenant) outgoingOf(id uint64) *outgoing {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.outgoing[id]
}

func (t *tenant) forget(id uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.outgoing, id)
}

// over reports whether it is known what became of it.
func (o *outgoing) over() bool {
	select {
	case <-o.done:
		return true
	default:
		return false
	}
}

// establish has the module connect the socket.
func (c *call) establish(b begun) {
	n := c.n
	if !b.wait {
		c.end(0, unix.EINPROGRESS)
	}
	back, err := c.ask4connection(n, b)
	var errno unix.Errno
	switch {
	case err == nil:
	case errors.As(err, &errno):
		b.errno = errno
	case errors.Is(err, process.ErrGone):
		b.errno = unix.ECONNRESET
	default:
		b.errno = unix.ENETDOWN
	}
	b.ended = time.Now()
	c.p.tellConnect(c.t, &n, b.outgoing)
	close(b.done)
	if b.wait {
		c.finish(b.outgoing, back)
	} else if back >= 0 {
		closeFD(back) // by which the program learns that there is something to learn
	}
}

// ask4connection asks the module for the connection, and gives back the other end if there is none.
func (c *call) ask4connection(n socket.Note, b begun) (back int, err error) {
	l, err := c.t.module.Await(c.p.ctx)
	if err != nil {
		return b.other, err
	}
	m := protocol.Connect{Head: c.t.head(protocol.TypeConnect, n.ID), Remote: n.Remote, Skip: uint32(b.skip), Options: n.Told()}
	named, back, err := module.Request[protocol.Connect, protocol.Named](c.p.ctx, l, &m, &m.Head, b.other)
	closeFD(b.other) // the module has its own, or it has come back
	b.local = named.Local
	return back, err
}

// finish answers a program that waits. A socket that was not connected is as it was made.
func (c *call) finish(o *outgoing, back int) {
	unlock, ok := c.lock()
	if !ok {
		if back >= 0 {
			closeFD(back)
		}
		return
	}
	defer unlock()
	if o.errno == 0 {
		if c.n.State != socket.Connected { // else another call has come first, which may be an interrupted one
			c.t.forget(c.n.ID)
			c.n.State, c.n.Local = socket.Connected, o.local
		}
		c.tellConnected(o)
		return
	}
	c.t.forget(c.n.ID)
	if back >= 0 {
		c.giveBack(back)
	} else {
		c.n.State = socket.Failed
	}
	c.write()
	c.end(0, o.errno)
}

// tellOutcome answers a call that is not the one by which the module was asked.
func (c *call) tellOutcome(o *outgoing) {
	if o.errno != 0 {
		c.end(0, o.errno)
		return
	}
	unlock, ok := c.lock()
	if !ok {
		return
	}
	defer unlock()
	c.resolve()
	c.tellConnected(o)
}

// awaitOutcome answers a program that calls connect() once more, and waits; o is nil if an earlier
// agent asked for the connection.
func (c *call) awaitOutcome(o *outgoing) {
	if o != nil {
		select {
		case <-o.done:
			c.tellOutcome(o)
		case <-c.Done(): // it is the next agent's
		}
		return
	}
	for {
		unlock, ok := c.lock()
		if !ok {
			return
		}
		c.resolve()
		n := c.n
		if n.State == socket.Connected {
			c.tellConnected(over())
		}
		unlock()
		switch {
		case n.State == socket.Connected:
			return
		case n.State == socket.Failed:
			c.end(0, unix.Errno(n.Error))
			return
		case n.State != socket.Connecting:
			c.end(0, unix.ECONNABORTED)
			return
		}
		select {
		case <-time.After(pollOutcome):
			if c.StillWaits() != nil {
				_ = c.Drop()
				return
			}
		case <-c.Done():
			return
		}
	}
}

// resolve notes what has become of a connection that the module was asked for, if it is known. The
// socket's lock is held.
func (c *call) resolve() {
	if c.n.State != socket.Connecting {
		return
	}
	o := c.t.outgoingOf(c.n.ID)
	if o == nil {
		c.resolveByInfo()
		return
	}
	if !o.over() && socket.Writable(c.fd) {
		select { // the socket already shows it, and the answer is on its way
		case <-o.done:
		case <-time.After(outcomeIsNear):
		}
	}
	if !o.over() || o.errno != 0 && o.waits { // finish has the socket be as it was made
		return
	}
	c.t.forget(c.n.ID)
	if o.errno == 0 {
		c.n.State, c.n.Local = socket.Connected, o.local
	} else {
		c.n.State, c.n.Error = socket.Failed, int32(o.errno)
	}
	c.write()
}

// resolveByInfo is resolve for a connection that an earlier agent asked for.
func (c *call) resolveByInfo() {
	var info protocol.Info
	err := c.ask(func(ctx context.Context, l *module.Link) (err error) {
		info, err = l.Info(ctx, c.t.number(), c.n.ID)
		return err
	})
	switch {
	case errors.Is(err, unix.ENOENT):
		c.n.State, c.n.Error = socket.Failed, int32(unix.ECONNABORTED)
	case err != nil || info.State == tcpSynSent:
		return
	default:
		c.n.State, c.n.Local = socket.Connected, info.Local
	}
	c.write()
}
