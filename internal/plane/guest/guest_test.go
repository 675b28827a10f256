package guest

import (
	"errors"
	"net"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/internal/trap/task"
)

// TestFind: a connection is found though the thread that asked has ended, and not once its program
// has closed it.
func TestFind(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testutil.NoError(t, err)
	defer listener.Close()
	conn, err := net.Dial("tcp", listener.Addr().String())
	testutil.NoError(t, err)
	defer conn.Close()
	file, err := conn.(*net.TCPConn).File()
	testutil.NoError(t, err)
	_ = conn.Close()
	p, err := OpenPrograms()
	testutil.NoError(t, err)
	defer p.Close()
	var at Connection
	looked := make(chan error)
	task.OnThread(func() {
		fd, c, err := p.Connection(uint32(unix.Gettid()), int(file.Fd()), Established)
		if err == nil {
			_ = unix.Close(fd)
		}
		at = c
		looked <- err
	})
	switch err := <-looked; {
	case errors.Is(err, unix.EPERM):
		t.Skipf("pidfd_getfd is not permitted here, even of a thread of one's own: %v", err)
	case err != nil:
		t.Fatal(err)
	}
	testutil.EventuallyTrue(t, "the thread has ended", func() bool {
		return unix.Kill(int(at.Thread), 0) == unix.ESRCH
	})
	fd, found := p.Find(at)
	if !found {
		t.Fatal("not found once the thread that asked has ended")
	}
	_ = unix.Close(fd)
	runtime.KeepAlive(file)
	_ = file.Close()
	if fd, found := p.Find(at); found {
		_ = unix.Close(fd)
		t.Error("found though it is closed")
	}
}
