package datapath

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/testutil"
)

// besideB is another container of node B.
var besideB = netip.MustParseAddr("10.244.2.3")

// loadForRedirect loads the programs with two containers on node B, neither of them intercepted,
// one of which sends what is tested; and redirects.
func loadForRedirect(t *testing.T, without uint64) *Datapath {
	t.Helper()
	d := loadForTestWithout(t, without)
	prepareRedirect(t, d)
	return d
}

// prepareRedirect is the rest of it, for programs that are loaded.
func prepareRedirect(t *testing.T, d *Datapath) {
	t.Helper()
	node := func(name string, underlay netip.Addr, prefix, mac string) model.Node {
		return model.Node{Name: name, Underlay: underlay, Prefixes: []netip.Prefix{netip.MustParsePrefix(prefix)}, VTEPMAC: mac}
	}
	nodes := []model.Node{node("a", underlayA, "10.244.1.0/24", "02:48:c0:00:02:01"), node("b", underlayB, "10.244.2.0/24", "02:48:c0:00:02:02")}
	if err := d.SetTopology("b", nil, nodes, nil); err != nil {
		t.Fatal(err)
	}
	for id, a := range map[model.EndpointID]netip.Addr{5: overlayB, 6: besideB} {
		if err := d.SetEndpoint(model.Endpoint{ID: id, Name: a.String(), Addrs: []netip.Addr{a}, Planes: intercepted(false)}, 0, ContainerSide{}); err != nil {
			t.Fatal(err)
		}
	}
	setSender(t, d, heddleEndpoint{Addr4: fromAddr(overlayB), Id: 5})
	if err := d.SetPackets(Packets{Redirected: true}); err != nil {
		t.Fatal(err)
	}
}

// setSender says whose device test packets come by, which is none.
func setSender(t *testing.T, d *Datapath, e heddleEndpoint) {
	t.Helper()
	if err := d.objs.EndpointByIfindex.Put(uint32(0), e); err != nil {
		t.Fatal(err)
	}
}

// sends runs a frame through prog and wants this verdict and count; it gives what became of the
// frame.
func sends(t *testing.T, d *Datapath, prog *ebpf.Program, frame []byte, verdict uint32, reason heddleHeddleReason) []byte {
	t.Helper()
	before := counters(t, d)
	got, out, err := prog.Test(frame)
	if err != nil {
		t.Fatal(err)
	}
	if got != verdict {
		t.Errorf("verdict %d, want %d", got, verdict)
	}
	for i, n := range counters(t, d) {
		if (reason != 0 && i == int(reason)) != (n-before[i] == 1) {
			t.Errorf("counter %s rose by %d", names.Reason(i), n-before[i])
		}
	}
	return out
}

// udp is a datagram with room for data.
func udp(src, dst netip.Addr) []byte {
	return ethernet(0x0800, withSum(ipv4(src, dst, 17, 0, append([]byte{0x9c, 0x40, 0, 53, 0, 16, 0, 0}, make([]byte, 8)...))))
}

// withSum gives an IPv4 packet its header's checksum.
func withSum(p []byte) []byte {
	binary.BigEndian.PutUint16(p[10:], 0)
	binary.BigEndian.PutUint16(p[10:], ^headerSum(p))
	return p
}

func headerSum(p []byte) uint16 {
	sum := uint32(0)
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(p[i:]))
	}
	sum = sum&0xffff + sum>>16
	return uint16(sum + sum>>16)
}

// TestRedirectIsARouter: what goes past the stack has the hardware addresses of its next hop, one
// hop less to go and a checksum that is right, whatever the hop limit was; the rest is untouched.
func TestRedirectIsARouter(t *testing.T) {
	d := loadForRedirect(t, 0)
	vtepA, host5 := []byte{2, 0x48, 0xc0, 0, 2, 1}, []byte{2, 0x48, 0x45, 0, 0, 5}
	container5, container6 := []byte{2, 0x48, 0x43, 0, 0, 5}, []byte{2, 0x48, 0x43, 0, 0, 6}
	own6, other6 := overlay6(overlayB), overlay6(overlayA)
	for name, tc := range map[string]struct {
		prog   *ebpf.Program
		frame  []byte
		to     []byte
		reason heddleHeddleReason
	}{
		"to another node":       {d.objs.FromEndpoint, udp(overlayB, overlayA), vtepA, heddleHeddleReasonREASON_REDIRECT_OVERLAY},
		"to another node, TCP":  {d.objs.FromEndpoint, frame(overlayB, overlayA, 80, tcpSYN, nil), vtepA, heddleHeddleReasonREASON_REDIRECT_OVERLAY},
		"to another node, IPv6": {d.objs.FromEndpoint, ethernet(0x86dd, ipv6(own6, other6, 17, make([]byte, 24))), vtepA, heddleHeddleReasonREASON_REDIRECT_OVERLAY},
		"on the node":           {d.objs.FromEndpoint, udp(overlayB, besideB), container6, heddleHeddleReasonREASON_REDIRECT_CONTAINER},
		"from another node":     {d.objs.FromOverlay, udp(overlayA, overlayB), container5, heddleHeddleReasonREASON_REDIRECT_CONTAINER},
		"a later fragment":      {d.objs.FromOverlay, ethernet(0x0800, withSum(ipv4(overlayA, overlayB, 17, 100, make([]byte, 32)))), container5, heddleHeddleReasonREASON_REDIRECT_CONTAINER},
	} {
		t.Run(name, func(t *testing.T) {
			six := tc.frame[12] == 0x86
			hops := 14 + 8
			if six {
				hops = 14 + 7
			}
			for _, limit := range []byte{2, 64, 128, 255} {
				in := bytes.Clone(tc.frame)
				in[hops] = limit
				if !six {
					withSum(in[14:])
				}
				out := sends(t, d, tc.prog, in, actRedirect, tc.reason)
				if !bytes.Equal(out[:6], tc.to) {
					t.Errorf("to %x, want %x", out[:6], tc.to)
				}
				if tc.prog == d.objs.FromOverlay && !bytes.Equal(out[6:12], host5) {
					t.Errorf("from %x, want %x", out[6:12], host5)
				}
				if out[hops] != limit-1 {
					t.Errorf("hop limit %d, want %d", out[hops], limit-1)
				}
				if !six && headerSum(out[14:]) != 0xffff {
					t.Errorf("hop limit %d: header with a wrong checksum: %x", limit, out[14:34])
				}
				out[hops], out[24], out[25] = in[hops], in[24], in[25]
				if !bytes.Equal(out[12:], in[12:]) {
					t.Errorf("other bytes changed: %x, was %x", out[12:], in[12:])
				}
			}
		})
	}
}

// TestRedirectLeavesToTheStack: what a router answers, cuts up or translates, what limits hold, and
// what is none of the overlay's is routed.
func TestRedirectLeavesToTheStack(t *testing.T) {
	d := loadForRedirect(t, 0)
	options := withSum(append([]byte{0x46, 0, 0, 24, 0, 0, 0, 0, 64, 17, 0, 0}, append(append(overlayB.AsSlice(), overlayA.AsSlice()...), 1, 1, 1, 0)...))
	last := udp(overlayB, overlayA)
	last[22] = 1
	icmp := func(src, dst netip.Addr, kind byte, about []byte) []byte {
		return ethernet(0x0800, withSum(ipv4(src, dst, 1, 0, append([]byte{kind, 0, 0, 0, 0, 0, 0, 0}, about...))))
	}
	about := func(src, dst netip.Addr, protocol byte) []byte { return ipv4(src, dst, protocol, 0, make([]byte, 8)) }
	six := func(src, dst netip.Addr, protocol byte) []byte {
		quoted := ipv6(overlay6(dst), overlay6(src), protocol, make([]byte, 8))
		return ethernet(0x86dd, ipv6(overlay6(src), overlay6(dst), 58, append([]byte{1, 4, 0, 0, 0, 0, 0, 0}, quoted...)))
	}
	from, over := d.objs.FromEndpoint, d.objs.FromOverlay
	for name, tc := range map[string]struct {
		prog   *ebpf.Program
		frame  []byte
		reason heddleHeddleReason
	}{
		"options":               {from, ethernet(0x0800, options), heddleHeddleReasonREASON_ROUTE_OPTIONS},
		"hop options, IPv6":     {over, ethernet(0x86dd, ipv6(overlay6(overlayA), overlay6(overlayB), 0, append([]byte{17, 0, 1, 4, 0, 0, 0, 0}, make([]byte, 16)...))), heddleHeddleReasonREASON_ROUTE_OPTIONS},
		"last hop":              {from, withSumAt14(last), heddleHeddleReasonREASON_ROUTE_HOPS},
		"unreachable, TCP":      {from, icmp(overlayB, overlayA, 3, about(overlayA, overlayB, 6)), heddleHeddleReasonREASON_ROUTE_ERROR},
		"unreachable, TCP6":     {from, six(overlayB, overlayA, 6), heddleHeddleReasonREASON_ROUTE_ERROR},
		"time exceeded, comes":  {over, icmp(overlayA, overlayB, 11, about(overlayB, underlayB, 17)), heddleHeddleReasonREASON_ROUTE_ERROR},
		"beyond the overlay":    {from, udp(overlayB, netip.MustParseAddr("198.51.100.1")), 0},
		"to its node":           {from, udp(overlayB, netip.MustParseAddr("10.244.2.1")), 0},
		"to nobody of the node": {from, udp(overlayB, netip.MustParseAddr("10.244.2.99")), 0},
		"from no address":       {from, udp(netip.IPv4Unspecified(), overlayA), 0},
	} {
		t.Run(name, func(t *testing.T) { sends(t, d, tc.prog, tc.frame, actOK, tc.reason) })
	}
	t.Run("echo is no error", func(t *testing.T) {
		sends(t, d, from, icmp(overlayB, overlayA, 8, about(overlayA, overlayB, 6)), actRedirect, heddleHeddleReasonREASON_REDIRECT_OVERLAY)
	})
	t.Run("an error of a datagram's receiver", func(t *testing.T) {
		sends(t, d, from, icmp(overlayB, overlayA, 3, about(overlayA, overlayB, 17)), actRedirect, heddleHeddleReasonREASON_REDIRECT_OVERLAY)
		sends(t, d, over, six(overlayA, overlayB, 17), actRedirect, heddleHeddleReasonREASON_REDIRECT_CONTAINER)
	})
	t.Run("limits", func(t *testing.T) {
		if err := d.SetLimit(6, Limit{Egress: Cap{Rate: 1, Class: 1}}); err != nil {
			t.Fatal(err)
		}
		sends(t, d, from, udp(overlayB, besideB), actOK, heddleHeddleReasonREASON_ROUTE_LIMIT)
		sends(t, d, from, udp(overlayB, overlayA), actRedirect, heddleHeddleReasonREASON_REDIRECT_OVERLAY)
		if err := d.ClearLimit(6); err != nil {
			t.Fatal(err)
		}
		sends(t, d, from, udp(overlayB, besideB), actRedirect, heddleHeddleReasonREASON_REDIRECT_CONTAINER)
	})
	t.Run("translated", func(t *testing.T) {
		pair := heddleAddressPair{Low: fromAddr(overlayB).Word[3], High: fromAddr(overlayA).Word[3]}
		if pair.Low > pair.High {
			pair.Low, pair.High = pair.High, pair.Low
		}
		if err := d.objs.TranslatedPairs.Put(pair, uint32(1)); err != nil {
			t.Fatal(err)
		}
		testutil.NoError(t, d.TakeOver()) // as an agent that starts
		sends(t, d, from, udp(overlayB, overlayA), actOK, heddleHeddleReasonREASON_ROUTE_TRANSLATED)
		sends(t, d, over, udp(overlayA, overlayB), actOK, heddleHeddleReasonREASON_ROUTE_TRANSLATED)
	})
	t.Run("intercepted", func(t *testing.T) {
		setSender(t, d, heddleEndpoint{Addr4: fromAddr(overlayB), Id: 5, Flags: uint32(heddleEndpointFlagsENDPOINT_INTERCEPTED)})
		sends(t, d, from, frame(overlayB, netip.MustParseAddr("10.244.1.9"), 80, tcpSYN, nil), actRedirect, heddleHeddleReasonREASON_REDIRECT_OVERLAY)
		sends(t, d, from, frame(overlayB, besideB, 80, tcpSYN, nil), actOK, heddleHeddleReasonREASON_ROUTE_INTERCEPTED)
	})
	t.Run("a module's", func(t *testing.T) {
		setSender(t, d, heddleEndpoint{Addr4: fromAddr(overlayB), Id: 5, Flags: uint32(heddleEndpointFlagsENDPOINT_STACK)})
		sends(t, d, from, frame(overlayB, netip.MustParseAddr("10.244.1.9"), 80, tcpSYN, nil), actOK, heddleHeddleReasonREASON_ROUTE_INTERCEPTED)
	})
	t.Run("another network's device", func(t *testing.T) {
		setSender(t, d, heddleEndpoint{Addr4: fromAddr(overlayB), Id: 5, Flags: uint32(heddleEndpointFlagsENDPOINT_ADOPTED)})
		sends(t, d, from, udp(overlayB, besideB), actOK, 0)
	})
	t.Run("mode", func(t *testing.T) {
		setSender(t, d, heddleEndpoint{Addr4: fromAddr(overlayB), Id: 5})
		if err := d.SetPackets(Packets{}); err != nil {
			t.Fatal(err)
		}
		sends(t, d, from, udp(overlayB, besideB), actOK, 0)
	})
}

func withSumAt14(frame []byte) []byte {
	withSum(frame[14:])
	return frame
}

// TestRedirectIsGuarded: who forges is dropped where packets are redirected as where they are
// routed. Without the protections the same frames reach their destination.
func TestRedirectIsGuarded(t *testing.T) {
	forged := udp(netip.MustParseAddr("10.244.2.77"), overlayA)
	tunnel := ethernet(0x0800, withSum(ipv4(overlayB, overlayA, 17, 0, vxlan(testVNI, make([]byte, 40)))))
	lie := ethernet(0x0800, withSum(ipv4(overlayB, besideB, 1, 0, append([]byte{3, 4, 0, 0, 0, 0, 2, 64}, ipv4(besideB, overlayA, 17, 0, make([]byte, 8))...))))
	held := loadForRedirect(t, 0)
	sends(t, held, held.objs.FromEndpoint, forged, actShot, heddleHeddleReasonREASON_DROP_SPOOFED_SOURCE)
	sends(t, held, held.objs.FromEndpoint, tunnel, actShot, heddleHeddleReasonREASON_DROP_FORGED_OVERLAY)
	sends(t, held, held.objs.FromEndpoint, lie, actShot, heddleHeddleReasonREASON_DROP_FORGED_ERROR)

	open := loadForRedirect(t, 1<<model.ProtectSource|1<<model.ProtectOverlayPort)
	sends(t, open, open.objs.FromEndpoint, forged, actOK, 0) // not from its own address: routed, as before
	sends(t, open, open.objs.FromEndpoint, tunnel, actRedirect, heddleHeddleReasonREASON_REDIRECT_OVERLAY)
}
