package testutil

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// LongLinger is how long a Lingering socket lingers; it must not pass.
const LongLinger = time.Minute

// Lingering gives a connection with data under way that nobody takes, and SO_LINGER: its close()
// waits. The caller owns it.
func Lingering(t testing.TB) (fd int) {
	t.Helper()
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	NoError(t, err)
	t.Cleanup(func() { _ = unix.Close(listener) })
	NoError(t, errors.Join(unix.Bind(listener, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(listener, 1)))
	to, err := unix.Getsockname(listener)
	NoError(t, err)
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	NoError(t, err)
	NoError(t, unix.Connect(fd, to))
	for data := make([]byte, 1<<16); err == nil; {
		_, err = unix.SendmsgN(fd, data, nil, nil, unix.MSG_DONTWAIT)
	}
	linger := unix.Linger{Onoff: 1, Linger: int32(LongLinger / time.Second)}
	NoError(t, unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &linger))
	return fd
}
