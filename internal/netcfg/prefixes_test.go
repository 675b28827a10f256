package netcfg

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// TestPrefixHolders compares the answers with those of netip, for random prefixes of both families.
func TestPrefixHolders(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	random := func() netip.Prefix {
		if r.IntN(2) == 0 {
			return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(r.IntN(4)), byte(r.IntN(4)), byte(r.IntN(256))}), 6+r.IntN(27))
		}
		return netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(r.IntN(4)), 15: byte(r.IntN(256))}), 90+r.IntN(39))
	}
	for range 300 {
		var h prefixHolders
		var all []netip.Prefix
		for i := range 12 {
			p := random()
			want := false
			for _, q := range all {
				want = want || p.Overlaps(q)
			}
			q, name, got := h.overlapping(p)
			if got != want || got && (!p.Overlaps(q) || name == "") {
				t.Fatalf("%v among %v: %v of %q, %t; want %t", p, all, q, name, got, want)
			}
			h.add(p, fmt.Sprint(i))
			all = append(all, p)
		}
	}
}

// BenchmarkDesiredPeers is what one node that changes among many costs before the kernel is told.
func BenchmarkDesiredPeers(b *testing.B) {
	for _, n := range []int{500, 5000} {
		nodes := make([]model.Node, n)
		for i := range nodes {
			p4 := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)
			p6 := netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 12: 10, 13: byte(i >> 8), 14: byte(i)}), 120)
			nodes[i] = model.Node{Name: fmt.Sprintf("n%d", i), Underlay: netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}),
				Prefixes: []netip.Prefix{p4, p6}, VTEPMAC: fmt.Sprintf("02:48:00:00:%02x:%02x", i>>8, i&255)}
		}
		devs := NodeDevices{Gateways: []netip.Addr{netip.MustParseAddr("10.255.255.1"), netip.MustParseAddr("fd00::ffff:1")}}
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				if _, err := desiredPeers(devs, "n1", nodes); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
