package intercept

import (
	"errors"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
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

// lingeringMaker makes sockets that a program got hold of in the moment they were made, as one does
// that asks for many.
type lingeringMaker struct {
	testMaker
	fd int
}

func (m *lingeringMaker) MakeSocket(model.EndpointID, int) (int, error) { return m.fd, nil }

// TestFillingDoesNotLinger: a program whose sockets linger keeps the prefiller from others for a
// moment, once.
func TestFillingDoesNotLinger(t *testing.T) {
	r, p, program, failures := testFilling(t, &testMaker{}, 3)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var err error
	if r.interrupts, err = newInterruptTimer(); err != nil {
		t.Fatal(err)
	}
	defer r.interrupts.delete()
	r.maker = &lingeringMaker{fd: lingering(t)}
	if err := unix.Shutdown(program, unix.SHUT_RD); err != nil { // who sends to it has the socket for himself
		t.Fatal(err)
	}
	r.startFilling(p, true, nothing)
	began := time.Now()
	if !r.fillSome(t.Context()) {
		t.Error("nothing to fill")
	}
	if took := time.Since(began); took >= longLinger/2 {
		t.Errorf("filling waited %v for a program", took)
	}
	if !p.pools.lingers.Load() || len(*failures) != 1 || !errors.Is((*failures)[0], errLingers) {
		t.Errorf("gets no more batches: %v; failures %v", p.pools.lingers.Load(), *failures)
	}
}
