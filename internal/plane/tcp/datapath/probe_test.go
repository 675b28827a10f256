package datapath

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// probeOption gives the option of a probe that B takes from A.
func probeOption() []byte { return with(option(), 4, 3<<4) }

// TestProbeAnswered sends probes through from_underlay on a node without an agent's listener. The
// program must answer the one that is good by a SYN-ACK that the sender's stack takes, and the
// others as it does SYNs.
func TestProbeAnswered(t *testing.T) {
	d := loadForTest(t)
	before := counters(t, d)
	probe := frame(underlayA, underlayB, directPort, tcpSYN, probeOption())
	copy(probe, []byte{2, 0, 0, 0, 0, 0xb, 2, 0, 0, 0, 0, 0xa})
	binary.BigEndian.PutUint32(probe[14+20+4:], 0xfffffffe) // its sequence number
	binary.BigEndian.PutUint16(probe[14+20+16:], ^checksum(probe))
	verdict, out, err := d.objs.FromUnderlay.Test(probe)
	if err != nil {
		t.Fatal(err)
	}
	if verdict != actRedirect {
		t.Fatalf("verdict %d, want %d", verdict, actRedirect)
	}
	if got := counters(t, d)[heddleHeddleReasonREASON_PROBE_ANSWERED] - before[heddleHeddleReasonREASON_PROBE_ANSWERED]; got != 1 {
		t.Errorf("counted %d times, want once", got)
	}
	ip, tcp := out[14:], out[14+20:]
	if string(out[:12]) != string([]byte{2, 0, 0, 0, 0, 0xa, 2, 0, 0, 0, 0, 0xb}) {
		t.Errorf("hardware addresses % x", out[:12])
	}
	from, to := netip.AddrFrom4([4]byte(ip[12:16])), netip.AddrFrom4([4]byte(ip[16:20]))
	if from != underlayB || to != underlayA {
		t.Errorf("from %s to %s", from, to)
	}
	if s, p := binary.BigEndian.Uint16(tcp), binary.BigEndian.Uint16(tcp[2:]); s != directPort || p != 40000 {
		t.Errorf("ports %d -> %d", s, p)
	}
	if ack := binary.BigEndian.Uint32(tcp[8:]); ack != 0xffffffff {
		t.Errorf("acknowledges %#x", ack)
	}
	if tcp[13] != tcpSYN|tcpACK {
		t.Errorf("flags %#x", tcp[13])
	}
	if sum := checksum(out); sum != 0xffff {
		t.Errorf("checksum is wrong: %#x", sum)
	}
}

// checksum adds up a frame's TCP segment with its pseudo header: 0xffff if its checksum is right.
func checksum(b []byte) uint16 {
	ip := b[14:]
	sum := uint32(6) + uint32(len(ip)-20)
	for i := 12; i < len(ip); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}

// TestProbeRejects sends probes that must not be answered.
func TestProbeRejects(t *testing.T) {
	d := loadForTest(t)
	for _, tc := range []struct {
		name   string
		packet []byte
		reason heddleHeddleReason
	}{
		{"unknown node", frame(netip.MustParseAddr("192.0.2.9"), underlayB, directPort, tcpSYN, probeOption()), heddleHeddleReasonREASON_DROP_UNKNOWN_NODE},
		{"gateway of another node", frame(underlayA, underlayB, directPort, tcpSYN, with(probeOption(), 14, 2)), heddleHeddleReasonREASON_DROP_SOURCE_NOT_OF_NODE},
		{"other network", frame(underlayA, underlayB, directPort, tcpSYN, with(probeOption(), 5, 8)), heddleHeddleReasonREASON_DROP_OPTION_NETWORK},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := counters(t, d)[tc.reason]
			verdict, _, err := d.objs.FromUnderlay.Test(tc.packet)
			if err != nil {
				t.Fatal(err)
			}
			if verdict != actShot {
				t.Errorf("verdict %d, want %d", verdict, actShot)
			}
			if got := counters(t, d)[tc.reason] - before; got != 1 {
				t.Errorf("counted %d times, want once", got)
			}
		})
	}
}

// TestPeerState checks which routes a state reaches, that a new topology keeps it, and that the
// next agent finds it.
func TestPeerState(t *testing.T) {
	d := loadForTest(t)
	flagsOf := func(p string) heddleRouteFlags {
		t.Helper()
		key := routeKey(netip.MustParsePrefix(p))
		var r heddleRoute
		if err := d.objs.RouteByPrefix.Lookup(&key, &r); err != nil {
			t.Fatal(err)
		}
		return heddleRouteFlags(r.Flags) & heddleRouteFlagsROUTE_NOT_PROVEN
	}
	check := func(when string, a heddleRouteFlags, state model.PeerState) {
		t.Helper()
		if got := flagsOf("10.244.1.0/24"); got != a {
			t.Errorf("%s: route to a has %#x, want %#x", when, got, a)
		}
		if got := flagsOf("10.244.2.0/24"); got != 0 {
			t.Errorf("%s: the own route has %#x", when, got)
		}
		states, err := d.PeerStates()
		if err != nil {
			t.Fatal(err)
		}
		if len(states) != 1 || states[underlayA] != state {
			t.Errorf("%s: states %v, want %s for %s", when, states, state, underlayA)
		}
	}
	set := func(s model.PeerState) {
		t.Helper()
		if err := d.SetPeerState(underlayA, s); err != nil {
			t.Fatal(err)
		}
	}
	check("at the start", 0, model.PeerProven)
	set(model.PeerStripped)
	check("stripped", heddleRouteFlagsROUTE_STRIPPED, model.PeerStripped)
	set(model.PeerUnproven)
	check("unproven", heddleRouteFlagsROUTE_UNPROVEN, model.PeerUnproven)
	set(model.PeerBlocked)
	nodes := []model.Node{
		{Name: "a", Underlay: underlayA, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}, Planes: takesDirect(d.cfg.DirectPorts)},
		{Name: "b", Underlay: underlayB, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.2.0/24")}, Planes: takesDirect(d.cfg.DirectPorts)},
	}
	if err := d.SetTopology("b", nil, nodes, nil); err != nil {
		t.Fatal(err)
	}
	check("blocked, with a new topology", heddleRouteFlagsROUTE_BLOCKED, model.PeerBlocked)
	set(model.PeerProven)
	check("proven again", 0, model.PeerProven)
}
