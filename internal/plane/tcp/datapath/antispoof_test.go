package datapath

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/testutil"
)

const (
	testVXLANPort = 4789
	testVNI       = 0x480007
	moreFragments = 0x2000
)

// ethernet puts a header with this type before payload.
func ethernet(kind uint16, payload []byte) []byte {
	b := binary.BigEndian.AppendUint16(make([]byte, 12), kind)
	b = append(b, payload...)
	for len(b) < 64 { // as a device pads it
		b = append(b, 0)
	}
	return b
}

// ipv4 is a packet with this protocol, flags and fragment offset.
func ipv4(src, dst netip.Addr, protocol byte, fragment uint16, payload []byte) []byte {
	b := make([]byte, 20)
	b[0], b[8], b[9] = 0x45, 64, protocol
	binary.BigEndian.PutUint16(b[2:], uint16(20+len(payload)))
	binary.BigEndian.PutUint16(b[6:], fragment)
	copy(b[12:], src.AsSlice())
	copy(b[16:], dst.AsSlice())
	return append(b, payload...)
}

// ipv6 is a packet with this next header.
func ipv6(src, dst netip.Addr, next byte, payload []byte) []byte {
	b := make([]byte, 40)
	b[0], b[6], b[7] = 0x60, next, 64
	binary.BigEndian.PutUint16(b[4:], uint16(len(payload)))
	copy(b[8:], src.AsSlice())
	copy(b[24:], dst.AsSlice())
	return append(b, payload...)
}

// vxlan is a UDP datagram of network vni with this frame inside.
func vxlan(vni uint32, inner []byte) []byte {
	b := make([]byte, 16)
	binary.BigEndian.PutUint16(b[2:], testVXLANPort)
	binary.BigEndian.PutUint16(b[4:], uint16(16+len(inner)))
	b[8] = 8
	binary.BigEndian.PutUint32(b[12:], vni<<8)
	return append(b, inner...)
}

// arp is a request by sender.
func arp(sender netip.Addr) []byte {
	b := []byte{0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1}
	return append(append(b, sender.AsSlice()...), make([]byte, 10)...)
}

// judged is a frame, and what a program must make of it.
type judged struct {
	name   string
	frame  []byte
	reason heddleHeddleReason // 0: the frame passes
}

// judge runs each frame through a program and compares verdict and counts.
func judge(t *testing.T, d *Datapath, prog *ebpf.Program, cases []judged) {
	t.Helper()
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			before := counters(t, d)
			verdict, _, err := prog.Test(tc.frame)
			if err != nil {
				t.Fatal(err)
			}
			want := uint32(actOK)
			if tc.reason != 0 {
				want = actShot
			}
			if verdict != want {
				t.Errorf("verdict %d, want %d", verdict, want)
			}
			for i, n := range counters(t, d) {
				rose := n - before[i]
				if (tc.reason != 0 && i == int(tc.reason)) != (rose == 1) {
					t.Errorf("counter %s rose by %d", names.Reason(i), rose)
				}
			}
		})
	}
}

// TestOverlayGuard sends what calls itself VXLAN through the program of the underlay device.
func TestOverlayGuard(t *testing.T) {
	d := loadForTest(t)
	stranger := netip.MustParseAddr("192.0.2.9")
	inner6 := func(a netip.Addr) netip.Addr { return model.Overlay6(d.cfg.Prefix6, a) }
	inside := ethernet(0x0800, ipv4(overlayA, overlayB, 6, 0, make([]byte, 20)))
	from := func(src netip.Addr, vni uint32, inner []byte) []byte {
		return ethernet(0x0800, ipv4(src, underlayB, 17, 0, vxlan(vni, inner)))
	}
	whole := vxlan(testVNI, inside)
	const stranged, source = heddleHeddleReasonREASON_DROP_OVERLAY_STRANGER, heddleHeddleReasonREASON_DROP_OVERLAY_SOURCE
	judge(t, d, d.objs.FromUnderlay, []judged{
		{"a node's container", from(underlayA, testVNI, inside), 0},
		{"a node's container, IPv6", from(underlayA, testVNI, ethernet(0x86dd, ipv6(inner6(overlayA), inner6(overlayB), 6, make([]byte, 20)))), 0},
		{"the node itself", from(underlayA, testVNI, ethernet(0x0800, ipv4(underlayA, overlayB, 6, 0, make([]byte, 20)))), 0},
		{"a stranger", from(stranger, testVNI, inside), stranged},
		{"another network's", from(stranger, testVNI+1, inside), 0},
		{"not for this node", ethernet(0x0800, ipv4(stranger, underlayA, 17, 0, whole)), 0},
		{"source of another node", from(underlayA, testVNI, ethernet(0x0800, ipv4(overlayB, overlayB, 6, 0, make([]byte, 20)))), source},
		{"source of another node, IPv6", from(underlayA, testVNI, ethernet(0x86dd, ipv6(inner6(overlayB), inner6(overlayB), 6, make([]byte, 20)))), source},
		{"source outside the overlay", from(underlayA, testVNI, ethernet(0x0800, ipv4(stranger, overlayB, 6, 0, make([]byte, 20)))), source},
		{"source outside the overlay, IPv6", from(underlayA, testVNI, ethernet(0x86dd, ipv6(netip.MustParseAddr("fe80::1"), inner6(overlayB), 58, make([]byte, 20)))), source},
		{"ARP", from(underlayA, testVNI, ethernet(0x0806, arp(overlayA))), source},
		{"VLAN", from(underlayA, testVNI, ethernet(0x8100, append([]byte{0, 0, 8, 0}, inside[14:]...))), source},
		{"first fragment that shows its source", ethernet(0x0800, ipv4(underlayA, underlayB, 17, moreFragments, whole[:16+14+40])), 0},
		{"first fragment of a stranger", ethernet(0x0800, ipv4(stranger, underlayB, 17, moreFragments, whole[:16+14+40])), stranged},
		{"first fragment that hides its source", ethernet(0x0800, append(ipv4(underlayA, underlayB, 17, moreFragments, whole[:16]), inside...)), source},
		{"later fragment", ethernet(0x0800, ipv4(stranger, underlayB, 17, 100, whole)), 0},
		{"other UDP", ethernet(0x0800, ipv4(stranger, underlayB, 17, 0, make([]byte, 40))), 0},
	})
}

// TestFrameGuard sends frames of a container through the program of its device.
func TestFrameGuard(t *testing.T) {
	d := loadForTest(t)
	own := heddleEndpoint{Addr4: fromAddr(overlayB), Id: 5}
	if err := d.objs.EndpointByIfindex.Put(uint32(0), own); err != nil { // test packets come in by no device
		t.Fatal(err)
	}
	outside, own6 := netip.MustParseAddr("198.51.100.1"), model.Overlay6(d.cfg.Prefix6, overlayB)
	syn := frame(overlayB, outside, 80, tcpSYN, nil)[14:]
	direct := frame(overlayB, underlayA, directPort, tcpSYN, nil)[34:]
	linkLocal, router := netip.MustParseAddr("fe80::48:43ff:fe00:5"), netip.MustParseAddr("fe80::1")
	const hidden, notIP, spoofed = heddleHeddleReasonREASON_DROP_HIDDEN_TCP, heddleHeddleReasonREASON_DROP_NOT_IP, heddleHeddleReasonREASON_DROP_SPOOFED_SOURCE
	next := func(b byte) []byte { return append([]byte{b}, make([]byte, 27)...) }
	judge(t, d, d.objs.FromEndpoint, []judged{
		{"TCP", ethernet(0x0800, syn), 0},
		{"UDP fragment", ethernet(0x0800, ipv4(overlayB, outside, 17, moreFragments, make([]byte, 8))), 0},
		{"TCP fragment with its header", ethernet(0x0800, ipv4(overlayB, outside, 6, moreFragments, make([]byte, 24))), 0},
		{"TCP fragment without", ethernet(0x0800, ipv4(overlayB, underlayA, 6, moreFragments, direct[:8])), hidden},
		{"TCP fragment that pretends to show more", ethernet(0x0800, append(ipv4(overlayB, underlayA, 6, moreFragments, direct[:8]), make([]byte, 40)...)), hidden},
		{"TCP fragment with its options", ethernet(0x0800, ipv4(overlayB, outside, 6, moreFragments, frame(overlayB, outside, 80, tcpSYN, make([]byte, 16))[34:])), 0},
		{"TCP fragment without its options", ethernet(0x0800, ipv4(overlayB, outside, 6, moreFragments, frame(overlayB, outside, 80, tcpSYN, make([]byte, 16))[34:58])), hidden},
		{"later TCP fragment", ethernet(0x0800, ipv4(overlayB, outside, 6, 3, make([]byte, 8))), 0},
		{"ARP, own address", ethernet(0x0806, arp(overlayB)), 0},
		{"ARP probe", ethernet(0x0806, arp(netip.IPv4Unspecified())), 0},
		{"ARP, gateway's address", ethernet(0x0806, arp(netip.MustParseAddr("10.244.2.1"))), spoofed},
		{"behind two VLAN tags", ethernet(0x88a8, append([]byte{0, 0, 0x81, 0, 0, 0, 8, 0}, syn...)), notIP},
		{"other protocol", ethernet(0x8847, syn), notIP},
		{"IPv6 TCP", ethernet(0x86dd, ipv6(own6, router, 6, make([]byte, 20))), 0},
		{"IPv6 multicast listener report", ethernet(0x86dd, ipv6(linkLocal, router, 0, append(next(58)[:8], 143, 0, 0, 0))), 0},
		{"IPv6 UDP fragment", ethernet(0x86dd, ipv6(own6, router, 44, next(17))), 0},
		{"IPv6 SCTP fragment", ethernet(0x86dd, ipv6(own6, router, 44, next(132))), 0},
		{"IPv6 fragment of options", ethernet(0x86dd, ipv6(own6, router, 44, next(60))), hidden},
		{"IPv6 TCP fragment", ethernet(0x86dd, ipv6(own6, router, 44, next(6))), hidden},
		{"IPv6 TCP behind options", ethernet(0x86dd, ipv6(own6, router, 60, next(6))), hidden},
		{"IPv6 TCP behind hop options", ethernet(0x86dd, ipv6(own6, router, 0, next(6))), hidden},
		{"IPv6 routing header", ethernet(0x86dd, ipv6(own6, router, 43, next(6))), hidden},
		{"IPv6, somebody's link-local address", ethernet(0x86dd, ipv6(router, linkLocal, 58, make([]byte, 24))), spoofed},
		{"IPv6, address of no overlay", ethernet(0x86dd, ipv6(netip.MustParseAddr("2001:db8::1"), own6, 17, make([]byte, 24))), spoofed},
	})
	if err := d.objs.EndpointByIfindex.Delete(uint32(0)); err != nil {
		t.Fatal(err)
	}
	groups := append(next(58)[:8], 143, 0, 0, 0)
	judge(t, d, d.objs.FromEndpoint, []judged{
		{"a container nobody knows", ethernet(0x0800, syn), spoofed},
		{"a container nobody knows yet, about its groups", ethernet(0x86dd, ipv6(netip.IPv6Unspecified(), netip.MustParseAddr("ff02::16"), 0, groups)), heddleHeddleReasonREASON_DROP_EARLY},
		{"a container nobody knows, its link-local address", ethernet(0x86dd, ipv6(linkLocal, netip.MustParseAddr("ff02::16"), 0, groups)), spoofed},
	})
}

// TestMasqueradeGuard gives the program of an endpoint's device what would look like the node's
// own, once it is masqueraded: the overlay's and the SYNs of direct connections. It passes to
// nobody, whether this node knows of a node there or not.
func TestMasqueradeGuard(t *testing.T) {
	d := loadForTest(t)
	if err := d.objs.EndpointByIfindex.Put(uint32(0), heddleEndpoint{Addr4: fromAddr(overlayB), Id: 5}); err != nil {
		t.Fatal(err)
	}
	stranger, own6, stranger6 := netip.MustParseAddr("198.51.100.1"), overlay6(overlayB), netip.MustParseAddr("2001:db8::1")
	packet := vxlan(testVNI, ethernet(0x0800, ipv4(overlayA, overlayB, 17, 0, nil)))
	other := append([]byte{0, 0, 0x12, 0xb4}, packet[4:]...) // port 4788
	options := ethernet(0x0800, ipv4(overlayB, stranger, 17, 0, nil))
	options[14], options[17] = 0x47, 28+byte(len(packet))
	fragment := func(offset byte) []byte { return append([]byte{17, 0, 0, offset | 1, 0, 0, 0, 0}, packet...) }
	const overlay, direct = heddleHeddleReasonREASON_DROP_FORGED_OVERLAY, heddleHeddleReasonREASON_DROP_FORGED_DIRECT
	judge(t, d, d.objs.FromEndpoint, []judged{
		{"VXLAN to a node", ethernet(0x0800, ipv4(overlayB, underlayA, 17, 0, packet)), overlay},
		{"VXLAN to an address of nobody's", ethernet(0x0800, ipv4(overlayB, stranger, 17, 0, packet)), overlay},
		{"VXLAN to a container", ethernet(0x0800, ipv4(overlayB, overlayA, 17, 0, packet)), overlay},
		{"VXLAN, first fragment", ethernet(0x0800, ipv4(overlayB, stranger, 17, moreFragments, packet[:8])), overlay},
		{"VXLAN, later fragment", ethernet(0x0800, ipv4(overlayB, stranger, 17, 2, packet)), 0},
		{"VXLAN behind IP options", append(append(options[:34:34], 1, 1, 1, 1, 1, 1, 1, 0), packet...), overlay},
		{"VXLAN, IPv6", ethernet(0x86dd, ipv6(own6, stranger6, 17, packet)), overlay},
		{"VXLAN, IPv6, first fragment", ethernet(0x86dd, ipv6(own6, stranger6, 44, fragment(0))), overlay},
		{"VXLAN, IPv6, later fragment", ethernet(0x86dd, ipv6(own6, stranger6, 44, fragment(8))), 0},
		{"other port", ethernet(0x0800, ipv4(overlayB, stranger, 17, 0, other)), 0},
		{"other port, IPv6", ethernet(0x86dd, ipv6(own6, stranger6, 17, other)), 0},
		{"SYN option to a node", frame(overlayB, underlayA, 80, tcpSYN, option()), direct},
		{"SYN option to an address of nobody's", frame(overlayB, stranger, directPort, tcpSYN, option()), direct},
		{"SYN option of another length", frame(overlayB, stranger, directPort, tcpSYN, append([]byte{253, 20}, append(option()[2:], 0, 0, 0, 0)...)), direct},
		{"SYN without option", frame(overlayB, stranger, directPort, tcpSYN, nil), 0},
		{"SYN with somebody's experiment", frame(overlayB, stranger, directPort, tcpSYN, []byte{253, 4, 1, 2}), 0},
	})
}

// TestErrorGuard gives the program of an endpoint's device ICMP messages: errors must be about
// packets that were sent to the container.
func TestErrorGuard(t *testing.T) {
	d := loadForTest(t)
	if err := d.objs.EndpointByIfindex.Put(uint32(0), heddleEndpoint{Addr4: fromAddr(overlayB), Id: 5}); err != nil {
		t.Fatal(err)
	}
	outside, other := netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("2001:db8::1")
	own6, linkLocal := model.Overlay6(d.cfg.Prefix6, overlayB), netip.MustParseAddr("fe80::48:43ff:fe00:5")
	icmp := func(kind byte, about []byte) []byte { return append([]byte{kind, 4, 0, 0, 0, 0, 0, 0}, about...) }
	error4 := func(kind byte, flags uint16, to netip.Addr) []byte {
		return ethernet(0x0800, ipv4(overlayB, outside, 1, flags, icmp(kind, ipv4(outside, to, 17, 0, make([]byte, 8)))))
	}
	error6 := func(kind byte, from, to netip.Addr) []byte {
		return ethernet(0x86dd, ipv6(from, other, 58, icmp(kind, ipv6(other, to, 17, make([]byte, 8)))))
	}
	behind := func(next, head byte, kind byte) []byte {
		return ethernet(0x86dd, ipv6(own6, other, next, append([]byte{58, head, 0, 0, 0, 0, 0, 0}, icmp(kind, ipv6(other, own6, 17, nil))...)))
	}
	const forged = heddleHeddleReasonREASON_DROP_FORGED_ERROR
	judge(t, d, d.objs.FromEndpoint, []judged{
		{"port unreachable", error4(3, 0, overlayB), 0},
		{"too big, of another's packet", error4(3, 0, overlayA), forged},
		{"redirect of another's packet", error4(5, 0, outside), forged},
		{"hops exceeded, of another's packet", error4(11, 0, overlayA), forged},
		{"in fragments", error4(3, moreFragments, overlayB), forged},
		{"about nothing", ethernet(0x0800, ipv4(overlayB, outside, 1, 0, icmp(3, nil))), forged},
		{"echo", error4(8, 0, overlayA), 0},
		{"echo in fragments", error4(8, moreFragments, overlayA), 0},
		{"IPv6 port unreachable", error6(1, own6, own6), 0},
		{"IPv6 too big, of another's packet", error6(2, own6, overlay6(overlayA)), forged},
		{"IPv6 error about a packet to the device's address", error6(1, linkLocal, linkLocal), 0},
		{"IPv6 error about nothing", ethernet(0x86dd, ipv6(own6, other, 58, icmp(1, nil))), forged},
		{"IPv6 echo", error6(128, own6, other), 0},
		{"IPv6 error behind hop options", behind(0, 0, 2), forged},
		{"IPv6 error in fragments", behind(44, 0, 2), forged},
		{"IPv6 echo in fragments", behind(44, 0, 128), 0},
	})
}

// FuzzUnderlay feeds arbitrary frames to the program of the underlay device.
func FuzzUnderlay(f *testing.F) {
	testutil.NeedRoot(f, "loads BPF programs")
	f.Add(ethernet(0x0800, ipv4(underlayA, underlayB, 17, 0, vxlan(testVNI, ethernet(0x0800, ipv4(overlayA, overlayB, 6, 0, nil))))))
	f.Add(ethernet(0x0800, ipv4(underlayA, underlayB, 17, moreFragments, vxlan(testVNI, nil))))
	f.Add(ethernet(0x8100, []byte{0, 0, 0x81, 0, 0, 0, 8, 0}))
	d := loadForTest(f)
	f.Fuzz(func(t *testing.T, frame []byte) { fuzzFrame(t, d.objs.FromUnderlay, frame) })
}

// FuzzEndpoint feeds arbitrary frames to the program of an endpoint's device.
func FuzzEndpoint(f *testing.F) {
	testutil.NeedRoot(f, "loads BPF programs")
	f.Add(ethernet(0x0806, arp(overlayB)))
	f.Add(ethernet(0x86dd, ipv6(overlay6(overlayB), overlay6(overlayA), 44, []byte{6, 0, 0, 0})))
	f.Add(frame(overlayB, underlayA, directPort, tcpSYN, option()))
	d := loadForTest(f)
	if err := d.objs.EndpointByIfindex.Put(uint32(0), heddleEndpoint{Addr4: fromAddr(overlayB), Id: 5}); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, frame []byte) { fuzzFrame(t, d.objs.FromEndpoint, frame) })
}

func overlay6(a netip.Addr) netip.Addr {
	return model.Overlay6(netip.MustParsePrefix("fd48:6464:1::/96"), a)
}

func fuzzFrame(t *testing.T, prog *ebpf.Program, frame []byte) {
	if len(frame) < 64 || len(frame) > 1500 {
		return
	}
	verdict, _, err := prog.Test(frame)
	if err != nil {
		t.Fatal(err)
	}
	if verdict != actOK && verdict != actShot {
		t.Errorf("verdict %d", verdict)
	}
}
