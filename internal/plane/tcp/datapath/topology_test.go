package datapath

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
)

// contents gives what route_by_prefix is to have, without states of direct paths.
func (t *topology) contents() map[heddleRouteKey]heddleRoute {
	out := make(map[heddleRouteKey]heddleRoute, len(t.routes))
	for k := range t.routes {
		out[k] = t.routes.best(k)
	}
	return out
}

// topologyAnew computes the contents of route_by_prefix and node_by_underlay in another way than
// topology: from everything, in the order in which one thing overrides another.
func topologyAnew(self string, local []netip.Prefix, nodes []model.Node, endpoints []model.Endpoint) (map[heddleRouteKey]heddleRoute, map[heddleAddress]heddleRoute) {
	routes := make(map[heddleRouteKey]heddleRoute)
	byUnderlay := make(map[heddleAddress]heddleRoute)
	byName := routesOfNodes(nodes)
	own := slices.Clone(local)
	for _, n := range nodes {
		r := byName[n.Name]
		byUnderlay[r.Underlay] = r
		if n.Name == self {
			r.Flags |= uint32(heddleRouteFlagsROUTE_SELF)
			own = append(own, hostPrefix(n.Underlay))
		}
		for _, p := range n.Prefixes {
			routes[routeKey(p)] = r
			if n.Name == self {
				own = append(own, hostPrefix(model.Gateway(p)))
			} else {
				// The gateway address is the node's own: no intercepted listener is there.
				plain := r
				plain.Flags |= uint32(heddleRouteFlagsROUTE_PLAIN)
				routes[routeKey(hostPrefix(model.Gateway(p)))] = plain
			}
		}
		for _, p := range movedPrefixes(&n) {
			routes[routeKey(p)] = r
		}
	}
	node := byName[self]
	node.Flags = uint32(heddleRouteFlagsROUTE_NODE_ADDR)
	for _, p := range own {
		routes[routeKey(p)] = node
	}
	maps.Copy(routes, plainRoutes(self, byName, endpoints))
	addAdopted(routes, byName, self, endpoints)
	return routes, byUnderlay
}

// routesOfNodes gives how each node is reached.
func routesOfNodes(nodes []model.Node) map[string]heddleRoute {
	byName := make(map[string]heddleRoute, len(nodes))
	for _, n := range nodes {
		r := heddleRoute{Underlay: fromAddr(n.Underlay), PortFirst: n.Planes.TCP.DirectPorts.First, PortLast: n.Planes.TCP.DirectPorts.Last}
		if n.Direct() {
			r.Flags |= uint32(heddleRouteFlagsROUTE_DIRECT)
		}
		byName[n.Name] = r
	}
	return byName
}

// plainRoutes gives the entries of the endpoints on other nodes that are not intercepted.
func plainRoutes(self string, byName map[string]heddleRoute, endpoints []model.Endpoint) map[heddleRouteKey]heddleRoute {
	routes := make(map[heddleRouteKey]heddleRoute)
	for _, e := range endpoints {
		if e.Planes.TCP.Intercepted || e.Node == self || e.Adopted != nil {
			continue
		}
		r, known := byName[e.Node]
		if !known {
			continue
		}
		r.Flags |= uint32(heddleRouteFlagsROUTE_PLAIN)
		for _, a := range e.Addrs {
			routes[routeKey(hostPrefix(a))] = r
		}
	}
	return routes
}

// addAdopted adds the endpoints whose addresses are another network's: each by itself, since
// nothing says which of its prefixes are where, and the network's addresses around them.
func addAdopted(routes map[heddleRouteKey]heddleRoute, nodes map[string]heddleRoute, self string, endpoints []model.Endpoint) {
	const plain, adopted = uint32(heddleRouteFlagsROUTE_PLAIN), uint32(heddleRouteFlagsROUTE_ADOPTED)
	claimed := make(map[heddleRouteKey]bool)
	for _, e := range endpoints {
		r, known := nodes[e.Node]
		if e.Adopted == nil || !known {
			continue
		}
		for _, p := range e.Adopted.Prefixes {
			if key := routeKey(p); routes[key] == (heddleRoute{}) {
				routes[key] = heddleRoute{Flags: plain | adopted}
			}
		}
		r.Flags |= adopted
		if e.Node == self {
			r.Flags |= uint32(heddleRouteFlagsROUTE_SELF)
		} else if !e.Planes.TCP.Intercepted {
			r.Flags |= plain
		}
		key := routeKey(hostPrefix(e.Addr4()))
		if claimed[key] {
			// Two nodes say that it is theirs, as may be while it moves. Only the network that
			// carries it can tell.
			r = heddleRoute{Flags: plain | adopted}
		}
		claimed[key] = true
		routes[key] = r
	}
}

// network is one that changes at random: few addresses, so that what one gives up another takes.
type network struct {
	*rand.Rand
	self      string
	local     []netip.Prefix
	nodes     map[string]model.Node
	endpoints model.Endpoints
}

func (w *network) addr(b byte) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 244, b, byte(2 + w.IntN(3))})
}

// node gives the node called n<i>, whose underlay address, ports and second prefix may be what
// another had before.
func (w *network) node(i int) model.Node {
	n := model.Node{Name: fmt.Sprint("n", i), Underlay: netip.AddrFrom4([4]byte{192, 0, 2, byte(w.IntN(7))}),
		Prefixes: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(i), 0}), 24)}}
	if w.IntN(2) == 0 {
		n.Planes.TCP.DirectPorts = model.PortRange{First: 17440, Last: uint16(17450 + w.IntN(2))}
	}
	if spare := netip.MustParsePrefix("10.244.200.0/24"); w.IntN(3) == 0 && !w.any(func(o model.Node) bool { return o.Name != n.Name && slices.Contains(o.Prefixes, spare) }) {
		n.Prefixes = append(n.Prefixes, spare)
	}
	return n
}

func (w *network) any(is func(model.Node) bool) bool {
	return slices.ContainsFunc(slices.Collect(maps.Values(w.nodes)), is)
}

func (w *network) list() []model.Node {
	out := make([]model.Node, 0, len(w.nodes))
	for _, name := range slices.Sorted(maps.Keys(w.nodes)) {
		out = append(out, w.nodes[name])
	}
	return out
}

// change does something to the network that a state of the store may show: underlay addresses are
// of one node each, and what has moved is on one. Endpoints may be on nodes that are not there.
func (w *network) change() {
	i := w.IntN(6)
	name := fmt.Sprint("n", i)
	switch w.IntN(7) {
	case 0, 1:
		n := w.node(i)
		if !w.any(func(o model.Node) bool { return o.Name != name && o.Underlay == n.Underlay }) {
			n.Moved = w.nodes[name].Moved
			w.nodes[name] = n
		}
	case 2:
		if name != w.self {
			delete(w.nodes, name)
		}
	case 3: // an address of n1 or n2 moves, or goes home
		a := w.addr(byte(1 + w.IntN(2)))
		for at, n := range w.nodes {
			n.Moved = slices.DeleteFunc(slices.Clone(n.Moved), func(m netip.Addr) bool { return m == a })
			w.nodes[at] = n
		}
		if n, there := w.nodes[name]; there && w.IntN(3) > 0 {
			n.Moved = append(n.Moved, a)
			slices.SortFunc(n.Moved, netip.Addr.Compare)
			w.nodes[name] = n
		}
	case 4:
		w.local = nil
		for range w.IntN(3) {
			w.local = append(w.local, hostPrefix(netip.AddrFrom4([4]byte{198, 51, 100, byte(w.IntN(3))})))
		}
	default:
		w.changeEndpoints(name, byte(i))
	}
}

// changeEndpoints gives a node other endpoints: with addresses of its own, moved ones, and of
// another network, which others may claim as well.
func (w *network) changeEndpoints(name string, i byte) {
	var group []model.Endpoint
	taken := make(map[netip.Addr]bool)
	for id := range w.IntN(5) {
		e := model.Endpoint{ID: model.EndpointID(id), Node: name, Planes: intercepted(w.IntN(2) == 0), Addrs: []netip.Addr{w.addr(i)}}
		switch moved := w.nodes[name].Moved; {
		case w.IntN(4) == 0:
			e.Addrs[0] = netip.AddrFrom4([4]byte{10, 88, 1, byte(w.IntN(3))})
			e.Adopted = &model.Adopted{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.88.0.0/16"), netip.MustParsePrefix("10.88.1.1/32")}[:1+w.IntN(2)]}
		case w.IntN(4) == 0 && len(moved) > 0:
			e.Addrs[0] = moved[0]
		}
		if !taken[e.Addrs[0]] {
			taken[e.Addrs[0]] = true
			group = append(group, e)
		}
	}
	w.endpoints = w.endpoints.With(map[string][]model.Endpoint{name: group})
}

func flat(es model.Endpoints) []model.Endpoint { return slices.Collect(es.All()) }

func mapContents[K, V comparable](t *testing.T, m *ebpf.Map) map[K]V {
	t.Helper()
	have := make(map[K]V)
	var k K
	var v V
	it := m.Iterate()
	for it.Next(&k, &v) {
		have[k] = v
	}
	if err := it.Err(); err != nil {
		t.Fatal(err)
	}
	return have
}

// differingRoutes says what is different about two contents of route_by_prefix.
func differingRoutes(have, want map[heddleRouteKey]heddleRoute) (out string) {
	for k := range want {
		if have[k] != want[k] {
			out += fmt.Sprintf("\n%s/%d: %+v, want %+v", toAddr(k.Addr), k.Prefixlen, have[k], want[k])
		}
	}
	for k := range have {
		if _, is := want[k]; !is {
			out += fmt.Sprintf("\n%s/%d: %+v, want nothing", toAddr(k.Addr), k.Prefixlen, have[k])
		}
	}
	return out
}

func newNetwork(seed uint64) *network {
	w := &network{Rand: rand.New(rand.NewPCG(seed, 1)), self: "n0", nodes: make(map[string]model.Node)}
	w.nodes[w.self] = w.node(0)
	return w
}

// TestTopologyFollowsChanges: whatever sequence of changes led to a network, what is computed of it
// is what is computed from nothing, in another way, too; and what is said to be touched is all that
// has changed.
func TestTopologyFollowsChanges(t *testing.T) {
	for seed := range uint64(50) {
		w := newNetwork(seed)
		top := newTopology(w.self)
		before := top.contents()
		for step := range 200 {
			for range 1 + w.IntN(3) {
				w.change()
			}
			nodes := w.list()
			was := top.change(w.local, nodes, w.endpoints)
			want, byUnderlay := topologyAnew(w.self, w.local, nodes, flat(w.endpoints))
			have := top.contents()
			if diff := differingRoutes(have, want); diff != "" {
				t.Fatalf("seed %d, step %d: other routes than from everything anew:%s", seed, step, diff)
			}
			if !maps.Equal(top.byUnderlay, byUnderlay) {
				t.Fatalf("seed %d, step %d: nodes %v, want %v", seed, step, top.byUnderlay, byUnderlay)
			}
			for k, old := range before {
				if _, touched := was.routes[k]; !touched && have[k] != old || touched && was.routes[k] != old {
					t.Fatalf("seed %d, step %d: %v was %+v; touched (%v) as %+v", seed, step, k, old, touched, was.routes[k])
				}
			}
			before = have
		}
		// Nothing is left behind.
		top.change(nil, nil, nil)
		if len(top.routes)+len(top.byUnderlay)+len(top.nameAt) > 0 {
			t.Fatalf("seed %d: of no nodes and no endpoints there is %v %v", seed, top.routes, top.byUnderlay)
		}
	}
}

// TestSetTopologyFollowsChanges: the same of what is in the maps, with states of direct paths that
// change in between.
func TestSetTopologyFollowsChanges(t *testing.T) {
	d := loadForTest(t)
	w := newNetwork(1)
	states := make(map[heddleAddress]uint32)
	for step := range 200 {
		for range 1 + w.IntN(3) {
			w.change()
		}
		for range w.IntN(3) {
			at, state := netip.AddrFrom4([4]byte{192, 0, 2, byte(w.IntN(7))}), []model.PeerState{model.PeerProven, model.PeerBlocked, model.PeerStripped}[w.IntN(3)]
			if err := d.SetPeerState(at, state); err != nil {
				t.Fatal(err)
			}
			states[fromAddr(at)] = uint32(routeStates[state])
		}
		check := func(when string) {
			t.Helper()
			want, byUnderlay := topologyAnew(w.self, d.routes.local, d.routes.nodes, flat(d.routes.endpoints))
			for k, r := range want {
				if hasState(r) {
					r.Flags |= states[r.Underlay]
					want[k] = r
				}
			}
			if diff := differingRoutes(mapContents[heddleRouteKey, heddleRoute](t, d.objs.RouteByPrefix), want); diff != "" {
				t.Fatalf("step %d, %s:%s", step, when, diff)
			}
			if have := mapContents[heddleAddress, heddleRoute](t, d.objs.NodeByUnderlay); !maps.Equal(have, byUnderlay) {
				t.Fatalf("step %d, %s: nodes %v, want %v", step, when, have, byUnderlay)
			}
		}
		if step > 0 {
			check("states changed")
		}
		if step%50 == 49 { // as after a failure, with entries that somebody else has changed
			d.routes.known = false
			for k := range d.routes.routes {
				if err := d.objs.RouteByPrefix.Delete(&k); err != nil {
					t.Fatal(err)
				}
				break
			}
		}
		if err := d.SetTopology(w.self, w.local, w.list(), w.endpoints); err != nil {
			t.Fatal(err)
		}
		check("network changed")
	}
}

// TestPeerStateAfterErrors: a state that could not be written is written by the next call, other
// nodes' states in the meantime, and while a topology is half written, those of the routes that
// there are.
func TestPeerStateAfterErrors(t *testing.T) {
	var early writtenTopology
	if err := early.setPeerState(nil, fromAddr(underlayA), 0); err != nil {
		t.Errorf("before there is a topology: %v", err)
	}
	d := loadForTest(t)
	underlayC := netip.MustParseAddr("192.0.2.33")
	nodes := []model.Node{
		{Name: "a", Underlay: underlayA, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}, Planes: takesDirect(d.cfg.DirectPorts)},
		{Name: "b", Underlay: underlayB, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.2.0/24")}, Planes: takesDirect(d.cfg.DirectPorts)},
		{Name: "c", Underlay: underlayC, Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.3.0/24")}, Planes: takesDirect(d.cfg.DirectPorts)},
	}
	if err := d.SetTopology("b", nil, nodes, nil); err != nil {
		t.Fatal(err)
	}
	set := func(when string, at netip.Addr, state model.PeerState, prefix string) {
		t.Helper()
		if err := d.SetPeerState(at, state); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		key, r := routeKey(netip.MustParsePrefix(prefix)), heddleRoute{}
		if err := d.objs.RouteByPrefix.Lookup(&key, &r); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		if got := heddleRouteFlags(r.Flags) & heddleRouteFlagsROUTE_NOT_PROVEN; got != routeStates[state] {
			t.Errorf("%s: the route to %s has %#x, want %#x", when, prefix, got, routeStates[state])
		}
	}
	// A map with other keys refuses what is written.
	if err := d.routes.setPeerState(d.objs.NodeByUnderlay, fromAddr(underlayA), uint32(routeStates[model.PeerBlocked])); err == nil {
		t.Fatal("no error of a map that cannot be written")
	}
	set("after another's failed", underlayC, model.PeerStripped, "10.244.3.0/24")
	set("after it failed", underlayA, model.PeerBlocked, "10.244.1.0/24")

	nodes = slices.Clone(nodes)
	nodes[0].Prefixes = []netip.Prefix{netip.MustParsePrefix("10.244.4.0/24")}
	routes := d.objs.RouteByPrefix
	d.objs.RouteByPrefix = d.objs.NodeByUnderlay
	err := d.SetTopology("b", nil, nodes, nil)
	d.objs.RouteByPrefix = routes
	if err == nil {
		t.Fatal("no error of a topology that cannot be written")
	}
	set("topology not written", underlayA, model.PeerProven, "10.244.1.0/24")
	if err := d.SetTopology("b", nil, nodes, nil); err != nil {
		t.Fatal(err)
	}
	set("topology written", underlayA, model.PeerStripped, "10.244.4.0/24")
}
