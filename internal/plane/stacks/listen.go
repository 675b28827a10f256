package stacks

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/stacks/socket"
)

// maxBacklog is what a module takes.
const maxBacklog = 4096

// privilegedPorts are those below, unless a container's ip_unprivileged_port_start is lower. That
// it is higher is not looked for.
const privilegedPorts = 1024

// acceptQueue is how much may wait in a listener's end, in bytes as the kernel charges them: 4,096
// connections, each of which is a message.
const acceptQueue = 8 << 20

// bind has the module keep an address for the socket.
func (c *call) bind() {
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
	defer unlock()
	at, errno := c.n.ParseSockaddr(raw)
	if errno != 0 {
		c.end(0, errno)
		return
	}
	if err = c.mayBind(at); err == nil {
		err = c.bindTo(at)
	}
	c.end(0, err)
}

// mayBind refuses what the kernel refuses before it looks whether the address is free, in its
// order.
func (c *call) mayBind(at netip.AddrPort) error {
	addr := at.Addr().Unmap()
	own := addr.IsUnspecified() || addr.IsLoopback() || slices.Contains(c.t.Addrs, addr)
	if own && at.Port() != 0 && at.Port() < privilegedPorts {
		if err := c.mayBindPort(at.Port()); err != nil {
			return err
		}
	}
	switch {
	case c.n.State == socket.Fresh:
		return nil // whether the address is the container's the module says
	case !own:
		return unix.EADDRNOTAVAIL
	}
	return unix.EINVAL
}

// mayBindPort refuses a port that only who may (CAP_NET_BIND_SERVICE) can have in the container.
func (c *call) mayBindPort(port uint16) error {
	may, err := c.p.proc.Capable(c.Thread(), unix.CAP_NET_BIND_SERVICE)
	if err != nil || may {
		return err
	}
	first, err := netcfg.UnprivilegedPorts(c.t.NetnsPath)
	if err == nil && int(port) < first {
		return unix.EACCES
	}
	return err
}

func (c *call) bindTo(at netip.AddrPort) error {
	h, other, err := c.holdable(at)
	if err != nil {
		return err
	}
	h.note.State = socket.Bound
	err = c.askTwice(func(ctx context.Context, l *module.Link) error {
		named, err := c.p.bindAt(ctx, l, c.t, h)
		if err == nil {
			h.note.Local = named.Local
		}
		return err
	})
	if err == nil {
		err = c.p.hold(c.t, h, other)
		other = -1
	}
	if err != nil {
		if other >= 0 {
			c.unbegin(other)
		}
		return err
	}
	c.n = h.note
	c.write()
	return nil
}

// holdable makes what the plane is to hold of a socket that the module does not know.
func (c *call) holdable(at netip.AddrPort) (h *held, other int, err error) {
	other, err = c.takeOther()
	if err != nil {
		return nil, -1, err
	}
	n := c.n
	n.ID, n.Local = c.p.ids.Add(1), protocol.AddressOf(at)
	reuse, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_REUSEADDR)
	if err != nil {
		c.unbegin(other)
		return nil, -1, err
	}
	return &held{id: n.ID, note: n, reuseAddress: reuse != 0}, other, nil
}

// ask asks the module for what it answers at once. If it ends meanwhile, the next one is asked,
// which has been told of all that the plane holds.
func (c *call) ask(f func(context.Context, *module.Link) error) error {
	ctx, cancel := context.WithTimeout(c.p.ctx, module.Starts+module.Answers)
	defer cancel()
	var ended *module.Link
	for {
		l, err := c.t.module.Await(ctx)
		if err == nil && l == ended { // it is not yet known that it has
			select {
			case <-time.After(pollOutcome):
				continue
			case <-ctx.Done():
				return process.ErrGone
			}
		}
		if err == nil {
			err = f(ctx, l)
		}
		if errors.Is(err, context.DeadlineExceeded) {
			return process.ErrGone
		}
		if ended != nil || !errors.Is(err, process.ErrGone) {
			return err
		}
		ended = l
	}
}

// askTwice is ask for what may be in the way of itself: a port of a socket that is closed.
func (c *call) askTwice(f func(context.Context, *module.Link) error) error {
	err := c.ask(f)
	if errors.Is(err, unix.EADDRINUSE) {
		c.p.closeLeft(c.t)
		err = c.ask(f)
	}
	return err
}

// listen makes the socket a listener, or changes the backlog of one.
func (c *call) listen() {
	unlock, ok := c.lock()
	if !ok {
		return
	}
	defer unlock()
	c.resolve()
	// As the kernel does: what is negative is as much as can be, and one more waits than asked for.
	backlog := min(uint32(c.Data().Args[1]), maxBacklog-1) + 1
	switch c.n.State {
	case socket.Fresh:
		c.end(0, c.listenAnywhere(backlog))
	case socket.Bound, socket.Listening:
		c.end(0, c.listenBound(backlog))
	default:
		c.end(0, unix.EINVAL)
	}
}

// listenAnywhere listens at a port of the module's choice.
func (c *call) listenAnywhere(backlog uint32) error {
	h, other, err := c.holdable(c.n.Unspecified())
	if err != nil {
		return err
	}
	h.note.State = socket.Bound
	if err := c.p.hold(c.t, h, other); err != nil {
		return err
	}
	if err := c.listenHeld(h, backlog); err != nil {
		if other, release := c.releaseHeld(h); release == nil {
			c.unbegin(other)
		}
		return err
	}
	return nil
}

func (c *call) listenBound(backlog uint32) error {
	c.t.mu.Lock()
	h := c.t.held[c.n.ID]
	c.t.mu.Unlock()
	if h == nil {
		return unix.EINVAL // it was shut down
	}
	return c.listenHeld(h, backlog)
}

// listenHeld has the module listen for a socket whose other end the plane has: before it does,
// since a connection may come before the answer.
func (c *call) listenHeld(h *held, backlog uint32) error {
	raw, err := h.other.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, acceptQueue) // else fewer wait
		})
	}
	if err != nil {
		return err
	}
	c.t.mu.Lock()
	h.note.Backlog, h.note.Set, h.note.Options = backlog, c.n.Set, c.n.Options
	c.t.mu.Unlock()
	err = c.askTwice(func(ctx context.Context, l *module.Link) error {
		named, err := c.p.listenAt(ctx, l, c.t, h)
		if err != nil {
			return err
		}
		c.t.mu.Lock()
		defer c.t.mu.Unlock()
		h.note.Local, h.note.State = named.Local, socket.Listening
		return nil
	})
	if err != nil {
		return err
	}
	c.n = c.t.noteOf(h)
	c.write()
	c.p.keepAgain(c.t, h)
	return nil
}

// shutdown answers for a socket that is not connected: the kernel would shut the pair's end down,
// for good, which TCP refuses.
func (c *call) shutdown() {
	how := int(int32(c.Data().Args[1]))
	unlock, ok := c.lock()
	if !ok {
		return
	}
	defer unlock()
	c.resolve()
	switch {
	case how != unix.SHUT_RD && how != unix.SHUT_WR && how != unix.SHUT_RDWR:
		c.end(0, unix.EINVAL)
	case c.n.State == socket.Connected || c.n.State == socket.Connecting:
		if c.n.State == socket.Connected && c.n.Flags&socket.Told == 0 {
			c.n.Flags |= socket.Told // as the kernel sees it: the next connect() is EISCONN
			c.write()
			c.t.forget(c.n.ID)
		}
		c.end(0, unix.Shutdown(c.fd, how))
	case c.n.State == socket.Listening && how == unix.SHUT_WR:
		c.end(0, nil)
	case c.n.State == socket.Listening:
		c.n.State = socket.Failed
		c.write()
		c.end(0, unix.Shutdown(c.fd, unix.SHUT_RDWR)) // by which it ends, and who waits at it
	default:
		c.end(0, unix.ENOTCONN)
	}
}
