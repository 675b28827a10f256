package datapath

import (
	"cmp"
	"net"
	"net/netip"
	"slices"

	"heddle.dev/heddle/internal/model"
)

// topology is what route_by_prefix and node_by_underlay are to have for nodes and endpoints. What
// has changed about these costs what it is: each node has candidates for entries, for itself and
// its endpoints, and several may have one for the same entry.
type topology struct {
	self      string
	local     []netip.Prefix
	nodes     []model.Node
	endpoints model.Endpoints

	routes     candidates
	byUnderlay map[heddleAddress]heddleRoute
	vteps      map[heddleAddress]heddleVtep
	nameAt     map[heddleAddress]string // the nodes, by underlay address
	byInner    map[uint32]heddleMappedNode
	byOuter    map[heddleAddress]heddleMappedNode
}

func newTopology(self string) topology {
	return topology{self: self, routes: make(candidates), byUnderlay: make(map[heddleAddress]heddleRoute), vteps: make(map[heddleAddress]heddleVtep), nameAt: make(map[heddleAddress]string),
		byInner: make(map[uint32]heddleMappedNode), byOuter: make(map[heddleAddress]heddleMappedNode)}
}

// touched has the entries that may be others now, as they were before; the zero route: not there.
type touched struct {
	routes map[heddleRouteKey]heddleRoute
	nodes  map[heddleAddress]heddleRoute
	vteps  map[heddleAddress]heddleVtep
	inner  map[uint32]heddleMappedNode
	outer  map[heddleAddress]heddleMappedNode
}

// change brings t to other nodes and endpoints, and says what that has touched.
func (t *topology) change(local []netip.Prefix, nodes []model.Node, endpoints model.Endpoints) touched {
	out := touched{
		make(map[heddleRouteKey]heddleRoute), make(map[heddleAddress]heddleRoute), make(map[heddleAddress]heddleVtep),
		make(map[uint32]heddleMappedNode), make(map[heddleAddress]heddleMappedNode),
	}
	touch := func(k heddleRouteKey) {
		if _, is := out.routes[k]; !is {
			out.routes[k] = t.routes.best(k)
		}
	}
	changed, groups := model.ChangedNodes(t.nodes, nodes), endpoints.ChangedSince(t.endpoints)
	anew := make(map[string]bool, len(changed)) // nodes
	for _, c := range changed {
		anew[c.Name()] = true
	}
	if !slices.Equal(local, t.local) {
		anew[t.self] = true
	}
	gone := func(k heddleRouteKey, c candidate) { touch(k); t.routes.remove(k, c) }
	come := func(k heddleRouteKey, c candidate) { touch(k); t.routes.add(k, c) }
	// All that is old goes before anything new comes: what one gives up another may take.
	for name := range anew {
		t.each(name, gone)
	}
	for _, g := range groups {
		if !anew[g.Node] {
			t.eachEndpoint(g.Node, g.Before, gone)
		}
	}
	for _, c := range changed {
		if c.Before != nil {
			t.leave(c.Before, out)
		}
	}
	t.local, t.nodes, t.endpoints = local, nodes, endpoints
	for name := range anew {
		t.each(name, come)
	}
	for _, g := range groups {
		if !anew[g.Node] {
			t.eachEndpoint(g.Node, g.After, come)
		}
	}
	for _, c := range changed {
		if c.After != nil {
			t.arrive(c.After, out)
		}
	}
	return out
}

// leave takes away what a node itself has entries for.
func (t *topology) leave(n *model.Node, out touched) {
	at := fromAddr(n.Underlay)
	out.nodes[at], out.vteps[at] = routeTo(n), toVTEP(n.VTEPMAC)
	delete(t.byUnderlay, at)
	delete(t.vteps, at)
	delete(t.nameAt, at)
	if n.Translated() {
		m := mappedNode(n)
		out.inner[m.Inner], out.outer[m.Outer] = m, m
		delete(t.byInner, m.Inner)
		delete(t.byOuter, m.Outer)
	}
}

// arrive adds it. What has left stays touched as it was.
func (t *topology) arrive(n *model.Node, out touched) {
	at := fromAddr(n.Underlay)
	if _, is := out.nodes[at]; !is {
		out.nodes[at], out.vteps[at] = heddleRoute{}, heddleVtep{}
	}
	t.byUnderlay[at], t.nameAt[at] = routeTo(n), n.Name
	if v := toVTEP(n.VTEPMAC); v != (heddleVtep{}) {
		t.vteps[at] = v
	}
	if n.Translated() {
		m := mappedNode(n)
		if _, is := out.inner[m.Inner]; !is {
			out.inner[m.Inner] = heddleMappedNode{}
		}
		if _, is := out.outer[m.Outer]; !is {
			out.outer[m.Outer] = heddleMappedNode{}
		}
		t.byInner[m.Inner], t.byOuter[m.Outer] = m, m
	}
}

// rank says which of several candidates for an entry is the best: the highest.
type rank uint8

const (
	rankNetwork rank = iota // addresses of another network, around those of endpoints
	rankNode                // a node's prefixes, and what has moved to it
	rankGateway             // its own overlay addresses
	rankOwn                 // what this node's processes listen on
	rankPlain               // endpoints that are not intercepted
	rankAdopted             // endpoints with addresses of another network
)

// candidate is that an entry is to be a route, for a node.
type candidate struct {
	rank  rank
	node  string
	route heddleRoute
}

// candidates are those for each entry.
type candidates map[heddleRouteKey][]candidate

func (cs candidates) add(k heddleRouteKey, c candidate) { cs[k] = append(cs[k], c) }

// remove takes out one candidate that is equal to c.
func (cs candidates) remove(k heddleRouteKey, c candidate) {
	at := slices.Index(cs[k], c)
	switch {
	case at < 0:
	case len(cs[k]) == 1:
		delete(cs, k)
	default:
		cs[k] = slices.Delete(cs[k], at, at+1)
	}
}

// best gives the entry, or the zero route without candidates. Of candidates of one rank it takes
// that of the last node by name, but for an address that several nodes say is theirs in another
// network, as may be while it moves: only the network that carries it can tell.
func (cs candidates) best(k heddleRouteKey) heddleRoute {
	all := cs[k]
	if len(all) == 0 {
		return heddleRoute{}
	}
	winner, adopted := all[0], 0
	for _, c := range all {
		if c.rank > winner.rank || c.rank == winner.rank && c.node > winner.node {
			winner = c
		}
		if c.rank == rankAdopted {
			adopted++
		}
	}
	if adopted > 1 {
		return heddleRoute{Flags: adoptedElsewhere}
	}
	return winner.route
}

// adoptedElsewhere are the flags of what another network carries, wherever it is.
const adoptedElsewhere = uint32(heddleRouteFlagsROUTE_PLAIN | heddleRouteFlagsROUTE_ADOPTED)

// node gives the node of that name; nil: it is not there.
func (t *topology) node(name string) *model.Node {
	at, known := slices.BinarySearchFunc(t.nodes, name, func(n model.Node, name string) int { return cmp.Compare(n.Name, name) })
	if !known {
		return nil
	}
	return &t.nodes[at]
}

// each gives every candidate of a node, for itself and its endpoints: as they are now, and in the
// same number whenever it is asked.
func (t *topology) each(name string, f func(heddleRouteKey, candidate)) {
	n, own := t.node(name), name == t.self
	if n == nil {
		return
	}
	say := func(rank rank, p netip.Prefix, r heddleRoute, more heddleRouteFlags) {
		r.Flags |= uint32(more)
		f(routeKey(p), candidate{rank, name, r})
	}
	r := routeTo(n)
	flags := heddleRouteFlags(0)
	if own {
		flags = heddleRouteFlagsROUTE_SELF
		node := r
		node.Flags = uint32(heddleRouteFlagsROUTE_NODE_ADDR)
		for _, p := range slices.Concat(t.local, []netip.Prefix{hostPrefix(n.Underlay)}) {
			say(rankOwn, p, node, 0)
		}
		for _, p := range n.Prefixes {
			say(rankOwn, hostPrefix(model.Gateway(p)), node, 0)
		}
	}
	for _, p := range slices.Concat(n.Prefixes, movedPrefixes(n)) {
		say(rankNode, p, r, flags)
	}
	if !own {
		for _, p := range n.Prefixes {
			// The gateway address is the node's own: no intercepted listener is there.
			say(rankGateway, hostPrefix(model.Gateway(p)), r, heddleRouteFlagsROUTE_PLAIN)
		}
	}
	t.eachEndpoint(name, t.endpoints.Groups(name), f)
}

// eachEndpoint gives those for some of a node's groups of endpoints.
func (t *topology) eachEndpoint(name string, groups model.Endpoints, f func(heddleRouteKey, candidate)) {
	n, own := t.node(name), name == t.self
	if n == nil {
		return
	}
	r, flags := routeTo(n), heddleRouteFlags(0)
	if own {
		flags = heddleRouteFlagsROUTE_SELF
	}
	say := func(rank rank, p netip.Prefix, r heddleRoute, more heddleRouteFlags) {
		r.Flags |= uint32(more)
		f(routeKey(p), candidate{rank, name, r})
	}
	for _, group := range groups {
		networks := make(map[netip.Prefix]bool) // once a group: they may be those of many endpoints
		for _, e := range group {
			if e.Adopted != nil {
				for _, p := range e.Adopted.Prefixes {
					networks[p] = true
				}
				more := heddleRouteFlagsROUTE_ADOPTED | flags
				if !own && !e.Planes.TCP.Intercepted {
					more |= heddleRouteFlagsROUTE_PLAIN
				}
				say(rankAdopted, hostPrefix(e.Addr4()), r, more)
			} else if !own && !e.Planes.TCP.Intercepted {
				for _, a := range e.Addrs {
					say(rankPlain, hostPrefix(a), r, heddleRouteFlagsROUTE_PLAIN)
				}
			}
		}
		for p := range networks {
			say(rankNetwork, p, heddleRoute{Flags: adoptedElsewhere}, 0)
		}
	}
}

// routeTo gives how a node is reached.
func routeTo(n *model.Node) heddleRoute {
	r := heddleRoute{Underlay: fromAddr(n.Underlay), PortFirst: n.Planes.TCP.DirectPorts.First, PortLast: n.Planes.TCP.DirectPorts.Last}
	if n.Direct() {
		r.Flags |= uint32(heddleRouteFlagsROUTE_DIRECT)
	}
	if n.Planes.TCP.Firewall {
		r.Flags |= uint32(heddleRouteFlagsROUTE_FIREWALL)
	}
	return r
}

// toVTEP gives a node's hardware address as the programs have it; the zero value if it has none:
// what is for it is routed.
func toVTEP(mac string) (v heddleVtep) {
	if hw, err := net.ParseMAC(mac); err == nil {
		copy(v.Mac[:], hw)
	}
	return v
}

// mappedNode gives by what addresses a node on an IPv6 underlay is known.
func mappedNode(n *model.Node) heddleMappedNode {
	return heddleMappedNode{Outer: fromAddr(n.IPv6.Address), Inner: fromAddr(n.Underlay).Word[3], PortFirst: n.Planes.TCP.DirectPorts.First, PortLast: n.Planes.TCP.DirectPorts.Last}
}

// movedPrefixes gives the addresses that live on n by a move. An endpoint of this node's prefixes
// that lives elsewhere is nobody else's: its entry is longer than the prefix's.
func movedPrefixes(n *model.Node) []netip.Prefix {
	out := make([]netip.Prefix, len(n.Moved))
	for i, a := range n.Moved {
		out[i] = hostPrefix(a)
	}
	return out
}

func hostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
