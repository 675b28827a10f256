package module

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/testutil"
)

// linked gives a connection to a module, and the module's end.
func linked(t *testing.T) (*Link, *net.UnixConn) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "socket")
	listener, err := net.Listen("unixpacket", path)
	testutil.NoError(t, err)
	defer listener.Close()
	l, err := Dial(path)
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
	go func() { _, _, _, _ = l.Hear() }() // until the end
	first := protocol.Head{Type: protocol.TypeTaken, Tenant: 1, ID: 1}
	got := make(chan error, 1)
	go func() {
		m := protocol.Plain{Head: first}
		_, _, err := Request[protocol.Plain, protocol.Plain](t.Context(), l, &m, &m.Head, -1)
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
	go func() { _, _, _, _ = l.Hear() }()
	m := protocol.Close{Head: protocol.Head{Type: protocol.TypeClose, Tenant: 7, ID: 9}}
	done := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), testutil.WaitTimeout)
	defer cancel()
	go func() {
		_, _, err := Request[protocol.Close, protocol.Plain](ctx, l, &m, &m.Head, -1)
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
