package socket

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/testutil"
)

func TestNoteFits(t *testing.T) {
	if n := binary.Size(Note{}); n > plane.NoteBytes {
		t.Fatalf("a note has %d bytes, more than %d", n, plane.NoteBytes)
	}
	n := Note{ID: 1, Tenant: 3, Generation: 4, State: Connected, Family: unix.AF_INET6, Flags: Told, Error: 5, Listener: 6, Congestion: 7,
		Local: protocol.AddressOf(netip.MustParseAddrPort("10.0.0.1:80")), Set: 1 << 23, Options: [optionCount]int32{23: -9}}
	if got := ParseNote(n.Bytes()); got != n {
		t.Errorf("%+v, want %+v", got, n)
	}
}

// TestSockaddr: addresses are read and shown as the kernel's TCP does.
func TestSockaddr(t *testing.T) {
	at := netip.MustParseAddrPort("10.0.0.1:80")
	for _, family := range []uint32{unix.AF_INET, unix.AF_INET6} {
		n := Note{Family: family}
		shown := n.Sockaddr(protocol.AddressOf(at))
		if got, errno := n.ParseSockaddr(shown); errno != 0 || got != at {
			t.Errorf("family %d: %x is %v, %v", family, shown, got, errno)
		}
		if _, errno := n.ParseSockaddr(shown[:len(shown)-5]); errno != unix.EINVAL {
			t.Errorf("family %d, too short: %v", family, errno)
		}
		if _, errno := n.ParseSockaddr(make([]byte, 2)); errno != unix.EINVAL && errno != unix.EAFNOSUPPORT {
			t.Errorf("family %d, no address: %v", family, errno)
		}
	}
	n := Note{Family: unix.AF_INET}
	if _, errno := n.ParseSockaddr((&Note{Family: unix.AF_INET6}).Sockaddr(protocol.AddressOf(at))); errno != unix.EAFNOSUPPORT {
		t.Errorf("IPv6 for a socket of IPv4: %v", errno)
	}
}

func FuzzSockaddr(f *testing.F) {
	n := Note{Family: unix.AF_INET6}
	f.Add(uint32(unix.AF_INET6), n.Sockaddr(protocol.AddressOf(netip.MustParseAddrPort("[2001:db8::1]:80"))))
	f.Fuzz(func(t *testing.T, family uint32, b []byte) {
		n := Note{Family: family}
		if a, errno := n.ParseSockaddr(b); errno == 0 && !a.IsValid() {
			t.Errorf("%x is %v", b, a)
		}
	})
}

func FuzzOption(f *testing.F) {
	f.Add(unix.SOL_SOCKET, unix.SO_LINGER, []byte{1, 0, 0, 0, 2, 0, 0, 0})
	f.Add(unix.SOL_IP, unix.IP_TOS, []byte{4})
	f.Fuzz(func(t *testing.T, level, name int, b []byte) {
		v, err := ParseOption(level, name, b)
		if err != nil {
			return
		}
		if place, known := OptionAt(level, name); known {
			var n Note
			if _, errno := n.SetOption(place, v); errno == 0 && n.Option(place) != v {
				t.Errorf("set to %d, is %d", v, n.Option(place))
			}
		}
	})
}

// joined gives a program's end and the other one.
func joined(t *testing.T) (program, other int) {
	t.Helper()
	p, err := MakePair()
	testutil.NoError(t, err)
	e := NewEnds()
	defer e.Close()
	other, err = e.Join(t.TempDir(), p.Program)
	testutil.NoError(t, err)
	return p.Program, other
}

// TestPair: the program's end is not writable once it is filled, and whoever has the other end makes
// it so; if that is closed then, the program has ECONNRESET.
func TestPair(t *testing.T) {
	for _, asked := range []int32{0, 4096, 1 << 30} { // by SO_SNDBUF; 0: nothing
		t.Run(fmt.Sprint(asked), func(t *testing.T) { testPair(t, asked) })
	}
}

func testPair(t *testing.T, asked int32) {
	program, other := joined(t)
	if asked > 0 {
		testutil.NoError(t, SetSendBufferTo(program, asked))
	}
	fill, err := Fill(program, true)
	if err != nil || fill < sendBuffer/4 {
		t.Fatalf("%d bytes fill it, %v", fill, err)
	}
	if Writable(program) {
		t.Error("it is writable")
	}
	left := make([]byte, fill-1)
	for len(left) > 0 {
		n, err := unix.Read(other, left)
		testutil.NoError(t, err)
		left = left[n:]
	}
	if !Writable(program) {
		t.Error("it is not writable")
	}
	closeFD(other)
	if _, err := unix.Read(program, make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("read after the end: %v", err)
	}
}

// TestOtherEndIsNobodysElse: a program finds no descriptor in its socket, neither before nor after
// that is connected. One that it has connected itself, to somebody of its own, is not taken.
func TestOtherEndIsNobodysElse(t *testing.T) {
	looks := func(fd int, want unix.Errno) {
		t.Helper()
		_, m, _, _, err := unix.Recvmsg(fd, make([]byte, 8), make([]byte, 64), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		if !errors.Is(err, want) || m > 0 {
			t.Errorf("looks into its socket: %v, %d bytes of descriptors, want %v", err, m, want)
		}
	}
	p, err := MakePair()
	testutil.NoError(t, err)
	defer closeFD(p.Program)
	looks(p.Program, unix.EINVAL) // not connected
	program, other := joined(t)
	looks(program, unix.EAGAIN)
	closeFD(other)

	own, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testutil.NoError(t, err)
	defer closeFD(own)
	at := &unix.SockaddrUnix{Name: filepath.Join(t.TempDir(), "own")}
	testutil.NoError(t, errors.Join(unix.Bind(own, at), unix.Listen(own, 1), unix.Connect(p.Program, at)))
	e := NewEnds()
	defer e.Close()
	if _, err := e.Join(t.TempDir(), p.Program); !errors.Is(err, ErrQueue) {
		t.Errorf("a socket that its program has connected: %v", err)
	}
	// Who comes next gets its own end.
	next, err := MakePair()
	testutil.NoError(t, err)
	defer closeFD(next.Program)
	other, err = e.Join(t.TempDir(), next.Program)
	testutil.NoError(t, err)
	defer closeFD(other)
	testutil.NoError(t, unix.Send(next.Program, []byte("x"), 0))
	if n, err := unix.Read(other, make([]byte, 2)); n != 1 || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// TestBlockingEnd: who has the other end, too, and makes it block keeps no thread.
func TestBlockingEnd(t *testing.T) {
	program, other := joined(t)
	defer closeFD(other)
	testutil.NoError(t, unix.SetNonblock(other, false))
	_, err := unix.Write(program, []byte("bytes"))
	testutil.NoError(t, err)
	done := make(chan bool, 1)
	go func() { done <- Ended(other, make([]byte, 4)) }()
	select {
	case is := <-done:
		if is {
			t.Error("it has ended")
		}
	case <-time.After(10 * time.Second):
		t.Error("who looks whether it has ended is kept")
	}
}
