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
func SetMoved(addrs []netip.Addr, mark uint32) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: Table}
	have, err := movedElements(c, table)
	if err != nil {
		return err
	}
	addrs = slices.Clone(addrs)
	slices.SortFunc(addrs, netip.Addr.Compare)
	if slices.Equal(have, addrs) {
		return nil
	}
	if len(have) > 0 {
		chain := &nftables.Chain{Name: movedChain, Table: table}
		c.FlushChain(chain)
		c.DelChain(chain)
		for _, s := range movedSets(table) {
			c.DelSet(s)
		}
	}
	if err := addMoved(c, table, addrs, mark); err != nil {
		return err
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("set nftables chain %s: %w", movedChain, err)
	}
	return nil
}

// ChangeMoved is SetMoved for a chain that is what it was brought to for the addresses have.
func ChangeMoved(have, want []netip.Addr, mark uint32) error {
	if slices.Equal(have, want) {
		return nil
	}
	return SetMoved(want, mark)
}

func movedSets(table *nftables.Table) []*nftables.Set {
	return []*nftables.Set{
		{Table: table, Name: movedSet4, KeyType: nftables.TypeIPAddr}, {Table: table, Name: movedSet6, KeyType: nftables.TypeIP6Addr},
	}
}

// movedElements gives the addresses that the sets have, sorted.
func movedElements(c *nftables.Conn, table *nftables.Table) (have []netip.Addr, err error) {
	sets, err := c.GetSets(table)
	if err != nil {
		return nil, fmt.Errorf("list nftables sets: %w; set the node up first", err)
	}
	for _, s := range sets {
		if s.Name != movedSet4 && s.Name != movedSet6 {
			continue
		}
		elements, err := c.GetSetElements(s)
		if err != nil {
			return nil, fmt.Errorf("nftables set %s: %w", s.Name, err)
		}
		for _, e := range elements {
			if a, ok := netip.AddrFromSlice(e.Key); ok {
				have = append(have, a)
			}
		}
	}
	slices.SortFunc(have, netip.Addr.Compare)
	return have, nil
}

// addMoved adds the chain and its sets, unless there are no addresses.
func addMoved(c *nftables.Conn, table *nftables.Table, addrs []netip.Addr, mark uint32) error {
	if len(addrs) == 0 {
		return nil
	}
	chain := c.AddChain(&nftables.Chain{Name: movedChain, Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRef(deliverPriority)})
	for _, s := range movedSets(table) {
		var elements []nftables.SetElement
		for _, a := range addrs {
			if len(a.AsSlice()) == int(s.KeyType.Bytes) {
				elements = append(elements, nftables.SetElement{Key: a.AsSlice()})
			}
		}
		if err := c.AddSet(s, elements); err != nil {
			return fmt.Errorf("nftables set %s: %w", s.Name, err)
		}
		c.AddRule(&nftables.Rule{
			Table: table, Chain: chain, Exprs: maybeDivertExprs(s, mark),
			UserData: comment("maybe for a node socket that holds an address that has moved here"),
		})
	}
	return nil
}
