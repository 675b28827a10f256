package datapath

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
)

// TestFirewallProbe sends a probe of the firewalls out of its container and answers to it. The
// option leaves by the agent's word only, the destination's side answers in the container's place,
// and no answer counts but the one of whoever saw the SYN.
func TestFirewallProbe(t *testing.T) {
	d := loadForTest(t)
	own := heddleEndpoint{Addr4: fromAddr(overlayB), Id: 5}
	if err := d.objs.EndpointByIfindex.Put(uint32(0), own); err != nil { // test packets come in by no device
		t.Fatal(err)
	}
	const sequence = 1000
	asks := with(option(), 4, 4<<4)
	syn := frame(overlayB, overlayA, 80, tcpSYN, asks)
	binary.BigEndian.PutUint32(syn[14+20+4:], sequence)
	judge(t, d, d.objs.FromEndpoint, []judged{{"forged", syn, heddleHeddleReasonREASON_DROP_FORGED_DIRECT}})

	probe := FirewallProbe{FirewallKey{overlayB, netip.AddrPortFrom(overlayA, 80)}, 40000} // frame's source port
	answer := func(source uint16, ack uint32) []byte {
		b := frame(overlayA, overlayB, 40000, tcpSYN|tcpACK, nil)
		binary.BigEndian.PutUint16(b[14+20:], source)
		binary.BigEndian.PutUint32(b[14+20+8:], ack)
		return b
	}
	arrives := func(what string, b []byte, want bool) {
		t.Helper()
		if _, _, err := d.objs.ToEndpoint.Test(b); err != nil {
			t.Fatal(err)
		}
		var at uint64
		key := probe.FirewallKey.abi()
		err := d.objs.PassedFirewallAt.Lookup(&key, &at)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			t.Fatal(err)
		}
		if passed := err == nil; passed != want {
			t.Errorf("%s: passed %v, want %v", what, passed, want)
		}
	}
	if err := d.ExpectFirewallProbe(probe); err != nil {
		t.Fatal(err)
	}
	arrives("an answer before the SYN has left", answer(80, 0), false)
	judge(t, d, d.objs.FromEndpoint, []judged{{"the agent's", syn, 0}})
	arrives("an answer that guesses", answer(80, sequence), false)
	arrives("an answer from another port", answer(81, sequence+1), false)
	arrives("a refusal", frame(overlayA, overlayB, 40000, tcpACK|4, nil), false)
	arrives("the answer", answer(80, sequence+1), true)
	if left, passed, err := d.EndFirewallProbe(probe); err != nil || !left || !passed {
		t.Errorf("left %v, passed %v: %v", left, passed, err)
	}
	judge(t, d, d.objs.FromEndpoint, []judged{{"sent again, later", syn, heddleHeddleReasonREASON_DROP_FORGED_DIRECT}})
}

// TestFirewallProbeAnswered sends probes to where their connections would arrive.
func TestFirewallProbeAnswered(t *testing.T) {
	d := loadForTest(t)
	asks := with(option(), 4, 4<<4)
	for _, tc := range []struct {
		name     string
		packet   []byte
		answered bool
	}{
		{"of this network", frame(overlayA, overlayB, 80, tcpSYN, asks), true},
		{"of another", frame(overlayA, overlayB, 80, tcpSYN, with(asks, 5, 8)), false},
		{"of a direct path", frame(overlayA, overlayB, 80, tcpSYN, probeOption()), false},
		{"no SYN", frame(overlayA, overlayB, 80, tcpACK, asks), false},
		{"without an option", frame(overlayA, overlayB, 80, tcpSYN, nil), false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := counters(t, d)
			_, out, err := d.objs.ToEndpoint.Test(tc.packet)
			if err != nil {
				t.Fatal(err)
			}
			flags, from := out[14+20+13], netip.AddrFrom4([4]byte(out[14+12:14+16]))
			if answered := flags == tcpSYN|tcpACK && from == overlayB; answered != tc.answered {
				t.Errorf("flags %#x from %s", flags, from)
			}
			if n := counters(t, d)[heddleHeddleReasonREASON_PROBE_FIREWALL] - before[heddleHeddleReasonREASON_PROBE_FIREWALL]; (n == 1) != tc.answered {
				t.Errorf("counted %d times", n)
			}
		})
	}
}
