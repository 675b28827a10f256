package netstack

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/testutil"
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

// TestBusy: packets that never end leave others the processor, though no call of theirs is seen by
// Go's scheduler.
func TestBusy(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	own, agent := pairOf(t, unix.SOCK_STREAM)
	defer unix.Close(own)
	conn := fileOf(t, agent)
	// It ends when all threads wait, Go's monitor as well, which naps while there is anything to do.
	idle := exec.CommandContext(t.Context(), "sh", "-c", "while grep -q nanosleep /proc/$PPID/task/*/wchan; do :; done")
	out, err := idle.StdoutPipe()
	testutil.NoError(t, err)
	raw, err := out.(*os.File).SyscallConn()
	testutil.NoError(t, err)
	testutil.NoError(t, idle.Start())
	var heard atomic.Bool
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		again := false // it waits once, without a call that Go's scheduler sees
		_ = raw.Read(func(uintptr) bool { was := again; again = true; return was })
		_, _ = send(own, []byte{1}) // if it is lost nothing is heard
		tn := &tenant{}
		for begin := time.Now(); !heard.Load(); tn.gate() {
			if time.Since(begin) > testutil.WaitTimeout/4 {
				t.Error("the agent was not heard")
				return
			}
		}
	}()
	_, err = conn.Read(make([]byte, 1))
	heard.Store(true)
	<-ended
	testutil.NoError(t, errors.Join(err, idle.Wait()))
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
			link := min(d.headers(), len(frame))
			s, why := d.parse(frame[:link], frame[link:])
			if why == dropNone && (t.isMartian(s.remote.Addr(), s.local.Addr()) || s.local.Port() == 0 || s.headers < 40 || s.headers > len(s.ip)) {
				tt.Errorf("%+v", s)
			}
		}
	})
}

// keeper is netstack that keeps what it gets.
type keeper struct{ got []*stack.PacketBuffer }

func (k *keeper) DeliverNetworkPacket(_ tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	k.got = append(k.got, pkt.IncRef())
}

func (k *keeper) DeliverLinkPacket(tcpip.NetworkProtocolNumber, *stack.PacketBuffer) {}

// TestPacketsStay: what came stays as it is while more comes, whatever its size; headers lie in a
// piece of memory of their own.
func TestPacketsStay(t *testing.T) {
	one, two := pairOf(t, unix.SOCK_SEQPACKET)
	defer unix.Close(two)
	own := netip.MustParseAddr("10.9.0.1")
	tn := &tenant{own: [2]netip.Addr{own}}
	d, err := newDevice(tn, &protocol.Tenant{MTU: 1500}, one)
	testutil.NoError(t, err)
	k := &keeper{}
	d.Attach(k)
	random := rand.NewChaCha8([32]byte{})
	var sent [][]byte
	ran := make(chan error)
	go func() { ran <- d.run() }()
	for _, size := range []int{0, 1, 1000, 40_000, 10, packetMax - 40, 33_000} {
		frame := make([]byte, vnetSize+40+size)
		_, err := random.Read(frame[vnetSize+40:])
		testutil.NoError(t, err)
		frame[0] = vnetDataValid
		ip := header.IPv4(frame[vnetSize:])
		ip.Encode(&header.IPv4Fields{
			TotalLength: uint16(40 + size), TTL: 64, Protocol: uint8(header.TCPProtocolNumber),
			SrcAddr: toAddress(netip.MustParseAddr("10.9.0.2")), DstAddr: toAddress(own),
		})
		ip.SetChecksum(^ip.CalculateChecksum())
		header.TCP(ip.Payload()).Encode(&header.TCPFields{SrcPort: 1, DstPort: 2, Flags: header.TCPFlagAck, DataOffset: 20})
		_, err = unix.Write(two, frame)
		testutil.NoError(t, err)
		sent = append(sent, ip)
	}
	testutil.EventuallyTrue(t, "all packets come", func() bool { return d.received.Load() == uint64(len(sent)) })
	testutil.NoError(t, d.file.Close())
	<-ran
	for i, pkt := range k.got {
		parts := pkt.AsSlices()
		if !bytes.Equal(bytes.Join(parts, nil), sent[i]) || len(parts[0]) != 40 {
			t.Errorf("packet %d of %d bytes is another, or its headers have %d", i, len(sent[i]), len(parts[0]))
		}
	}
}
