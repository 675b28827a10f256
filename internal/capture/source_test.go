package capture

import (
	"errors"
	"net"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

// TestSource captures a connection over lo, in the namespace that the test runs in.
func TestSource(t *testing.T) {
	testutil.NeedRoot(t, "opens a packet socket")
	src, err := Listen(false)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	port := uint16(ln.Addr().(*net.TCPAddr).Port)
	stop := make(chan struct{})
	flags := make(chan uint8, 1000)
	done := make(chan error, 1)
	go func() {
		done <- src.read(stop, func(f frame) {
			if p, err := parse(f.raw); err == nil && (p.src.Port() == port || p.dst.Port() == port) && time.Since(f.at) < time.Minute {
				flags <- p.flags
			}
		})
	}()
	c, err := net.Dial("tcp4", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	var syns, all int
	for fin := false; !fin; {
		select {
		case f := <-flags:
			if all++; f&(flagSYN|flagACK) == flagSYN {
				syns++
			}
			fin = f&flagFIN != 0
		case <-time.After(10 * time.Second):
			t.Fatalf("%d packets, %d SYNs, and no FIN", all, syns)
		}
	}
	close(stop)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if syns != 1 || all < 4 {
		t.Errorf("%d packets, %d SYNs: want a handshake and a FIN, each once", all, syns)
	}
	if _, err := src.Drops(); err != nil {
		t.Error(err)
	}
}

// TestSourceUDP: without all, only TCP is read. What is sent over lo arrives when the kernel comes
// to it, so the test waits for the datagram, or for a connection made after it.
func TestSourceUDP(t *testing.T) {
	testutil.NeedRoot(t, "opens a packet socket")
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for _, all := range []bool{true, false} {
		src, err := Listen(all)
		if err != nil {
			t.Fatal(err)
		}
		conn, err := net.Dial("udp4", "127.0.0.1:9")
		if err != nil {
			t.Fatal(err)
		}
		port := uint16(conn.LocalAddr().(*net.UDPAddr).Port)
		stop, done := make(chan struct{}), make(chan error, 1)
		seen := make(chan uint8, 1000) // protocols
		go func() {
			done <- src.read(stop, func(f frame) {
				if p, err := parse(f.raw); err == nil && (p.src.Port() == port || p.dst.Port() == uint16(ln.Addr().(*net.TCPAddr).Port)) {
					seen <- p.proto
				}
			})
		}()
		if _, err := conn.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		c, err := net.Dial("tcp4", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		want := map[bool]uint8{true: protoUDP, false: protoTCP}[all]
		for got := uint8(0); got != want; {
			select {
			case got = <-seen:
				if got == protoUDP && !all {
					t.Error("UDP was read without all")
				}
			case <-time.After(10 * time.Second):
				t.Fatalf("all %v: no packet of protocol %d", all, want)
			}
		}
		close(stop)
		if err := errors.Join(<-done, c.Close(), conn.Close(), src.Close()); err != nil {
			t.Error(err)
		}
	}
}
