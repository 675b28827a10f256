package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// bind keeps a port for a socket: what is bound is not known to the stack before it listens or
// connects.
func (t *tenant) bind(id uint64, at netip.AddrPort) (netip.AddrPort, error) {
	if t.sockets[id] != nil {
		return at, unix.EEXIST
	}
	taken := func(port uint16) bool {
		for _, s := range t.sockets {
			if s.kind != protocol.KindConnection && s.local.Port() == port {
				return true
			}
		}
		return false
	}
	if at.Port() == 0 {
		for t.ports++; t.ports < 32768 || taken(t.ports); t.ports++ {
		}
		at = netip.AddrPortFrom(at.Addr(), t.ports)
	} else if taken(at.Port()) {
		return at, unix.EADDRINUSE
	}
	t.sockets[id] = &socket{kind: protocol.KindBound, local: at, program: -1}
	return at, nil
}

// listen has a socket listen. Of one that does it changes the backlog, which is not kept here.
func (t *tenant) listen(id uint64, at netip.AddrPort) (netip.AddrPort, error) {
	if t.sockets[id] == nil {
		if at, err := t.bind(id, at); err != nil {
			return at, err
		}
	}
	s := t.sockets[id]
	if s.kind != protocol.KindBound {
		return s.local, nil
	}
	listens, err := gonet.ListenTCP(t.stack, full(s.local), familyOf(s.local.Addr()))
	if err != nil {
		return s.local, unix.EADDRINUSE
	}
	s.kind, s.listens = protocol.KindListener, listens
	go t.accept(id, listens)
	return s.local, nil
}

// accept makes a connection of each that comes, until the listener is closed.
func (t *tenant) accept(listener uint64, listens *gonet.TCPListener) {
	for {
		conn, err := listens.Accept()
		if err != nil {
			return
		}
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			_ = conn.Close()
			continue
		}
		_, _ = unix.Write(pair[0], []byte{0}) // the first guard
		_ = unix.SetNonblock(pair[0], false)
		t.module.mu.Lock()
		t.last++
		t.serve(t.last, &socket{listener: listener, program: pair[0]}, conn.(*gonet.TCPConn), pair[1])
		if t.module.live {
			t.announce(t.last)
		}
		t.module.mu.Unlock()
	}
}

// announceAll tells an agent of what no agent was told of.
func (t *tenant) announceAll() {
	for id := range t.sockets {
		t.announce(id)
	}
}

func (t *tenant) announce(id uint64) {
	s := t.sockets[id]
	if s.program < 0 {
		return
	}
	head := protocol.Head{Type: protocol.TypeAccepted, Tenant: t.id, ID: id}
	send(t.module, &protocol.Accepted{Head: head, Listener: s.listener, Local: protocol.AddressOf(s.local), Remote: protocol.AddressOf(s.remote)}, s.program)
	s.program = -1
}

// connect answers a CONNECT when it is known what becomes of it. pair is the module's end.
func (t *tenant) connect(answer protocol.Head, asked *protocol.Connect, pair int) {
	remote, local := asked.Remote.AddrPort(), tcpip.FullAddress{}
	t.module.mu.Lock()
	bound := t.sockets[answer.ID]
	if bound != nil && !bound.local.Addr().IsUnspecified() {
		local = full(bound.local)
	} else if bound != nil {
		local.Port = bound.local.Port()
	}
	t.module.mu.Unlock()
	conn, err := gonet.DialTCPWithBind(context.Background(), t.stack, local, full(remote), familyOf(remote.Addr()))
	t.module.mu.Lock()
	defer t.module.mu.Unlock()
	if err != nil {
		t.done.Failed++
		answer.Error = int32(unix.ECONNREFUSED)
		send(t.module, &protocol.Plain{Head: answer}, pair)
		return
	}
	drop(pair, int(asked.Skip)-1) // and the last byte is the guard
	s := &socket{program: -1}
	t.serve(answer.ID, s, conn, pair)
	t.done.Connected++
	send(t.module, &protocol.Named{Head: answer, Local: protocol.AddressOf(s.local)}, -1)
}

// connection moves bytes between a pair and a connection of the stack.
type connection struct {
	conn *gonet.TCPConn
	pair *net.UnixConn
	in   uint64 // bytes for the program, and of it; guarded by the module's lock
	out  uint64
}

// serve begins to move bytes, until both directions have ended.
func (t *tenant) serve(id uint64, s *socket, conn *gonet.TCPConn, pair int) {
	file := os.NewFile(uintptr(pair), "pair")
	its, err := net.FileConn(file)
	_ = file.Close()
	if err != nil {
		_ = conn.Close()
		return
	}
	c := &connection{conn: conn, pair: its.(*net.UnixConn)}
	s.kind, s.connection = protocol.KindConnection, c
	s.local, s.remote = conn.LocalAddr().(*net.TCPAddr).AddrPort(), conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	t.sockets[id] = s
	go func() {
		var both sync.WaitGroup
		var failed error
		both.Go(func() { failed = c.toProgram(t) })
		both.Go(func() { c.fromProgram(t) })
		both.Wait()
		t.over(id, s, failed)
	}()
}

// toProgram gives the program what comes. The end of it is the end of the pair's half.
func (c *connection) toProgram(t *tenant) error {
	buf := make([]byte, 64<<10)
	for {
		n, err := c.conn.Read(buf)
		if n > 0 {
			if _, werr := c.pair.Write(buf[:n]); werr != nil {
				return c.conn.Close() // nobody reads it
			}
			t.module.mu.Lock()
			c.in += uint64(n)
			t.module.mu.Unlock()
		}
		if errors.Is(err, io.EOF) {
			return c.pair.CloseWrite()
		}
		if err != nil {
			_ = c.pair.Close() // with the guard in it: the program reads ECONNRESET
			return unix.ECONNRESET
		}
	}
}

// fromProgram sends what the program writes. The last byte of it always stays in the pair, though
// it is sent: a pair that is closed with a byte in it says ECONNRESET, also when this process dies.
func (c *connection) fromProgram(t *tenant) {
	raw, err := c.pair.SyscallConn()
	if err != nil {
		return
	}
	buf := make([]byte, 64<<10)
	for {
		n, ended := 0, false
		err := raw.Read(func(fd uintptr) bool {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
			_, _ = unix.Poll(fds, 0)
			ended = fds[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
			n, _, _ = unix.Recvfrom(int(fd), buf, unix.MSG_PEEK|unix.MSG_DONTWAIT)
			return n > 1 || ended
		})
		if err == nil && n > 1 {
			if _, err = c.conn.Write(buf[1:n]); err == nil {
				_ = raw.Control(func(fd uintptr) { drop(int(fd), n-1) })
				t.module.mu.Lock()
				c.out += uint64(n - 1)
				t.module.mu.Unlock()
				continue
			}
		}
		if err == nil {
			_ = c.conn.CloseWrite() // it has ended, and all is sent
		}
		return
	}
}

// drop reads bytes of a pair that have been sent.
func drop(pair, n int) {
	var rest [64 << 10]byte
	for n > 0 {
		got, _, err := unix.Recvfrom(pair, rest[:min(n, len(rest))], unix.MSG_DONTWAIT)
		if err != nil || got <= 0 {
			return
		}
		n -= got
	}
}

// over says that a connection is: in order, after which the program sees the end, or not.
func (t *tenant) over(id uint64, s *socket, failed error) {
	c := s.connection
	if failed == nil {
		if raw, err := c.pair.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { drop(int(fd), 1<<20) }) // the guard, too
		}
	}
	_ = c.pair.Close()
	_ = c.conn.Close()
	t.module.mu.Lock()
	defer t.module.mu.Unlock()
	if t.sockets[id] != s {
		return
	}
	delete(t.sockets, id)
	t.done.BytesSent, t.done.BytesReceived = t.done.BytesSent+c.out, t.done.BytesReceived+c.in
	info := s.info(protocol.Head{Type: protocol.TypeEnded, Tenant: t.id, ID: id, Error: errnoOf(failed)})
	send(t.module, &info, -1)
}

// close ends a socket. Connections end by themselves when their pairs do; this is what resets them.
func (t *tenant) close(id uint64, s *socket) {
	switch s.kind {
	case protocol.KindConnection:
		_ = s.connection.pair.Close()
		_ = s.connection.conn.Close()
	case protocol.KindListener:
		s.listens.Shutdown()
		_ = s.listens.Close()
		fallthrough
	default:
		delete(t.sockets, id)
	}
}

// end ends everything of a tenant's.
func (t *tenant) end() {
	for id, s := range t.sockets {
		t.close(id, s)
		delete(t.sockets, id)
		if s.program >= 0 {
			_ = unix.Close(s.program)
		}
	}
	t.stack.Close()
	_ = t.device.Close()
}

// info says what a socket is.
func (s *socket) info(head protocol.Head) protocol.Info {
	i := protocol.Info{Head: head, Kind: s.kind, Listener: s.listener, Local: protocol.AddressOf(s.local)}
	switch s.kind {
	case protocol.KindListener:
		i.State = unix.BPF_TCP_LISTEN
	case protocol.KindConnection:
		i.State, i.Remote = unix.BPF_TCP_ESTABLISHED, protocol.AddressOf(s.remote)
		i.BytesSent, i.BytesReceived = s.connection.out, s.connection.in
	default:
		i.State = unix.BPF_TCP_CLOSE
	}
	return i
}

// count adds what the tenant has.
func (t *tenant) count(to *protocol.Stats) {
	to.Tenants++
	to.Connected, to.Failed = to.Connected+t.done.Connected, to.Failed+t.done.Failed
	to.BytesSent, to.BytesReceived = to.BytesSent+t.done.BytesSent, to.BytesReceived+t.done.BytesReceived
	for _, s := range t.sockets {
		if c := s.connection; c != nil {
			to.Connections, to.BytesSent, to.BytesReceived = to.Connections+1, to.BytesSent+c.out, to.BytesReceived+c.in
		} else {
			to.Sockets++
		}
	}
}

// named answers what has a name from now on, or not.
func (t *tenant) named(answer protocol.Head, at netip.AddrPort, err error) {
	if answer.Error = errnoOf(err); err != nil {
		send(t.module, &protocol.Plain{Head: answer}, -1)
		return
	}
	send(t.module, &protocol.Named{Head: answer, Local: protocol.AddressOf(at)}, -1)
}

func errnoOf(err error) int32 {
	if err == nil {
		return 0
	}
	if errno := unix.Errno(0); errors.As(err, &errno) {
		return int32(errno)
	}
	return int32(unix.EIO)
}

func familyOf(a netip.Addr) tcpip.NetworkProtocolNumber {
	if a.Is4() {
		return header.IPv4ProtocolNumber
	}
	return header.IPv6ProtocolNumber
}

func toAddress(a netip.Addr) tcpip.Address { return tcpip.AddrFromSlice(a.AsSlice()) }

// full gives an address as the stack has it: that of nothing for the unspecified one.
func full(a netip.AddrPort) tcpip.FullAddress {
	if a.Addr().IsUnspecified() {
		return tcpip.FullAddress{Port: a.Port()}
	}
	return tcpip.FullAddress{Addr: toAddress(a.Addr()), Port: a.Port()}
}
