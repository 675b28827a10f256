package datapath

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// listenTagged has a socket of a family listen at addr, an IPv4 address that this machine need not
// have, with SO_REUSEPORT.
func listenTagged(t *testing.T, d *Datapath, family int, addr netip.AddrPort, tag heddleSockTag) {
	t.Helper()
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	var at unix.Sockaddr = &unix.SockaddrInet4{Port: int(addr.Port()), Addr: addr.Addr().As4()}
	if family == unix.AF_INET6 {
		at = &unix.SockaddrInet6{Port: int(addr.Port()), Addr: addr.Addr().As16()}
	}
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_FREEBIND, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1),
		unix.Bind(fd, at), unix.Listen(fd, 1), d.objs.TagBySock.Put(uint32(fd), &tag))
	if err != nil {
		t.Fatal(err)
	}
}

// ends gives the addresses and ports of an IPv4 frame.
func ends(t *testing.T, b []byte) (src, dst netip.AddrPort) {
	t.Helper()
	if len(b) < 38 || binary.BigEndian.Uint16(b[12:]) != 0x0800 {
		t.Fatalf("no IPv4 frame: % x", b)
	}
	at := func(addr, port int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[addr:])), binary.BigEndian.Uint16(b[port:]))
	}
	return at(26, 34), at(30, 36)
}

// TestRelayRestored: what a relayed connection's client sends brings back the way back that the
// kernel forgot; a RST of the endpoint has all of it forgotten, one of the sender nothing.
func TestRelayRestored(t *testing.T) {
	d := loadForTest(t)
	const ifindex = 1
	y := model.Endpoint{ID: 5, Name: "y", Addrs: []netip.Addr{overlayB}, Planes: intercepted(true)}
	if err := d.SetEndpoint(y, ifindex, ContainerSide{}); err != nil {
		t.Fatal(err)
	}
	run := func(p *ebpf.Program, packet []byte) uint32 {
		t.Helper()
		opts := &ebpf.RunOptions{Data: packet, DataOut: make([]byte, 256), Context: skbContext{Ifindex: ifindex, IngressIfindex: ifindex}}
		verdict, err := p.Run(opts)
		if err != nil {
			t.Fatal(err)
		}
		return verdict
	}
	arrives := func(flags byte) {
		t.Helper()
		if verdict := run(d.objs.FromUnderlay, relayed(overlayA, 40000, 0, flags)); verdict != actRedirect {
			t.Fatalf("flags %#x: verdict %d, want it relayed", flags, verdict)
		}
	}
	remembered := func(when string, flows, back int) {
		t.Helper()
		if f, b := wireEntries[heddleFlow](t, d.objs.FlowByWire), wireEntries[heddleFlowKey](t, d.objs.WireByRelay); f != flows || b != back {
			t.Errorf("%s: %d flows and %d ways back, want %d and %d", when, f, b, flows, back)
		}
	}
	arrives(tcpSYN)
	var key heddleFlowKey
	for _, flags := range []byte{tcpSYN, tcpACK} {
		if it := d.objs.WireByRelay.Iterate(); !it.Next(&key, new(heddleFlowKey)) {
			t.Fatal("no way back is remembered")
		}
		if err := d.objs.WireByRelay.Delete(&key); err != nil {
			t.Fatal(err)
		}
		arrives(flags)
		remembered("restored", 1, 1)
	}
	if n := counters(t, d)[heddleHeddleReasonREASON_RELAY_RESTORED]; n != 2 {
		t.Errorf("relay_restored %d, want 2", n)
	}
	arrives(tcpRST)
	remembered("after a RST of the sender", 1, 1)
	answer := frame(overlayB, overlayA, 40000, tcpRST, nil)
	binary.BigEndian.PutUint16(answer[34:], 80)
	if verdict := run(d.objs.FromEndpoint, answer); verdict != actRedirect {
		t.Errorf("a RST of the endpoint: verdict %d, want it sent on", verdict)
	}
	remembered("after a RST of the endpoint", 0, 0)

	// A container made anew has another device: its connections are gone, a SYN finds it.
	arrives(tcpSYN)
	const anew = 2
	if err := d.SetEndpoint(y, anew, ContainerSide{}); err != nil {
		t.Fatal(err)
	}
	if verdict := run(d.objs.FromUnderlay, relayed(overlayA, 40000, 0, tcpACK)); verdict != actOK {
		t.Errorf("data for a container that is gone: verdict %d, want it left to the node, which refuses it", verdict)
	}
	arrives(tcpSYN)
	var flow heddleFlow
	if it := d.objs.FlowByWire.Iterate(); !it.Next(&key, &flow) || flow.Ifindex != anew {
		t.Errorf("relayed to device %d, want %d", flow.Ifindex, anew)
	}
}

// TestRelayToGroup: where the kernel assigns no packet to a listener that has SO_REUSEPORT, which is
// so of every listener in a test run, direct connections are relayed to the node's own stack, and
// back.
func TestRelayToGroup(t *testing.T) {
	a, b := netip.AddrPortFrom(underlayA, 40000), netip.AddrPortFrom(underlayB, directPort)
	x, y := netip.AddrPortFrom(overlayA, 40000), netip.AddrPortFrom(overlayB, 80)
	for _, tc := range []struct {
		name    string
		version byte // of the SYN option
		flags   heddleSockTagFlags
		family  int
		raw     bool
	}{
		{"IPv4", 1, 0, unix.AF_INET, false},
		{"IPv4, no Ethernet header", 1, 0, unix.AF_INET, true},
		{"IPv6 to a listener on [::]", 2, heddleSockTagFlagsTAG_ANY6, unix.AF_INET6, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := loadForTestAs(t, 0, func(c *Config) { c.relayGroups, c.DivertIfindex, c.UnderlayRaw = true, 77, tc.raw })
			listenTagged(t, d, tc.family, y, heddleSockTag{EndpointId: 5, Flags: uint32(tc.flags)})
			for _, packet := range [][]byte{
				frame(underlayA, underlayB, directPort, tcpSYN, with(option(), 4, tc.version<<4)),
				frame(underlayA, underlayB, directPort, tcpACK, nil),
			} {
				verdict, out, err := d.objs.FromUnderlay.Test(packet)
				if err != nil {
					t.Fatal(err)
				}
				src, dst := ends(t, out)
				if verdict != actRedirect || src != x || dst != y {
					t.Errorf("verdict %d, %s to %s, want it sent on from %s to %s", verdict, src, dst, x, y)
				}
			}
			answer := frame(overlayB, overlayA, 40000, tcpSYN|tcpACK, nil)
			binary.BigEndian.PutUint16(answer[34:], 80)
			verdict, out, err := d.objs.ToOverlay.Test(answer)
			if err != nil {
				t.Fatal(err)
			}
			if src, dst := ends(t, out); verdict != actRedirect || src != b || dst != a {
				t.Errorf("the answer: verdict %d, %s to %s, want it sent on from %s to %s", verdict, src, dst, b, a)
			}
		})
	}
}
