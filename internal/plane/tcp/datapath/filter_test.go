package datapath

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

const (
	undecidable = "undecidable"
	allowed     = "allow"
	tcpRST      = 0x04
)

// loadFilter is loadForTest with the endpoint of the test packets' device.
func loadFilter(t testing.TB) *Datapath {
	d := loadForTest(t)
	own := heddleEndpoint{Addr4: fromAddr(overlayB), Id: 5}
	if err := d.objs.EndpointByIfindex.Put(uint32(0), own); err != nil { // test packets come in by no device
		t.Fatal(err)
	}
	return d
}

// filtered runs a frame through a program and gives what policy made of it, by what was counted.
func filtered(t testing.TB, d *Datapath, prog *ebpf.Program, frame []byte) string {
	t.Helper()
	verdict, _ := filteredBy(t, d, prog, frame, 0)
	return verdict
}

// filteredBy is filtered for a frame that came in by a device, and gives the packet's mark as well.
func filteredBy(t testing.TB, d *Datapath, prog *ebpf.Program, frame []byte, ifindex uint32) (verdict string, mark uint32) {
	t.Helper()
	reasons := []uint32{
		uint32(heddleHeddleReasonREASON_DROP_POLICY_REJECTED), uint32(heddleHeddleReasonREASON_DROP_POLICY_DROPPED),
		uint32(heddleHeddleReasonREASON_DROP_UNDECIDABLE),
	}
	before := counts(t, d, reasons)
	var out skbContext
	action, err := prog.Run(&ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+64), Context: skbContext{IngressIfindex: ifindex}, ContextOut: &out})
	if err != nil {
		t.Fatal(err)
	}
	after := counts(t, d, reasons)
	for i, name := range []string{model.VerdictReject.String(), model.VerdictDrop.String(), undecidable} {
		if after[i] != before[i] {
			if dropped := action == actShot; dropped != (name != model.VerdictReject.String()) {
				t.Errorf("%s: action %d", name, action)
			}
			return name, out.Mark
		}
	}
	if action != actOK {
		t.Errorf("action %d, and nothing counted", action)
	}
	return allowed, out.Mark
}

// ip is a packet of the addresses' family.
func ip(src, dst netip.Addr, protocol byte, payload []byte) []byte {
	if src.Is4() {
		return ethernet(0x0800, ipv4(src, dst, protocol, 0, payload))
	}
	if protocol == 1 {
		protocol = 58
	}
	return ethernet(0x86dd, ipv6(src, dst, protocol, payload))
}

// segment and datagram are headers with these ports.
func segment(sport, dport uint16, flags byte) []byte {
	b := make([]byte, 20)
	binary.BigEndian.PutUint16(b, sport)
	binary.BigEndian.PutUint16(b[2:], dport)
	b[12], b[13] = 5<<4, flags
	return b
}

func datagram(sport, dport uint16) []byte {
	b := make([]byte, 16)
	binary.BigEndian.PutUint16(b, sport)
	binary.BigEndian.PutUint16(b[2:], dport)
	binary.BigEndian.PutUint16(b[4:], 16)
	return b
}

func icmp(kind byte, id uint16, about []byte) []byte {
	b := []byte{kind, 0, 0, 0, byte(id >> 8), byte(id), 0, 1}
	return append(b, about...)
}

// forget empties what the programs remember.
func forget(t testing.TB, d *Datapath) {
	t.Helper()
	all := func(*heddleFlowSetKey, *heddleFlowSet) bool { return true }
	if err := deleteWhere(d.objs.OpenersByOwner, all); err != nil {
		t.Fatal(err)
	}
	if err := deleteWhere(d.objs.DatagramsByOwner, all); err != nil {
		t.Fatal(err)
	}
}

func apply(t testing.TB, d *Datapath, tables model.PolicyTables) {
	t.Helper()
	if err := d.ApplyPolicy(model.PolicyChange{Reset: true, Set: tables}); err != nil {
		t.Fatal(err)
	}
}

// twoWays are tables for the places a and b (in both families): what a may open to b, and b to a.
func twoWays(a, b netip.Addr, there, back model.PairVerdict) model.PolicyTables {
	prefix := netip.MustParsePrefix("fd48:6464:1::/96")
	return model.PolicyTables{
		ByAddr: map[netip.Addr]model.ClassInfo{
			a: {Class: 1}, model.Overlay6(prefix, a): {Class: 1}, b: {Class: 2}, model.Overlay6(prefix, b): {Class: 2},
		},
		Pairs: map[model.ClassPair]model.PairVerdict{{From: 1, To: 2}: there, {From: 2, To: 1}: back},
	}
}

// only forbids all but one port of a protocol.
func only(v model.Verdict, protocol model.Protocol, port uint16) model.PairVerdict {
	last := port
	if !protocol.HasPorts() {
		last = 65535
	}
	return model.PairVerdict{Default: v, Ports: []model.PortVerdict{{Protocol: protocol, First: port, Last: last, Verdict: model.VerdictAllow}}}
}

// TestFilter compares what the programs of the devices make of packets that begin something with
// the definition of the tables, over random tables, protocols and ports.
func TestFilter(t *testing.T) {
	d := loadFilter(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 40 {
		tables := randomTables(r)
		for v6 := range 2 {
			tables.ByAddr[policyPlace(2, 2, v6 == 1)] = model.ClassInfo{Class: 1, Egress: model.Verdict(r.IntN(3)), Ingress: model.Verdict(r.IntN(3))}
		}
		apply(t, d, tables)
		for range 60 {
			v6 := r.IntN(2) == 0
			own, other := policyPlace(2, 2, v6), policyPlace(1, 1+r.IntN(7), v6)
			from, to := other, own
			name, prog := "from_overlay", d.objs.FromOverlay
			switch r.IntN(3) {
			case 0:
				name, prog = "to_endpoint", d.objs.ToEndpoint
			case 1:
				name, prog, from, to = "from_endpoint", d.objs.FromEndpoint, own, other
			}
			port := uint16(1 + r.IntN(200))
			protocol, number, payload := model.ProtocolOther, byte(47), make([]byte, 20)
			switch r.IntN(4) {
			case 0:
				protocol, number, payload = model.ProtocolTCP, 6, segment(40000, port, tcpSYN)
			case 1:
				protocol, number, payload = model.ProtocolUDP, 17, datagram(40000, port)
			case 2:
				protocol, number, payload, port = model.ProtocolICMP, 1, icmp(8, 7, nil), 0
				if v6 {
					payload[0] = 128
				}
			default:
				port = 0
			}
			want := evaluate(&tables, from, to, protocol, port).String()
			forget(t, d)
			if got := filtered(t, d, prog, ip(from, to, number, payload)); got != want {
				t.Fatalf("%s: protocol %d from %s to %s port %d: %s, want %s\n%+v", name, protocol, from, to, port, got, want, tables)
			}
		}
	}
}

// step is a packet and what becomes of it.
type step struct {
	name  string
	prog  *ebpf.Program
	frame []byte
	want  string
}

func follow(t *testing.T, d *Datapath, steps []step) {
	t.Helper()
	for _, s := range steps {
		if got := filtered(t, d, s.prog, s.frame); got != s.want {
			t.Errorf("%s: %s, want %s", s.name, got, s.want)
		}
	}
}

// TestFilterAnswers checks that answers to what is allowed pass, errors about it too, and nothing
// else.
func TestFilterAnswers(t *testing.T) {
	const drop, reject = "drop", "reject"
	for _, v6 := range []bool{false, true} {
		d := loadFilter(t)
		own, peer, other := policyPlace(2, 2, v6), policyPlace(1, 2, v6), policyPlace(1, 3, v6)
		out, in := d.objs.FromEndpoint, d.objs.FromOverlay
		request, reply, unreachable := byte(8), byte(0), byte(3)
		inner := func(src, dst netip.Addr, protocol byte, payload []byte) []byte {
			return ip(src, dst, protocol, payload)[14:]
		}
		if v6 {
			request, reply, unreachable = 128, 129, 1
		}
		udp := only(model.VerdictReject, model.ProtocolUDP, 53)
		udp.Ports = append([]model.PortVerdict{{Protocol: model.ProtocolICMP, Last: 65535, Verdict: model.VerdictAllow}}, udp.Ports...)
		apply(t, d, twoWays(policyPlace(2, 2, false), policyPlace(1, 2, false), udp, model.PairVerdict{Default: model.VerdictDrop}))
		follow(t, d, []step{
			{"an answer to nothing", in, ip(peer, own, 17, datagram(53, 4000)), drop},
			{"request", out, ip(own, peer, 17, datagram(4000, 53)), allowed},
			{"answer", in, ip(peer, own, 17, datagram(53, 4000)), allowed},
			{"answer to another port", in, ip(peer, own, 17, datagram(53, 4001)), drop},
			{"answer from another port", in, ip(peer, own, 17, datagram(54, 4000)), drop},
			{"forbidden request", out, ip(own, peer, 17, datagram(4000, 54)), reject},
			{"answer to it", in, ip(peer, own, 17, datagram(54, 4000)), drop},
			{"echo", out, ip(own, peer, 1, icmp(request, 7, nil)), allowed},
			{"echo reply", in, ip(peer, own, 1, icmp(reply, 7, nil)), allowed},
			{"another echo reply", in, ip(peer, own, 1, icmp(reply, 8, nil)), drop},
			{"echo of the other side", in, ip(peer, own, 1, icmp(request, 9, nil)), drop},
			{"error about what is allowed", in, ip(peer, own, 1, icmp(unreachable, 0, inner(own, peer, 17, datagram(4000, 53)))), allowed},
			{"error about what is not", in, ip(peer, own, 1, icmp(unreachable, 0, inner(own, peer, 17, datagram(4000, 54)))), drop},
			{"error about somebody else's", in, ip(peer, own, 1, icmp(unreachable, 0, inner(other, peer, 17, datagram(4000, 53)))), drop},
			{"error without a packet", in, ip(peer, own, 1, icmp(unreachable, 0, nil)), drop},
		})
		// The same error from the container. About a packet that went to another address it is a
		// forgery: TestErrorGuard.
		apply(t, d, twoWays(policyPlace(1, 2, false), policyPlace(2, 2, false), udp, model.PairVerdict{Default: model.VerdictDrop}))
		follow(t, d, []step{
			{"own error about an allowed packet", out, ip(own, peer, 1, icmp(unreachable, 0, inner(peer, own, 17, datagram(4000, 53)))), allowed},
		})
		// What was allowed is not any more: its answers neither.
		apply(t, d, twoWays(policyPlace(2, 2, false), policyPlace(1, 2, false), model.PairVerdict{Default: model.VerdictReject}, model.PairVerdict{Default: model.VerdictDrop}))
		follow(t, d, []step{{"answer after a change", in, ip(peer, own, 17, datagram(53, 4000)), drop}})
	}
}

// TestFilterConnections checks that TCP follows its SYN: both directions pass while the SYN would,
// and none after, whatever ports they have.
func TestFilterConnections(t *testing.T) {
	const drop, reject = "drop", "reject"
	for _, v6 := range []bool{false, true} {
		for _, ports := range [][2]uint16{{40000, 80}, {80, 40000}} {
			t.Run(fmt.Sprint(v6, ports), func(t *testing.T) {
				d := loadFilter(t)
				own, peer := policyPlace(2, 2, v6), policyPlace(1, 2, v6)
				own4, peer4 := policyPlace(2, 2, false), policyPlace(1, 2, false)
				out, in := d.objs.FromEndpoint, d.objs.FromOverlay
				there := func(flags byte) []byte { return ip(own, peer, 6, segment(ports[0], ports[1], flags)) }
				back := func(flags byte) []byte { return ip(peer, own, 6, segment(ports[1], ports[0], flags)) }
				never := model.PairVerdict{Default: model.VerdictDrop}
				may := only(model.VerdictReject, model.ProtocolTCP, ports[1])
				// Opened without policy.
				follow(t, d, []step{{"SYN", out, there(tcpSYN), allowed}})
				apply(t, d, twoWays(own4, peer4, may, never))
				follow(t, d, []step{
					{"SYN-ACK", in, ip(peer, own, 6, segment(ports[1], ports[0], tcpSYN|tcpACK)), allowed},
					{"ACK", out, there(tcpACK), allowed},
					{"data back", in, back(tcpACK), allowed},
					{"SYN of the other side", in, back(tcpSYN), drop},
				})
				apply(t, d, twoWays(own4, peer4, never, model.PairVerdict{}))
				follow(t, d, []step{
					{"data after a change", out, there(tcpACK), reject},
					{"data back after a change", in, back(tcpACK), reject},
					{"RST after a change", out, there(tcpRST), allowed},
					{"RST back after a change", in, back(tcpRST | tcpACK), allowed},
					{"SYN after a change", out, there(tcpSYN), drop},
				})
			})
		}
	}
}

// TestFilterUnknownConnections checks what is made of segments of connections nobody saw opened:
// the lower port is the service's.
func TestFilterUnknownConnections(t *testing.T) {
	d := loadFilter(t)
	own, peer := policyPlace(2, 2, false), policyPlace(1, 2, false)
	apply(t, d, twoWays(own, peer, only(model.VerdictDrop, model.ProtocolTCP, 80), model.PairVerdict{Default: model.VerdictDrop}))
	out, in := d.objs.FromEndpoint, d.objs.FromOverlay
	follow(t, d, []step{
		{"to the service", out, ip(own, peer, 6, segment(40000, 80, tcpACK)), allowed},
		{"from it", in, ip(peer, own, 6, segment(80, 40000, tcpACK)), allowed},
		{"to the client's", in, ip(peer, own, 6, segment(40000, 80, tcpACK)), "drop"},
		{"another service", out, ip(own, peer, 6, segment(40000, 81, tcpACK)), "drop"},
		{"a RST to it", out, ip(own, peer, 6, segment(40000, 81, tcpRST)), "drop"},
	})
}

// fragment is a part of an IPv4 packet with this identification.
func fragment(src, dst netip.Addr, protocol byte, id, flags uint16, payload []byte) []byte {
	b := ipv4(src, dst, protocol, flags, payload)
	binary.BigEndian.PutUint16(b[4:], id)
	return ethernet(0x0800, b)
}

// fragment6 is a part of an IPv6 packet; offset in bytes.
func fragment6(src, dst netip.Addr, next byte, id uint32, offset int, more bool, payload []byte) []byte {
	h := []byte{next, 0, byte(offset >> 8), byte(offset & 0xf8)}
	if more {
		h[3] |= 1
	}
	return ethernet(0x86dd, ipv6(src, dst, 44, append(binary.BigEndian.AppendUint32(h, id), payload...)))
}

// TestFilterFragments checks that no fragment is a way around: later ones pass if the first did.
func TestFilterFragments(t *testing.T) {
	d := loadFilter(t)
	own, peer := policyPlace(2, 2, false), policyPlace(1, 2, false)
	own6, peer6 := policyPlace(2, 2, true), policyPlace(1, 2, true)
	var there model.PairVerdict = only(model.VerdictDrop, model.ProtocolUDP, 53)
	there.Ports = append([]model.PortVerdict{{Protocol: model.ProtocolTCP, First: 80, Last: 80, Verdict: model.VerdictAllow}}, there.Ports...)
	apply(t, d, twoWays(peer, own, there, model.PairVerdict{Default: model.VerdictDrop}))
	in, to := d.objs.FromOverlay, d.objs.ToEndpoint
	rest := make([]byte, 64)
	follow(t, d, []step{
		{"later without first", in, fragment(peer, own, 17, 1, 2, rest), undecidable},
		{"first of an allowed one", in, fragment(peer, own, 17, 2, moreFragments, datagram(4000, 53)), allowed},
		{"later of it", in, fragment(peer, own, 17, 2, 2, rest), allowed},
		{"later of another packet", in, fragment(peer, own, 17, 3, 2, rest), undecidable},
		{"later of another protocol", in, fragment(peer, own, 6, 2, 2, rest), undecidable},
		{"first of a forbidden one", in, fragment(peer, own, 17, 4, moreFragments, datagram(4000, 54)), "drop"},
		{"later of it", in, fragment(peer, own, 17, 4, 2, rest), undecidable},
		{"TCP, first", in, fragment(peer, own, 6, 5, moreFragments, append(segment(4000, 80, tcpSYN), 0, 0, 0, 0)), allowed},
		{"TCP, later", in, fragment(peer, own, 6, 5, 3, rest), allowed},
		{"TCP, forbidden first", in, fragment(peer, own, 6, 6, moreFragments, append(segment(4000, 81, tcpSYN), 0, 0, 0, 0)), "drop"},
		{"TCP, later of it", in, fragment(peer, own, 6, 6, 3, rest), undecidable},
		{"IPv6, later without first", to, fragment6(peer6, own6, 17, 1, 16, false, rest), undecidable},
		{"IPv6, first", to, fragment6(peer6, own6, 17, 2, 0, true, datagram(4000, 53)), allowed},
		{"IPv6, later", to, fragment6(peer6, own6, 17, 2, 16, false, rest), allowed},
		{"IPv6, forbidden first", to, fragment6(peer6, own6, 17, 3, 0, true, datagram(4000, 54)), "drop"},
		{"IPv6, later of it", to, fragment6(peer6, own6, 17, 3, 16, false, rest), undecidable},
		{"IPv6, TCP in a fragment", to, fragment6(peer6, own6, 6, 4, 0, true, segment(4000, 80, tcpSYN)), undecidable},
	})
}

// TestFilterExtensions checks that IPv6 extension headers hide nothing.
func TestFilterExtensions(t *testing.T) {
	d := loadFilter(t)
	own6, peer6 := policyPlace(2, 2, true), policyPlace(1, 2, true)
	apply(t, d, twoWays(policyPlace(1, 2, false), policyPlace(2, 2, false), only(model.VerdictReject, model.ProtocolUDP, 53), model.PairVerdict{}))
	options := func(n int, next byte, payload []byte) []byte {
		for range n {
			payload = append([]byte{next, 0, 1, 4, 0, 0, 0, 0}, payload...)
			next = 60
		}
		return ethernet(0x86dd, ipv6(peer6, own6, next, payload))
	}
	solicit := ethernet(0x86dd, ipv6(peer6, own6, 58, icmp(135, 0, make([]byte, 16))))
	near := append([]byte(nil), solicit...)
	near[14+7] = 255
	to := d.objs.ToEndpoint
	for name, c := range map[string]step{
		"allowed behind options":    {frame: options(1, 17, datagram(4000, 53)), want: allowed},
		"forbidden behind options":  {frame: options(1, 17, datagram(4000, 54)), want: "reject"},
		"TCP behind options":        {frame: options(1, 6, segment(4000, 80, tcpSYN)), want: undecidable},
		"behind too many":           {frame: options(5, 17, datagram(4000, 53)), want: undecidable},
		"neighbours of the link":    {frame: near, want: allowed},
		"neighbours from elsewhere": {frame: solicit, want: "reject"},
	} {
		// Not the node's own: what it refuses passes.
		prog := to
		if name == "neighbours of the link" || name == "neighbours from elsewhere" {
			prog = d.objs.FromOverlay
		}
		follow(t, d, []step{{name, prog, c.frame, c.want}})
	}
}

// TestFilterHandshake checks that the rest of a direct handshake is decided again, so that no SYN
// that the old tables let through becomes a connection under the new ones; and that a RST passes.
func TestFilterHandshake(t *testing.T) {
	d := loadFilter(t)
	key := heddleFlowKey{Saddr: fromAddr(underlayA).Word[3], Daddr: fromAddr(underlayB).Word[3], Sport: toPort(40000), Dport: toPort(directPort)}
	flow := heddleFlow{Src: fromAddr(overlayA).Word[3], Dst: fromAddr(overlayB).Word[3], DstPort: toPort(80)}
	if err := d.objs.FlowByWire.Put(&key, &flow); err != nil {
		t.Fatal(err)
	}
	ack, rst := frame(underlayA, underlayB, directPort, tcpACK, nil), frame(underlayA, underlayB, directPort, tcpRST, nil)
	apply(t, d, twoWays(overlayA, overlayB, only(model.VerdictDrop, model.ProtocolTCP, 80), model.PairVerdict{}))
	follow(t, d, []step{{"ACK while it is allowed", d.objs.FromUnderlay, ack, allowed}})
	apply(t, d, twoWays(overlayA, overlayB, only(model.VerdictDrop, model.ProtocolTCP, 81), model.PairVerdict{}))
	follow(t, d, []step{
		{"ACK when it is not", d.objs.FromUnderlay, ack, "reject"},
		{"RST", d.objs.FromUnderlay, rst, allowed},
	})
}

// TestFilterSender checks that what a container sends from no address yet, or from its link-local
// one, is decided as its own: the node is no exception. Neighbours of the link are asked all the
// same.
func TestFilterSender(t *testing.T) {
	d := loadFilter(t)
	own, node := policyPlace(2, 2, false), policyPlace(2, 1, false)
	node6 := policyPlace(2, 1, true)
	unspecified, local := netip.IPv6Unspecified(), netip.MustParseAddr("fe80::48:43ff:fe00:5")
	apply(t, d, twoWays(own, node, only(model.VerdictDrop, model.ProtocolUDP, 53), model.PairVerdict{}))
	out := d.objs.FromEndpoint
	for from, to := range map[netip.Addr]netip.Addr{netip.IPv4Unspecified(): node, unspecified: node6, local: node6} {
		follow(t, d, []step{
			{from.String() + ", allowed", out, ip(from, to, 17, datagram(4000, 53)), allowed},
			{from.String() + ", forbidden", out, ip(from, to, 17, datagram(4000, 54)), "drop"},
			{from.String() + ", SYN", out, ip(from, to, 6, segment(4000, 80, tcpSYN)), "drop"},
			{from.String() + ", data", out, ip(from, to, 6, segment(4000, 80, tcpACK)), "drop"},
		})
	}
	for _, from := range []netip.Addr{unspecified, local} {
		solicit := ip(from, node6, 58, icmp(135, 0, make([]byte, 16)))
		solicit[14+7] = 255
		follow(t, d, []step{{from.String() + ", neighbours", out, solicit, allowed}})
	}
}

// TestFilterOutside checks SYNs that reach an overlay address by the underlay's device.
func TestFilterOutside(t *testing.T) {
	d := loadFilter(t)
	outside := netip.MustParseAddr("198.51.100.1")
	syn := func(from netip.Addr, port uint16) []byte { return ip(from, overlayB, 6, segment(4000, port, tcpSYN)) }
	apply(t, d, model.PolicyTables{
		ByPrefix: map[netip.Prefix]model.ClassInfo{netip.MustParsePrefix("198.51.100.0/24"): {Class: 1}},
		ByAddr:   map[netip.Addr]model.ClassInfo{overlayB: {Class: 2, Ingress: model.VerdictDrop}},
		Pairs:    map[model.ClassPair]model.PairVerdict{{From: 1, To: 2}: only(model.VerdictReject, model.ProtocolTCP, 80)},
	})
	follow(t, d, []step{
		{"allowed", d.objs.FromUnderlay, syn(outside, 80), allowed},
		{"another port", d.objs.FromUnderlay, syn(outside, 81), "reject"},
		{"another host", d.objs.FromUnderlay, syn(netip.MustParseAddr("198.51.101.1"), 80), "drop"},
	})
	judge(t, d, d.objs.FromUnderlay, []judged{{"an overlay address beside the overlay", syn(overlayA, 80), heddleHeddleReasonREASON_DROP_SPOOFED_SOURCE}})
}

// FuzzFilter feeds arbitrary packets between two endpoints that may not talk at all to the real
// programs: none passes, whatever it calls itself. Neighbours' packets of the link (hop limit 255)
// are another matter.
func FuzzFilter(f *testing.F) {
	testutil.NeedRoot(f, "loads BPF programs")
	f.Add(false, byte(6), uint16(0), segment(4000, 80, tcpSYN))
	f.Add(false, byte(6), uint16(0), segment(4000, 80, tcpRST))
	f.Add(false, byte(17), uint16(moreFragments), datagram(4000, 53))
	f.Add(false, byte(1), uint16(0), icmp(3, 0, make([]byte, 28)))
	f.Add(true, byte(44), uint16(0), append([]byte{17, 0, 0, 1, 0, 0, 0, 1}, datagram(4000, 53)...))
	f.Add(true, byte(60), uint16(0), append([]byte{6, 0, 1, 4, 0, 0, 0, 0}, segment(4000, 80, tcpSYN)...))
	f.Add(true, byte(58), uint16(0), icmp(135, 0, make([]byte, 20)))
	d := loadFilter(f)
	own, peer := policyPlace(2, 2, false), policyPlace(1, 2, false)
	own6, peer6 := policyPlace(2, 2, true), policyPlace(1, 2, true)
	never := model.PairVerdict{Default: model.VerdictDrop}
	apply(f, d, twoWays(peer, own, never, never))
	f.Fuzz(func(t *testing.T, v6 bool, protocol byte, fragment uint16, payload []byte) {
		payload = payload[:min(len(payload), 1400)]
		packet := ethernet(0x0800, ipv4(peer, own, protocol, fragment, payload))
		if v6 {
			packet = ethernet(0x86dd, ipv6(peer6, own6, protocol, payload))
		}
		for _, prog := range []*ebpf.Program{d.objs.FromOverlay, d.objs.ToEndpoint} {
			// What the node itself refuses leaves by a veth; packets of this test have no device.
			refusal := prog == d.objs.ToEndpoint && (protocol == 1 || protocol == 58 || protocol == 6 && len(payload) > 13 && payload[13]&tcpRST != 0)
			if got := filtered(t, d, prog, packet); got == allowed && !refusal {
				t.Errorf("passed: IPv6 %v, protocol %d, fragment %#x, %x", v6, protocol, fragment, payload)
			}
		}
	})
}

// TestFilterEntering: what enters a container is decided by whose device it is, whatever address it
// is sent to: a link-local one, multicast.
func TestFilterEntering(t *testing.T) {
	d := loadForTest(t)
	gateway6, own6 := overlay6(netip.MustParseAddr("10.244.0.1")), overlay6(overlayB)
	lo := uint32(1) // where test packets go
	if err := d.objs.EndpointByIfindex.Put(lo, heddleEndpoint{Addr4: fromAddr(overlayB), Id: 5}); err != nil {
		t.Fatal(err)
	}
	apply(t, d, twoWays(gateway6, own6, only(model.VerdictReject, model.ProtocolUDP, 53), model.PairVerdict{}))
	for _, to := range []string{"fe80::4843:ff:fe00:5", "ff02::1"} {
		for port, want := range map[uint16]string{53: allowed, 54: model.VerdictReject.String()} {
			frame := ip(gateway6, netip.MustParseAddr(to), 17, datagram(1000, port))
			if got := filtered(t, d, d.objs.ToEndpoint, frame); got != want {
				t.Errorf("to %s, port %d: %s, want %s", to, port, got, want)
			}
		}
	}
}
