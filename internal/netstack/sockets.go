package netstack

import (
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// bind reserves an address and port.
func (t *tenant) bind(id uint64, at netip.AddrPort, flags uint32) (netip.AddrPort, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.bindLocked(id, at, flags)
}

func (t *tenant) bindLocked(id uint64, at netip.AddrPort, flags uint32) (netip.AddrPort, error) {
	if t.sockets[id] != nil || t.connections[id] != nil {
		return at, unix.EEXIST
	}
	if t.ports.count >= int(t.limits.Sockets) {
		t.done.RefuseSockets++
		return at, unix.EMFILE
	}
	if a := at.Addr(); !a.IsUnspecified() && !t.isOwn(a) {
		return at, unix.EADDRNOTAVAIL
	}
	local, err := t.ports.bind(id, at, flags)
	if err != nil {
		t.done.RefusePorts++
		return at, err
	}
	t.sockets[id] = &socket{local: local, options: t.options}
	return local, nil
}

func (t *tenant) isOwn(a netip.Addr) bool {
	return a == t.own[0] || a == t.own[1] || a == loopback4 || a == netip.IPv6Loopback()
}

// listen makes a bound socket a listener, or an id that is none yet; of a listener it changes the
// backlog.
func (t *tenant) listen(id uint64, m *protocol.Listen) (netip.AddrPort, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := m.Address.AddrPort()
	options, err := with(t.options, &m.Options)
	if err != nil {
		return at, err
	}
	if t.connections[id] != nil {
		return at, unix.EINVAL
	}
	if t.sockets[id] == nil {
		if _, err := t.bindLocked(id, at, m.Flags); err != nil {
			return at, err
		}
	}
	s := t.sockets[id]
	s.backlog = int(min(max(m.Backlog, 1), backlogMost))
	if s.listens {
		return s.local, nil
	}
	if err := t.ports.listen(id, s.local.Port()); err != nil {
		t.done.RefusePorts++
		return at, err
	}
	s.listens, s.options = true, options
	return s.local, nil
}

// open begins to connect. Without an error the connection has the pair, and answers later.
func (t *tenant) open(asked protocol.Head, m *protocol.Connect, pair int) error {
	if !isStream(pair) {
		return unix.EINVAL
	}
	c, err := t.prepare(asked.ID, m)
	if err != nil {
		return err
	}
	ep, failed := t.stack.NewEndpoint(tcp.ProtocolNumber, familyOf(c.remote.Addr()), &c.queue)
	if failed == nil {
		ep.SocketOptions().SetReuseAddress(true) // who has which port is not netstack's business
		apply(ep, &c.options)
		applyBuffers(ep, &c.options)
		failed = ep.Bind(tcpip.FullAddress{Addr: toAddress(c.local.Addr()), Port: c.local.Port()})
	}
	if failed == nil {
		if err = t.watcher.add(pair, c); err == nil {
			t.mu.Lock()
			c.ep, c.pair = ep, pair
			t.mu.Unlock()
			go c.connect(asked, m.Skip)
			return nil
		}
	} else {
		err = errnoOf(failed)
	}
	if ep != nil {
		ep.Close()
	}
	t.forget(c, nil)
	return err
}

// prepare makes a connection of the tenant's to somebody, within its limits.
func (t *tenant) prepare(id uint64, m *protocol.Connect) (*connection, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	options, err := with(t.options, &m.Options)
	if err != nil {
		return nil, err
	}
	s := t.sockets[id]
	if t.connections[id] != nil || s != nil && s.listens {
		return nil, unix.EEXIST
	}
	remote, err := reachable(m.Remote.AddrPort())
	if err != nil {
		return nil, err
	}
	local, err := t.localFor(s, remote)
	if err != nil {
		return nil, err
	}
	if t.connect.available(time.Now()) == 0 {
		t.done.RefuseRate++
		return nil, unix.EAGAIN
	}
	if !t.hasPlace() {
		t.done.RefuseConnections++
		return nil, unix.EAGAIN
	}
	if !t.afford(&options) {
		t.done.RefuseMemory++
		return nil, unix.ENOBUFS
	}
	t.connect.take(1)
	if s != nil {
		t.ports.release(id, s.local.Port())
		delete(t.sockets, id)
	}
	c := t.newConnection(id, 0, options, connecting)
	c.local, c.remote = local, remote
	t.insert(c)
	return c, nil
}

// reachable gives whom a connect really is for, or why nobody.
func reachable(to netip.AddrPort) (netip.AddrPort, error) {
	a := to.Addr()
	switch {
	case a == netip.IPv4Unspecified():
		a = loopback4
	case a == netip.IPv6Unspecified():
		a = netip.IPv6Loopback()
	case a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}) || a.IsLoopback() && a.Is4() && a != loopback4:
		return to, unix.ENETUNREACH
	}
	if to.Port() == 0 {
		return to, unix.ECONNREFUSED // Linux sends that SYN, and is refused
	}
	return netip.AddrPortFrom(a, to.Port()), nil
}

// localFor gives the address and port that a connection to remote comes from.
func (t *tenant) localFor(s *socket, remote netip.AddrPort) (netip.AddrPort, error) {
	to := remote.Addr()
	address := t.own[1]
	switch {
	case to.IsLoopback():
		address = to
	case to.Is4():
		address = t.own[0]
	}
	if s != nil && !s.local.Addr().IsUnspecified() {
		switch a := s.local.Addr(); {
		case a.Is4() != to.Is4():
			return remote, unix.EAFNOSUPPORT
		case a.IsLoopback() && !t.isOwn(to):
			return remote, unix.EINVAL // nothing comes back from out there to a loopback address
		default:
			address = a
		}
	}
	if !address.IsValid() {
		return remote, unix.ENETUNREACH
	}
	if s != nil {
		local := netip.AddrPortFrom(address, s.local.Port())
		if t.byAddresses[addresses{local, remote}] != nil {
			return remote, unix.EADDRNOTAVAIL
		}
		return local, nil
	}
	port, err := t.ports.choose(remote, func(port uint16) bool {
		local := netip.AddrPortFrom(address, port)
		return local != remote && t.byAddresses[addresses{local, remote}] == nil
	})
	if err != nil {
		t.done.RefusePorts++
	}
	return netip.AddrPortFrom(address, port), err
}

// hasPlace reports whether there may be one more connection; one in TIME-WAIT goes if need be.
func (t *tenant) hasPlace() bool { return t.count-t.halfOpen < int(t.limits.Connections) || t.evict() }

// evict ends the connection that is longest in TIME-WAIT.
func (t *tenant) evict() bool {
	for len(t.waiting) > 0 {
		c := t.waiting[0]
		t.waiting = t.waiting[1:]
		if c.phase == waits {
			t.orderLocked(c, orderAbort)
			t.forgetLocked(c)
			return true
		}
	}
	return false
}

// afford gives options such buffers as the memory that is left allows, if there is enough of it.
func (t *tenant) afford(o *protocol.Options) bool {
	if !t.hasMemory(leastMemory) {
		return false
	}
	share := uint32(min(max(t.left()/128, bufferShort), bufferMax))
	o.SendBuffer, o.ReceiveBuffer = min(o.SendBuffer, share), min(o.ReceiveBuffer, share)
	return true
}

// hasMemory reports whether so much is left, for which connections in TIME-WAIT go if need be.
func (t *tenant) hasMemory(bytes uint64) bool {
	for t.left() < bytes {
		if !t.evict() {
			return false
		}
	}
	return true
}

func (t *tenant) left() uint64 { return t.limits.Memory - min(t.reserved, t.limits.Memory) }

// cost is what a connection takes with its buffers.
func cost(o *protocol.Options) uint64 {
	return uint64(o.SendBuffer) + uint64(o.ReceiveBuffer) + overhead
}

// insert takes a connection into all tables.
func (t *tenant) insert(c *connection) {
	if c.reserved = cost(&c.options); c.phase == arriving {
		c.reserved = halfOpen
		t.halfOpen++
	}
	t.reserved += c.reserved
	t.count++
	t.ports.connected(c.local.Port())
	t.byAddresses[addresses{c.local, c.remote}] = c
	t.connections[c.id] = c
}

// forget takes a connection out of all tables, and does something more with mu held.
func (t *tenant) forget(c *connection, more func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.forgetLocked(c)
	if more != nil {
		more()
	}
}

func (t *tenant) forgetLocked(c *connection) {
	if c.phase == over {
		return
	}
	if c.phase == arriving {
		t.halfOpen--
	}
	t.notPending(c)
	if c.phase != waits {
		close(c.ended)
	}
	c.phase = over
	t.count--
	t.reserved -= c.reserved
	t.ports.disconnected(c.local.Port())
	if key := (addresses{c.local, c.remote}); t.byAddresses[key] == c {
		delete(t.byAddresses, key)
	}
	if t.connections[c.id] == c {
		delete(t.connections, c.id)
	}
	closeFD(c.program)
	c.program = -1
}

// notPending takes a connection out of its listener's backlog.
func (t *tenant) notPending(c *connection) {
	if s := t.sockets[c.listener]; s != nil && !c.taken {
		s.pending--
	}
	c.taken = true
}

// taken says that a program has got a connection by accept().
func (t *tenant) taken(id uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.connections[id]; c != nil {
		t.notPending(c)
	}
}

// set changes options of a listener or connection; buffers stay as they were made.
func (t *tenant) set(id uint64, o protocol.Options) error {
	o.Mask &^= protocol.SetSendBuffer | protocol.SetReceiveBuffer
	t.mu.Lock()
	if s := t.sockets[id]; s != nil {
		defer t.mu.Unlock()
		if !s.listens {
			return unix.EINVAL
		}
		options, err := with(s.options, &o)
		if err == nil {
			s.options = options
		}
		return err
	}
	c := t.connections[id]
	if c == nil {
		t.mu.Unlock()
		return unix.ENOENT
	}
	options, err := with(c.options, &o)
	if err == nil {
		c.options = options
	}
	ep := c.ep
	t.mu.Unlock()
	if err == nil && ep != nil {
		apply(ep, &options)
	}
	return err
}

// close gives up a bound socket or listener, or has a connection end.
func (t *tenant) close(id uint64, abort bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.sockets[id]; s != nil {
		delete(t.sockets, id)
		t.ports.release(id, s.local.Port())
		for _, c := range t.connections {
			if c.listener == id && (!c.taken || c.phase == arriving) {
				t.orderLocked(c, orderAbort)
			}
		}
		return nil
	}
	c := t.connections[id]
	if c == nil {
		return unix.ENOENT
	}
	if abort {
		t.orderLocked(c, orderAbort)
	} else {
		t.orderLocked(c, orderClose)
	}
	return nil
}

// orderLocked tells a connection's goroutine something. While a peer's handshake is not over there
// is none, and nobody took it, and nobody will.
func (t *tenant) orderLocked(c *connection, what int32) {
	if what == orderAbort {
		closeFD(c.program)
		c.program = -1
		if c.phase == arriving {
			t.evictHandshake(c)
			return
		}
	}
	c.orders.Or(what)
	c.wake()
}
