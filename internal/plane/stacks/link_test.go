package stacks

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/stacks/socket"
	"heddle.dev/heddle/internal/testutil"
)

// linked gives a connection to a module, and the module's end.
func linked(t *testing.T) (*module.Link, *net.UnixConn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "socket")
	listener, err := net.Listen("unixpacket", path)
	testutil.NoError(t, err)
	defer listener.Close()
	l, err := module.Dial(path)
	testutil.NoError(t, err)
	t.Cleanup(l.Close)
	other, err := listener.Accept()
	testutil.NoError(t, err)
	t.Cleanup(func() { _ = other.Close() })
	return l, other.(*net.UnixConn)
}

func reply(t *testing.T, other *net.UnixConn, h protocol.Head) {
	t.Helper()
	h.Type |= protocol.Answer
	_, err := other.Write(protocol.Append(nil, &protocol.Plain{Head: h}))
	testutil.NoError(t, err)
}

// TestOffered: a connection is its listener's once the module has no descriptor of it any more, and
// says so; of a module that says no such thing, at once.
func TestOffered(t *testing.T) {
	l, other := linked(t)
	p := &Plane{cfg: Config{StackModules: &modules{}}, tenants: map[model.EndpointID]*tenant{}}
	tn := newTenant(model.Endpoint{ID: 7}, netcfg.EndpointDevice{}, new(module.Module))
	p.tenants[tn.ID] = tn
	program, end := joined(t)
	tn.held[1] = &held{id: 1, other: os.NewFile(uintptr(end), "other end")}
	heard := make(chan error, 1)
	go func() { heard <- p.hear(l) }()
	send := func(m []byte, fd int) {
		t.Helper()
		var rights []byte
		if fd >= 0 {
			rights = unix.UnixRights(fd)
		}
		_, _, err := other.WriteMsgUnix(m, rights, nil)
		testutil.NoError(t, err)
	}
	accepted := func(id uint64) (peer int) {
		one, two := pairOf(t)
		m := protocol.Accepted{Head: protocol.Head{Type: protocol.TypeAccepted, Tenant: 7, ID: id}, Listener: 1}
		send(protocol.Append(nil, &m), one)
		closeFD(one)
		return two
	}
	sent := func(id uint64) {
		send(protocol.Append(nil, &protocol.Plain{Head: protocol.Head{Type: protocol.TypeSent, Tenant: 7, ID: id}}), -1)
	}
	// Once the end of this one is heard of, all before has been.
	settle := func() {
		t.Helper()
		tn.mu.Lock()
		tn.outgoing[99] = &outgoing{}
		tn.mu.Unlock()
		send(protocol.Append(nil, &protocol.Info{Head: protocol.Head{Type: protocol.TypeEnded, Tenant: 7, ID: 99}}), -1)
		testutil.EventuallyTrue(t, "the plane hears", func() bool {
			tn.mu.Lock()
			defer tn.mu.Unlock()
			return tn.outgoing[99] == nil
		})
	}
	waits := func(want bool, when string) {
		t.Helper()
		settle()
		fd, err := socket.Unpark(program)
		if got := err == nil; got != want {
			t.Errorf("%s: a connection waits: %v (%v), want %v", when, got, err, want)
		}
		if err == nil {
			closeFD(fd)
		}
	}
	_ = accepted(10)
	waits(true, "of a module that does not say SENT")
	l.TellsSent.Store(true)
	_ = accepted(11)
	waits(false, "before SENT")
	sent(12)
	waits(false, "SENT of another one")
	sent(11)
	waits(true, "after SENT")
	// One is kept of a tenant at most, and none past the module's end.
	lost := accepted(13)
	left := accepted(14)
	settle()
	if !socket.HungUp(lost) || socket.HungUp(left) {
		t.Error("want that of two connections without SENT the first is closed")
	}
	testutil.NoError(t, other.Close())
	if err := <-heard; err == nil || !socket.HungUp(left) {
		t.Errorf("the module has ended (%v), and a connection of its is kept", err)
	}
}

// TestAcceptedAsTheAgentEnds: a caller that waits no more leaves a connection that it got for others.
func TestAcceptedAsTheAgentEnds(t *testing.T) {
	program, other := pairOf(t)
	defer closeFD(program)
	dup, err := unix.Dup(other)
	testutil.NoError(t, err)
	h := &held{id: 1, other: os.NewFile(uintptr(dup), "other end")}
	defer h.other.Close()
	tn := newTenant(model.Endpoint{ID: 7}, netcfg.EndpointDevice{}, new(module.Module))
	tn.held[1] = h
	c := &call{p: &Plane{}, t: tn, fd: -1}
	a := &acceptor{call: c, got: make(chan int, 1), end: make(chan struct{})}
	connection, _ := pairOf(t)
	a.got <- connection
	c.passOn(h, a)
	fd, err := socket.Unpark(program)
	testutil.NoError(t, err)
	closeFD(fd)
	h.waiting = []*acceptor{a}
	if c.passOn(h, a); len(h.waiting) != 0 {
		t.Error("it waits still")
	}
}

func pairOf(t *testing.T) (one, two int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testutil.NoError(t, err)
	t.Cleanup(func() { closeFD(fds[1]) })
	return fds[0], fds[1]
}
