package store

import (
	"fmt"
	"net/netip"
	"slices"

	"heddle.dev/heddle/internal/model"
)

// The longest node prefix: a network address, a gateway, at least one endpoint and a broadcast
// address have to fit. The shortest prefix: 0.0.0.0/0 or 64.0.0.0/2 would take in loopback and
// multicast addresses.
const (
	minPrefixLen = 8
	maxPrefixLen = 30
)

// AllocatePrefixes decides what JoinNode stores for n: the prefixes n asks for, or those it has
// already, or free ones of the network's pool. nodes are all nodes of the store; n's own earlier
// record may be among them. Errors: ErrPoolExhausted, *OverlapError, *UnderlayInUseError, or what
// is malformed about n.
func AllocatePrefixes(network Network, nodes []model.Node, n model.Node) (model.Node, error) {
	var used []netip.Prefix
	owner := make(map[netip.Prefix]string)
	for _, other := range nodes {
		if other.Name == n.Name {
			if len(n.Prefixes) == 0 {
				n.Prefixes = other.Prefixes
			}
			continue
		}
		if n.Underlay.IsValid() && other.Underlay == n.Underlay {
			return model.Node{}, &UnderlayInUseError{Addr: n.Underlay, Node: other.Name}
		}
		if other.Outer() == n.Outer() {
			return model.Node{}, &UnderlayInUseError{Addr: n.Outer(), Node: other.Name}
		}
		for _, p := range other.Prefixes {
			used = append(used, p)
			owner[p] = other.Name
		}
	}
	if len(n.Prefixes) == 0 {
		p, err := freeNodePrefix(network, used)
		if err != nil {
			return model.Node{}, err
		}
		n.Prefixes = []netip.Prefix{p}
	}
	if n.Inner().IsValid() && !n.Underlay.IsValid() {
		var err error
		if n.Underlay, err = freeInner(nodes, n); err != nil {
			return model.Node{}, err
		}
	}
	if err := validateNode(n); err != nil {
		return model.Node{}, err
	}
	for _, p := range network.Pool {
		for _, a := range []netip.Addr{n.Underlay, n.Outer()} {
			if p.Contains(a) {
				return model.Node{}, &OverlapError{Prefix: p, With: fmt.Sprintf("underlay address %s of node %s", a, n.Name)}
			}
		}
		if n.Inner().IsValid() && p.Overlaps(n.Inner()) {
			return model.Node{}, &OverlapError{Prefix: p, With: fmt.Sprintf("the inner addresses %s of node %s", n.Inner(), n.Name)}
		}
	}
	for _, p := range n.Prefixes {
		if !network.inPool(p) {
			return model.Node{}, &OverlapError{Prefix: p, With: fmt.Sprintf("addresses outside pool %s", network.Pool)}
		}
		for _, u := range used {
			if p.Overlaps(u) {
				return model.Node{}, &OverlapError{Prefix: p, With: fmt.Sprintf("%s of node %s", u, owner[u])}
			}
		}
	}
	return n, nil
}

// freeInner gives the inner address of n: the one that it had, or the lowest free one of its
// prefix.
func freeInner(nodes []model.Node, n model.Node) (netip.Addr, error) {
	prefix, used := n.Inner(), make(map[netip.Addr]bool)
	if err := model.ValidateInner(prefix); err != nil {
		return netip.Addr{}, fmt.Errorf("node %s: inner addresses: %w", n.Name, err)
	}
	for _, other := range nodes {
		if other.Name == n.Name && other.Inner() == prefix {
			return other.Underlay, nil
		}
		used[other.Underlay] = true
	}
	for a := prefix.Addr().Next(); a != lastAddr(prefix); a = a.Next() {
		if !used[a] {
			return a, nil
		}
	}
	return netip.Addr{}, fmt.Errorf("%w: no free inner address in %s: remove nodes that are gone", ErrPoolExhausted, prefix)
}

// CheckReaders reports a *ReadersError if one of nodes would misread the record of n, and gives the
// revision of the schema that the network's readers must know with n.
func CheckReaders(nodes []model.Node, n model.Node) (schema int, err error) {
	needs, what := 0, ""
	switch {
	case n.Translated():
		needs, what = IPv6UnderlaySchema, "an IPv6 underlay"
	case n.Encrypts():
		needs, what = WireGuardSchema, "encryption"
	}
	for _, other := range nodes {
		if other.Name != n.Name && max(other.ReadsSchema, 1) < needs {
			return 0, &ReadersError{Node: other.Name, What: what}
		}
	}
	return needs, nil
}

// CheckHeld reports a *PrefixInUseError if one of the addresses the node's endpoints hold is of the
// network's pool and not assignable in the node's prefixes, and has not moved to the node. Others
// are carried by another network.
func CheckHeld(network Network, n model.Node, held map[netip.Addr]model.EndpointID, moves []model.Move) error {
	for a, id := range held {
		if slices.ContainsFunc(moves, func(m model.Move) bool { return m.Addr == a && m.Node == n.Name }) {
			continue
		}
		if network.inPoolAddr(a) && CheckAddr(n, a) != nil {
			return &PrefixInUseError{Node: n.Name, Addr: a, Endpoint: id}
		}
	}
	return nil
}

// CheckAddr reports an *AddrOutsideError unless a is an IPv4 address that an endpoint of n may
// have: inside one of n's prefixes, and neither its network address, nor its gateway, nor its
// broadcast address.
func CheckAddr(n model.Node, a netip.Addr) error {
	for _, p := range n.Prefixes {
		if !p.Contains(a) {
			continue
		}
		if a == p.Addr() || a == model.Gateway(p) || a == lastAddr(p) {
			return &AddrOutsideError{Addr: a, Node: n.Name, Why: "reserved (network, gateway or broadcast address) on"}
		}
		return nil
	}
	return &AddrOutsideError{Addr: a, Node: n.Name, Why: "not in the prefixes of"}
}

// inPoolAddr reports whether a is in the network's pool.
func (n Network) inPoolAddr(a netip.Addr) bool {
	return slices.ContainsFunc(n.Pool, func(p netip.Prefix) bool { return p.Contains(a) })
}

// CheckEndpoint reports an *AddrOutsideError unless e may have its addresses as an endpoint of n.
// move is that of its address, nil if there is none.
func CheckEndpoint(network Network, n model.Node, e model.Endpoint, move *model.Move) error {
	if e.Adopted != nil {
		if network.inPoolAddr(e.Addr4()) {
			return &AddrOutsideError{Addr: e.Addr4(), Node: n.Name, Why: "carried by another network, but in the pool: not for"}
		}
	} else if move != nil && move.Node != n.Name {
		return &MovedError{Move: *move}
	} else if err := CheckAddr(n, e.Addr4()); err != nil && move == nil {
		return err
	}
	return network.checkAddr6(e)
}

// freeNodePrefix gives the lowest free prefix of the first prefix of the pool that has one.
func freeNodePrefix(network Network, used []netip.Prefix) (netip.Prefix, error) {
	for _, pool := range network.Pool {
		if p, found := freePrefix(pool, network.NodePrefixLen, used); found {
			return p, nil
		}
	}
	return netip.Prefix{}, fmt.Errorf("%w: no free /%d in pool %s, %d node prefixes in use: remove nodes that are gone",
		ErrPoolExhausted, network.NodePrefixLen, network.Pool, len(used))
}

// freePrefix finds the lowest prefix of length bits in pool that overlaps none of used. It goes
// from one obstacle to the next, so its cost depends on the number of nodes and not on the size of
// the pool.
func freePrefix(pool netip.Prefix, bits int, used []netip.Prefix) (netip.Prefix, bool) {
	used = slices.SortedFunc(slices.Values(used), func(p, q netip.Prefix) int { return p.Addr().Compare(q.Addr()) })
	for a := pool.Addr(); a.IsValid() && pool.Contains(a); {
		candidate := netip.PrefixFrom(a, bits)
		for len(used) > 0 && lastAddr(used[0]).Less(a) {
			used = used[1:]
		}
		if len(used) == 0 || !candidate.Overlaps(used[0]) {
			return candidate, true
		}
		obstacle := used[0]
		if obstacle.Bits() > bits {
			obstacle = candidate
		}
		a = lastAddr(obstacle).Next() // the zero Addr past the end of the address space
	}
	return netip.Prefix{}, false
}

// lastAddr gives the highest address in p, the broadcast address.
func lastAddr(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for bit := p.Bits(); bit < len(b)*8; bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// contains reports whether all of inner lies in outer.
func contains(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}
