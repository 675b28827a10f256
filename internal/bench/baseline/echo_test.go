package baseline

import (
	"bytes"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"heddle.dev/heddle/internal/netns"
)

// waitTimeout bounds what takes milliseconds on an idle machine.
const waitTimeout = 30 * time.Second

// echoBetween sends more than a packet's worth of bytes from one network namespace to an address in
// another, and back.
func echoBetween(t *testing.T, from, at string, to netip.AddrPort) {
	t.Helper()
	var l net.Listener
	err := netns.Do(at, func() (err error) {
		l, err = net.Listen("tcp4", to.String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return // the client says what went wrong
		}
		defer c.Close()
		_, _ = io.Copy(c, c)
	}()
	var c net.Conn
	err = netns.Do(from, func() (err error) {
		// Within this thread: a dialer's goroutines would be in another namespace.
		c, err = dialHere(to)
		return err
	})
	if err != nil {
		t.Fatalf("%s: %v", to, err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(waitTimeout)); err != nil {
		t.Fatal(err)
	}
	sent, got := bytes.Repeat([]byte("heddle"), 20000), make([]byte, 120000)
	go func() { _, _ = c.Write(sent) }() // what is missing is missed below
	if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(sent, got) {
		t.Errorf("%s: echo of %d bytes: %v", to, len(sent), err)
	}
}

// dialHere connects from the calling thread's network namespace: its socket is made on this thread.
func dialHere(to netip.AddrPort) (net.Conn, error) {
	return net.DialTimeout("tcp4", to.String(), waitTimeout)
}
