package datapath

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestCutClear: of a node that encrypts, direct connections that are at another address of the node
// than its inner one are ended, and no others; of one that does not, none is.
func TestCutClear(t *testing.T) {
	const inner, outer = "127.0.0.71", "127.0.0.72"
	l, err := net.Listen("tcp", "127.0.0.73:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, encrypts := range []bool{false, true} {
		d := loadForTestAs(t, 0, func(c *Config) { c.Underlay, c.UnderlayRaw = netip.MustParseAddr(inner), encrypts })
		open := func(from string, path heddleHeddlePath, flags heddleSockTagFlags) *net.TCPConn {
			c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			tcp := c.(*net.TCPConn)
			raw, err := tcp.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			tag := heddleSockTag{Path: uint8(path), Flags: uint32(flags)}
			var errPut error
			err = raw.Control(func(fd uintptr) { errPut = d.objs.TagBySock.Put(uint32(fd), &tag) })
			if err := errors.Join(err, errPut); err != nil {
				t.Fatal(err)
			}
			return tcp
		}
		before := open(outer, heddleHeddlePathPATH_DIRECT, 0)
		stay := map[string]*net.TCPConn{
			"encrypted": open(inner, heddleHeddlePathPATH_DIRECT, 0), "on the overlay": open(outer, heddleHeddlePathPATH_OVERLAY, 0),
			"a probe": open(outer, heddleHeddlePathPATH_DIRECT, heddleSockTagFlagsTAG_PROBE),
		}
		want := map[bool]int{true: 1}[encrypts]
		if there, err := d.Clear(); err != nil || there[netip.MustParseAddr("127.0.0.73")] != want {
			t.Errorf("encrypts %v: %v are in the clear (%v), want %d", encrypts, there, err, want)
		}
		if cut, err := d.CutClear(); err != nil || cut != want {
			t.Errorf("encrypts %v: %d ended (%v), want %d", encrypts, cut, err, want)
		}
		if _, err := before.Write([]byte("x")); (err != nil) != encrypts || encrypts && !errors.Is(err, syscall.ECONNABORTED) && !errors.Is(err, unix.EPIPE) {
			t.Errorf("encrypts %v: the connection of before: %v", encrypts, err)
		}
		for what, c := range stay {
			if _, err := c.Write([]byte("x")); err != nil {
				t.Errorf("encrypts %v: the connection that is %s: %v", encrypts, what, err)
			}
		}
	}
}
