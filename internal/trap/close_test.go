package trap

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// longLinger is how long the programs of these tests have their sockets linger; it must not pass.
const longLinger = time.Minute

// lingering gives a connection with data under way that nobody takes, and SO_LINGER.
func lingering(t *testing.T) int {
	t.Helper()
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeFD(listener) })
	if err := errors.Join(unix.Bind(listener, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(listener, 1)); err != nil {
		t.Fatal(err)
	}
	to, err := unix.Getsockname(listener)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Connect(fd, to); err != nil {
		t.Fatal(err)
	}
	for data := make([]byte, 1<<16); err == nil; {
		_, err = unix.SendmsgN(fd, data, nil, nil, unix.MSG_DONTWAIT)
	}
	linger := unix.Linger{Onoff: 1, Linger: int32(longLinger / time.Second)}
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &linger); err != nil {
		t.Fatal(err)
	}
	return fd
}

// TestEndDoesNotLinger: a server that ends does not wait for the programs of its readers' sockets.
func TestEndDoesNotLinger(t *testing.T) {
	s := &Server{listeners: make(map[*Listener]struct{})}
	l := newListener(s, -1, specs.ContainerProcessState{})
	s.listeners[l] = struct{}{}
	fd := lingering(t)
	var closed atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		r := l.newReader(1)
		if r.prepare() {
			r.closeGiven(fd)
			closed.Store(true)
		}
	}()
	began := time.Now()
	s.interruptCloses(done)
	if took := time.Since(began); took >= longLinger/2 {
		t.Errorf("the end waited %v for a program", took)
	}
	if !closed.Load() {
		t.Error("the reader did not close its socket")
	}
}
