package netstack

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// TestBindConflicts: who may bind beside whom is as Linux has it.
func TestBindConflicts(t *testing.T) {
	for _, c := range []struct {
		a      string
		aFlags uint32
		b      string
		bFlags uint32
		want   error
	}{
		{"0.0.0.0:80", 0, "0.0.0.0:80", 0, unix.EADDRINUSE},
		{"0.0.0.0:80", 0, "10.0.0.1:80", 0, unix.EADDRINUSE},
		{"10.0.0.1:80", 0, "127.0.0.1:80", 0, nil},
		{"[::]:80", 0, "0.0.0.0:80", 0, unix.EADDRINUSE},
		{"[::]:80", protocol.V6Only, "0.0.0.0:80", 0, nil},
		{"[::]:80", protocol.V6Only, "[fd00::1]:80", 0, unix.EADDRINUSE},
		{"[fd00::1]:80", 0, "10.0.0.1:80", 0, nil},
		{"[::]:80", 0, "10.0.0.1:80", 0, unix.EADDRINUSE},
		{"0.0.0.0:80", protocol.ReuseAddress, "0.0.0.0:80", protocol.ReuseAddress, nil},
		{"0.0.0.0:80", protocol.ReuseAddress, "0.0.0.0:80", 0, unix.EADDRINUSE},
		{"0.0.0.0:80", protocol.ReusePort, "0.0.0.0:80", protocol.ReusePort, nil},
	} {
		p := newPorts()
		if _, err := p.bind(1, netip.MustParseAddrPort(c.a), c.aFlags); err != nil {
			t.Fatal(err)
		}
		if _, err := p.bind(2, netip.MustParseAddrPort(c.b), c.bFlags); !errors.Is(err, c.want) {
			t.Errorf("%s (%d) after %s (%d): %v, want %v", c.b, c.bFlags, c.a, c.aFlags, err, c.want)
		}
	}
}

// TestListeners: the most exact one takes a SYN, those that share a port have a part of it each, and
// others exclude each other.
func TestListeners(t *testing.T) {
	p := newPorts()
	to, from := netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("10.0.0.9:1")
	bind := func(id uint64, at string, flags uint32) {
		t.Helper()
		if _, err := p.bind(id, netip.MustParseAddrPort(at), flags); err != nil {
			t.Fatal(err)
		}
	}
	want := func(id uint64) {
		t.Helper()
		if got := p.listener(to, from); got != id {
			t.Errorf("listener %d takes it, want %d", got, id)
		}
	}
	bind(1, "[::]:80", protocol.ReusePort)
	bind(2, "10.0.0.1:80", protocol.ReusePort)
	want(0)
	for id, wants := range []uint64{1: 1, 2: 2} {
		if id > 0 {
			if err := p.listen(uint64(id), 80); err != nil {
				t.Fatal(err)
			}
			want(wants)
		}
	}
	bind(3, "10.0.0.1:80", protocol.ReusePort)
	if err := p.listen(3, 80); err != nil {
		t.Fatal(err)
	}
	seen := map[uint64]bool{}
	for port := range uint16(100) {
		seen[p.listener(to, netip.AddrPortFrom(from.Addr(), port))] = true
	}
	if len(seen) != 2 || !seen[2] || !seen[3] {
		t.Errorf("%v take connections, want 2 and 3", seen)
	}
	bind(4, "0.0.0.0:90", protocol.ReuseAddress)
	bind(5, "0.0.0.0:90", protocol.ReuseAddress)
	if err := p.listen(4, 90); err != nil {
		t.Fatal(err)
	}
	if err := p.listen(5, 90); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("a second listener: %v", err)
	}
	p.release(4, 90)
	if err := p.listen(5, 90); err != nil {
		t.Error(err)
	}
}

// TestChosenPorts: one comes again after all others.
func TestChosenPorts(t *testing.T) {
	p := newPorts()
	to := netip.MustParseAddrPort("10.0.0.2:80")
	seen := map[uint16]bool{}
	for range countPorts {
		port, err := p.choose(to, func(uint16) bool { return true })
		if err != nil || seen[port] {
			t.Fatalf("port %d again: %v", port, err)
		}
		seen[port] = true
	}
	if port, err := p.choose(to, func(uint16) bool { return true }); err != nil || !seen[port] {
		t.Errorf("port %d: %v", port, err)
	}
	if _, err := p.choose(to, func(uint16) bool { return false }); !errors.Is(err, unix.EADDRNOTAVAIL) {
		t.Errorf("without a free one: %v", err)
	}
}

// TestBucketSideBySide: what one has reserved is not for another, until it is given back; without a
// rate there is no end of it.
func TestBucketSideBySide(t *testing.T) {
	var b bucket
	begin := time.Now()
	if first, second := b.reserve(begin, 70), b.reserve(begin, 70); first != 70 || second != 70 {
		t.Errorf("%d and %d without a rate", first, second)
	}
	b.set(4000, begin)
	if first, second, third := b.reserve(begin, 70), b.reserve(begin, 70), b.reserve(begin, 70); first != 70 || second != 30 || third != 0 {
		t.Errorf("%d, %d and %d of a burst of 100", first, second, third)
	}
	b.take(-60)
	if again := b.reserve(begin, 70); again != 60 {
		t.Errorf("%d of 60 that were given back", again)
	}
}

// TestBucket: a bucket gives its rate, and who takes more than there is waits for longer.
func TestBucket(t *testing.T) {
	var b bucket
	begin := time.Now()
	b.set(1000, begin)
	got := 0
	for ms := range 2000 {
		n := b.available(begin.Add(time.Duration(ms) * time.Millisecond))
		b.take(n)
		got += n
	}
	if got < 2000 || got > 2050 {
		t.Errorf("%d in two seconds, want 2000 to 2050", got)
	}
	var busy bucket
	busy.set(1_000_000, begin)
	busy.take(25_000)
	// A few units are none.
	for us, some := range map[int]bool{1990: false, 2010: true} {
		if n := busy.available(begin.Add(time.Duration(us) * time.Microsecond)); n > 0 != some {
			t.Errorf("%d after %d us", n, us)
		}
		busy.set(2_000_000, begin) // full again
		busy.set(1_000_000, begin)
		busy.take(25_000)
	}
	b.take(500)
	for ms, some := range map[int]bool{2300: false, 2520: true} {
		if n := b.available(begin.Add(time.Duration(ms) * time.Millisecond)); n > 0 != some {
			t.Errorf("%d after %d ms", n, ms)
		}
	}
}

// FuzzParse: whatever bytes come as a message are a message or an error.
func FuzzParse(f *testing.F) {
	f.Add(protocol.Append(nil, &protocol.Tenant{Head: protocol.Head{Type: protocol.TypeTenant, Tenant: 1}, Generation: 1}), 1)
	f.Add(protocol.Append(nil, &protocol.Connect{Head: protocol.Head{Type: protocol.TypeConnect, Tenant: 1, ID: 1}, Skip: 1}), 1)
	f.Add([]byte{1}, 0)
	f.Fuzz(func(t *testing.T, b []byte, descriptors int) {
		head, body, err := parse(b, descriptors)
		if (err == nil) == (body == nil) {
			t.Errorf("%v, %v", body, err)
		}
		if m, is := body.(*protocol.Tenant); is && err == nil {
			if options, err := checkTenant(m); err == nil && (options.Mask != protocol.SetAll || congestions[options.Congestion] == "") {
				t.Errorf("%+v of %+v", options, head)
			}
		}
	})
}

// FuzzPacket: whatever a device gives is a segment of the tenant's or has a reason to be dropped.
func FuzzPacket(f *testing.F) {
	t := &tenant{own: [2]netip.Addr{netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("fd00:9::1")}}
	ip4 := []byte{0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 10, 9, 0, 2, 10, 9, 0, 1, 0, 1, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 1, 0, 0, 0, 0, 0}
	f.Add(append(make([]byte, vnetSize), ip4...))
	f.Add(append(make([]byte, vnetSize), 0x60, 0, 0, 0, 0, 20, 6, 64))
	f.Fuzz(func(tt *testing.T, frame []byte) {
		for _, ethernet := range []bool{false, true} {
			d := &device{t: t, ethernet: ethernet}
			s, why := d.parse(frame)
			if why == dropNone && (t.isMartian(s.remote.Addr(), s.local.Addr()) || s.local.Port() == 0 || len(s.ip) < 40) {
				tt.Errorf("%+v", s)
			}
		}
	})
}
