package firewall

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
)

// Addresses that have moved to this node lie in other nodes' prefixes, so what the chain deliver
// does for the node's own prefixes a chain of their own does for them. It is there only while there
// are some: every packet passes it.

// movedChain and the two sets of addresses that its rules look up.
const (
	movedChain = "moved"
	movedSet4  = "moved"
	movedSet6  = "moved6"
)

// SetMoved brings the chain to addrs.
func (t *Rules) SetMoved(addrs []netip.Addr) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	addrs = slices.Clone(addrs)
	slices.SortFunc(addrs, netip.Addr.Compare)
	if slices.Equal(t.moved, addrs) && t.written.table != 0 {
		return nil
	}
	had := len(t.moved) > 0
	t.moved = addrs
	return t.write(func(r ruleset) error {
		if had {
			r.remove(movedChain)
			for _, s := range movedSets(r.table) {
				r.c.DelSet(s)
			}
		}
		return r.addMoved(addrs)
	})
}

func movedSets(table *nftables.Table) []*nftables.Set {
	return []*nftables.Set{
		{Table: table, Name: movedSet4, KeyType: nftables.TypeIPAddr}, {Table: table, Name: movedSet6, KeyType: nftables.TypeIP6Addr},
	}
}

// addMoved adds the chain and its sets, unless there are no addresses.
func (r ruleset) addMoved(addrs []netip.Addr) error {
	if len(addrs) == 0 {
		return nil
	}
	chain := r.base(movedChain, nftables.ChainTypeFilter, nftables.ChainHookPrerouting, deliverPriority)
	for _, s := range movedSets(r.table) {
		var elements []nftables.SetElement
		for _, a := range addrs {
			if len(a.AsSlice()) == int(s.KeyType.Bytes) {
				elements = append(elements, nftables.SetElement{Key: a.AsSlice()})
			}
		}
		if err := r.c.AddSet(s, elements); err != nil {
			return fmt.Errorf("nftables set %s: %w", s.Name, err)
		}
		r.rule(chain, "maybe for a node socket that holds an address that has moved here", maybeDivertExprs(s, r.cfg.Mark))
	}
	return nil
}
