package model

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
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
		var h PrefixHolders
		all := make(map[netip.Prefix]string)
		for i := range 40 {
			p := random()
			holders := make(map[netip.Prefix]string)
			for q, name := range all {
				if p.Overlaps(q) {
					holders[q] = name
				}
			}
			q, name, got := h.Overlapping(p)
			if got != (len(holders) > 0) || got && holders[q] != name {
				t.Fatalf("%v among %v: %v of %q, %t; want one of %v", p, all, q, name, got, holders)
			}
			p = p.Masked()
			if r.IntN(3) > 0 {
				h.Add(p, fmt.Sprint(i))
				all[p] = fmt.Sprint(i)
			}
			if len(all) > 6 {
				for q := range all {
					h.Remove(q)
					h.Remove(q)
					delete(all, q)
					break
				}
			}
		}
		for q := range all {
			h.Remove(q)
		}
		if len(h.holder)+len(h.within) > 0 || h.lengths != [129]int{} {
			t.Fatalf("everything is removed, and there is %v", h)
		}
	}
}
