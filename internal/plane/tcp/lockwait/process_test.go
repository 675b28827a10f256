package lockwait

import (
	"errors"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

// locked gives one end of a connection, whose lock a send() has from memory that comes when provide
// is called, and the other end.
func locked(t *testing.T) (socket *os.File, peer net.Conn, provide func()) {
	t.Helper()
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	testutil.NoError(t, err)
	t.Cleanup(func() { listener.Close() })
	conn, err := net.Dial("tcp4", listener.Addr().String())
	testutil.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	peer, err = listener.Accept()
	testutil.NoError(t, err)
	t.Cleanup(func() { peer.Close() })
	socket, err = conn.(*net.TCPConn).File()
	testutil.NoError(t, err)
	t.Cleanup(func() { socket.Close() })
	page, uffd, err := testutil.MissingPage()
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) {
		t.Skip(err)
	}
	testutil.NoError(t, err)
	testutil.NoError(t, unix.SetNonblock(int(socket.Fd()), false))
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		_, _ = unix.Write(int(socket.Fd()), page)
	}()
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(uffd), Events: unix.POLLIN}}, int(testutil.WaitTimeout.Milliseconds()))
	if err != nil || n != 1 {
		t.Fatalf("the kernel did not ask for the page: %d, %v", n, err)
	}
	return socket, peer, func() {
		testutil.NoError(t, testutil.ProvidePage(page, uffd))
		<-sent
	}
}

// again opens a file that there is once more.
func again(f *os.File) func() (*os.File, error) {
	return func() (*os.File, error) {
		fd, err := unix.Dup(int(f.Fd()))
		return os.NewFile(uintptr(fd), f.Name()), err
	}
}

// said gives a file that says something and ends.
func said(t *testing.T, what string) func() (*os.File, error) {
	return func() (*os.File, error) {
		r, w, err := os.Pipe()
		testutil.NoError(t, err)
		_, err = w.WriteString(what)
		return r, errors.Join(err, w.Close())
	}
}

// A call that waits for a lock is given up; others of its name are not begun, others of other names
// are made; and when the lock is free all is as it was.
func TestStuck(t *testing.T) {
	socket, peer, provide := locked(t)
	changes := make(chan struct{}, 2)
	p := Process{Changed: func() { changes <- struct{}{} }}
	t.Cleanup(func() { testutil.NoError(t, p.Close()) })
	if got, err := p.Do("free", said(t, "all"), nil); string(got) != "all" || err != nil {
		t.Fatalf("a call that waits for nothing: %q, %v", got, err)
	}
	began := time.Now()
	if _, err := p.Do("held", again(socket), nil); !errors.Is(err, ErrStuck) {
		t.Fatalf("a call that waits for a lock: %v, want ErrStuck", err)
	}
	t.Logf("given up after %v", time.Since(began))
	<-changes
	if stuck := p.Stuck(); len(stuck) != 1 || stuck[0].Name != "held" {
		t.Errorf("stuck: %v", stuck)
	}
	if _, err := p.Do("held", func() (*os.File, error) { return nil, errors.New("begun") }, nil); !errors.Is(err, ErrStuck) {
		t.Errorf("the next call of that name: %v, want ErrStuck", err)
	}
	if got, err := p.Do("free", said(t, "more"), nil); string(got) != "more" || err != nil {
		t.Errorf("a call of another name: %q, %v", got, err)
	}
	provide()
	testutil.NoError(t, peer.Close()) // what the call reads ends
	<-changes
	if stuck := p.Stuck(); len(stuck) != 0 {
		t.Errorf("stuck: %v", stuck)
	}
	if got, err := p.Do("held", said(t, "rest"), nil); string(got) != "rest" || err != nil {
		t.Errorf("the call after it has come back: %q, %v", got, err)
	}
}

// The process ends when it is closed, and one that has ended is started again.
func TestProcessEnds(t *testing.T) {
	var p Process
	for range 2 {
		if _, err := p.Do("one", said(t, "x"), nil); err != nil {
			t.Fatal(err)
		}
		pid := p.pid
		testutil.NoError(t, unix.Kill(pid, unix.SIGKILL))
		testutil.Eventually(t, "the process to end", func() (bool, string) {
			err := unix.Kill(pid, 0)
			return errors.Is(err, unix.ESRCH), fmt.Sprint(err)
		})
	}
	if _, err := p.Do("one", said(t, "x"), nil); err != nil {
		t.Fatal(err)
	}
	pid := p.pid
	testutil.NoError(t, p.Close())
	testutil.Eventually(t, "the process to end", func() (bool, string) {
		err := unix.Kill(pid, 0)
		return errors.Is(err, unix.ESRCH), fmt.Sprint(err)
	})
}
