package stacks

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/testutil"
)

// linked gives a connection to a module, and the module's end.
func linked(t *testing.T) (*link, *net.UnixConn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "socket")
	listener, err := net.Listen("unixpacket", path)
	testutil.NoError(t, err)
	defer listener.Close()
	l, err := dial(path)
	testutil.NoError(t, err)
	t.Cleanup(l.Close)
	module, err := listener.Accept()
	testutil.NoError(t, err)
	t.Cleanup(func() { _ = module.Close() })
	return l, module.(*net.UnixConn)
}

func reply(t *testing.T, module *net.UnixConn, h protocol.Head) {
	t.Helper()
	h.Type |= protocol.Answer
	_, err := module.Write(protocol.Append(nil, &protocol.Plain{Head: h}))
	testutil.NoError(t, err)
}

// TestAnswersWhileNothingIsRead: a module reads no more requests until its answers are read; so they
// are, while a request waits to be written.
func TestAnswersWhileNothingIsRead(t *testing.T) {
	l, module := linked(t)
	go func() { _, _, _, _ = l.receive() }() // until the end
	first := protocol.Head{Type: protocol.TypeTaken, Tenant: 1, ID: 1}
	got := make(chan error, 1)
	go func() {
		m := protocol.Plain{Head: first}
		_, _, err := request[protocol.Plain, protocol.Plain](t.Context(), l, &m, &m.Head, -1)
		got <- err
	}()
	b := make([]byte, protocol.MessageMax)
	n, err := module.Read(b)
	testutil.NoError(t, err)
	asked, err := protocol.ParseHead(b[:min(n, 32)])
	testutil.NoError(t, err)
	for range 4 {
		go func() {
			for err := error(nil); err == nil; {
				err = l.Write(b[:n], -1)
			}
		}()
	}
	raw, err := l.SyscallConn()
	testutil.NoError(t, err)
	testutil.EventuallyTrue(t, "the module's queue is full", func() bool {
		full := false
		err := raw.Control(func(fd uintptr) {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
			n, err := unix.Poll(fds, 0)
			full = err == nil && n == 0
		})
		return err == nil && full
	})
	reply(t, module, asked)
	answered := <-got
	if err := raw.Control(func(uintptr) {}); answered != nil || err != nil {
		t.Errorf("the connection has ended before the answer was read: %v, %v", answered, err)
	}
}

// TestAnswersOfOthers: an answer is only taken of the tenant that was asked, and to what was asked.
func TestAnswersOfOthers(t *testing.T) {
	l, module := linked(t)
	go func() { _, _, _, _ = l.receive() }()
	m := protocol.Close{Head: protocol.Head{Type: protocol.TypeClose, Tenant: 7, ID: 9}}
	done := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), testutil.WaitTimeout)
	defer cancel()
	go func() {
		_, _, err := request[protocol.Close, protocol.Plain](ctx, l, &m, &m.Head, -1)
		done <- err
	}()
	b := make([]byte, protocol.MessageMax)
	n, err := module.Read(b)
	testutil.NoError(t, err)
	asked, err := protocol.ParseHead(b[:min(n, 32)])
	testutil.NoError(t, err)
	forged := asked
	forged.Tenant, forged.Error = 8, int32(unix.EPERM)
	reply(t, module, forged)
	forged = asked
	forged.Type, forged.Error = protocol.TypeBind, int32(unix.EACCES)
	reply(t, module, forged)
	asked.Error = int32(unix.ENOENT)
	reply(t, module, asked)
	if err := <-done; !errors.Is(err, unix.ENOENT) {
		t.Errorf("the answer is %v, not that of the tenant that was asked", err)
	}
}

// TestOffered: a connection is its listener's once the module has no descriptor of it any more, and
// says so; of a module that says no such thing, at once.
func TestOffered(t *testing.T) {
	l, module := linked(t)
	p := &Plane{cfg: Config{StackModules: &modules{}}, tenants: map[model.EndpointID]*tenant{}}
	tn := newTenant(model.Endpoint{ID: 7}, netcfg.EndpointDevice{}, newModules()[stack.Smoltcp])
	p.tenants[tn.ID] = tn
	program, other := joined(t)
	tn.held[1] = &held{id: 1, other: os.NewFile(uintptr(other), "other end")}
	heard := make(chan error, 1)
	go func() { heard <- p.hear(l) }()
	send := func(m []byte, fd int) {
		t.Helper()
		var rights []byte
		if fd >= 0 {
			rights = unix.UnixRights(fd)
		}
		_, _, err := module.WriteMsgUnix(m, rights, nil)
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
		fd, err := unpark(program)
		if got := err == nil; got != want {
			t.Errorf("%s: a connection waits: %v (%v), want %v", when, got, err, want)
		}
		if err == nil {
			closeFD(fd)
		}
	}
	_ = accepted(10)
	waits(true, "of a module that does not say SENT")
	l.tellsSent.Store(true)
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
	if !endClosed(t, lost) || endClosed(t, left) {
		t.Error("want that of two connections without SENT the first is closed")
	}
	testutil.NoError(t, module.Close())
	if err := <-heard; err == nil || !endClosed(t, left) {
		t.Errorf("the module has ended (%v), and a connection of its is kept", err)
	}
}

func pairOf(t *testing.T) (one, two int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testutil.NoError(t, err)
	t.Cleanup(func() { closeFD(fds[1]) })
	return fds[0], fds[1]
}

func endClosed(t *testing.T, fd int) bool {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(fd)}}
	_, err := unix.Poll(fds, 0)
	testutil.NoError(t, err)
	return fds[0].Revents&unix.POLLHUP != 0
}
