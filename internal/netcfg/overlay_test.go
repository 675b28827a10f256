package netcfg

import (
	"fmt"
	"net/netip"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// BenchmarkDesired is what the overlay's nodes cost before the kernel is told: all of them, as a
// Set does, or one, as a Change.
func BenchmarkDesired(b *testing.B) {
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
				o := NewOverlay(devs, "n1")
				o.used = newPeerIndex(devs, "n1")
				if _, err := o.desired(nodes); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
