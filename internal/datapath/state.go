package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
)

// fromAddr gives an address in the maps' form: IPv4 is v4-mapped, words keep network byte order.
func fromAddr(a netip.Addr) heddleAddress {
	b := a.As16()
	var out heddleAddress
	for i := range out.Word {
		out.Word[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return out
}

// toAddr is the inverse of fromAddr; v4-mapped addresses come out as IPv4.
func toAddr(a heddleAddress) netip.Addr {
	var b [16]byte
	for i, w := range a.Word {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	return netip.AddrFrom16(b).Unmap()
}

// toPort converts a port as the kernel stores it (network byte order) to host byte order, and back.
func toPort(be uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], be)
	return binary.BigEndian.Uint16(b[:])
}

func routeKey(p netip.Prefix) heddleRouteKey {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	return heddleRouteKey{Prefixlen: uint32(bits), Addr: fromAddr(p.Masked().Addr())}
}

// ContainerSide is what the programs must know of an endpoint's network namespace: a socket of the node
// answers for the container's devices and limits.
type ContainerSide struct {
	Netns   uint32 // inode of the namespace
	Ifindex int    // of the endpoint's device there
	Device  string // its name
	// ResolverPort is where Docker's DNS listens there for TCP, at 127.0.0.11, in host byte order; 0: nowhere.
	ResolverPort uint16
	// IDs are nil if not known: then TCP with processes that are not intercepted does not find the other side.
	IDs *NetnsIDs
}

// NetnsIDs are the ids that the container's and the node's network namespace have in each other.
type NetnsIDs struct {
	Container, Node int
}

// SetEndpoint makes an endpoint of this node known to the programs, or changes it. ifindex is the node
// side of its veth.
func (d *Datapath) SetEndpoint(e model.Endpoint, ifindex int, inside ContainerSide) error {
	addr := e.Addr4()
	if !addr.IsValid() {
		return fmt.Errorf("endpoint %s: has no IPv4 overlay address", e.Name)
	}
	v := heddleEndpoint{
		Addr4: fromAddr(addr), Id: uint32(e.ID), Ifindex: uint32(ifindex),
		Netns: inside.Netns, ContainerIfindex: uint32(inside.Ifindex), Nsid: -1, NodeNsid: -1,
		Incarnation: e.Incarnation(), ResolverPort: toPort(inside.ResolverPort),
	}
	if inside.IDs != nil {
		v.Nsid, v.NodeNsid = int32(inside.IDs.Container), int32(inside.IDs.Node)
	}
	for i, b := range []byte(inside.Device[:min(len(inside.Device), len(v.Device)-1)]) {
		v.Device[i] = int8(b)
	}
	if e.Intercepted {
		v.Flags |= uint32(heddleEndpointFlagsENDPOINT_INTERCEPTED)
	}
	if e.Carried != nil {
		v.Flags |= uint32(heddleEndpointFlagsENDPOINT_CARRIED)
	}
	d.incarnations.Store(e.ID, v.Incarnation)
	err := errors.Join(
		d.openAccount(e.ID),
		d.openSockets(e.ID),
		d.openPorts(e.ID),
		d.objs.EndpointById.Put(v.Id, &v),
		d.objs.EndpointByIfindex.Put(v.Ifindex, &v),
		d.objs.EndpointByAddr.Put(v.Addr4, &v),
	)
	if err != nil {
		return fmt.Errorf("endpoint %s: write maps: %w", e.Name, err)
	}
	return nil
}

// DeleteEndpoint forgets endpoint id. Its sockets keep their tags and are refused what is new
// (REFUSE_UNKNOWN_ENDPOINT). An unknown id is no error.
func (d *Datapath) DeleteEndpoint(id model.EndpointID) error {
	var v heddleEndpoint
	if err := d.objs.EndpointById.Lookup(uint32(id), &v); err != nil {
		return ignoreAbsent(err)
	}
	return errors.Join(
		d.closeAccount(id),
		d.closeSockets(id),
		d.closePorts(id),
		ignoreAbsent(d.objs.EndpointById.Delete(v.Id)),
		ignoreAbsent(d.objs.EndpointByIfindex.Delete(v.Ifindex)),
		ignoreAbsent(d.objs.EndpointByAddr.Delete(v.Addr4)),
	)
}

// KeepEndpoints forgets every endpoint that is not in keep: those an earlier agent left behind.
func (d *Datapath) KeepEndpoints(keep map[model.EndpointID]bool) error {
	var (
		id    uint32
		v     heddleEndpoint
		stale []uint32
	)
	it := d.objs.EndpointById.Iterate()
	for it.Next(&id, &v) {
		if !keep[model.EndpointID(id)] {
			stale = append(stale, id)
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("list endpoints: %w", err)
	}
	var errs []error
	for _, id := range stale {
		errs = append(errs, d.DeleteEndpoint(model.EndpointID(id)))
	}
	return errors.Join(errs...)
}

// writtenTopology is what the maps were brought to last.
type writtenTopology struct {
	mu         sync.Mutex
	routes     map[heddleRouteKey]heddleRoute // nil: nobody knows
	byUnderlay map[heddleAddress]heddleRoute
	self       string
	local      []netip.Prefix
	nodes      []model.Node
	prefixesAt map[netip.Addr][]netip.Prefix // of nodes, by underlay address
	endpoints  []model.Endpoint
	flags      map[heddleAddress]uint32 // of other nodes' direct paths, by underlay address: SetPeerState
}

// withState gives r with the state of its node's direct path, if that matters for it.
func (t *writtenTopology) withState(r heddleRoute) heddleRoute {
	const others = heddleRouteFlagsROUTE_SELF | heddleRouteFlagsROUTE_NODE_ADDR | heddleRouteFlagsROUTE_PLAIN
	if flags := heddleRouteFlags(r.Flags); flags&heddleRouteFlagsROUTE_DIRECT != 0 && flags&others == 0 {
		r.Flags = r.Flags&^uint32(heddleRouteFlagsROUTE_NOT_PROVEN) | t.flags[r.Underlay]
	}
	return r
}

// SetTopology makes the programs know exactly these nodes and, of the endpoints, those on other nodes
// that are not intercepted. self names this node among them; local is what its own processes may
// listen on, beside its gateway and underlay addresses. Entries that do not change are not touched. The caller must not
// write to the slices afterwards: nodes that are those of the last call, their memory included, have not changed, and
// then the cost is that of the endpoints that have.
func (d *Datapath) SetTopology(self string, local []netip.Prefix, nodes []model.Node, endpoints []model.Endpoint) error {
	last := &d.routes
	last.mu.Lock()
	defer last.mu.Unlock()
	haveRoutes, haveNodes := last.routes, last.byUnderlay
	last.routes, last.byUnderlay = nil, nil // as long as this may fail
	var routes map[heddleRouteKey]heddleRoute
	byUnderlay := haveNodes
	stale, fresh := unlike(last.endpoints, endpoints)
	// Those of other networks, and those that have moved, share entries, so that what changes cannot be told from what has changed.
	shared := slices.ContainsFunc(stale, isCarried) || slices.ContainsFunc(fresh, isCarried) || anyMoved(nodes, stale, fresh)
	if haveRoutes != nil && !shared && last.self == self && slices.Equal(last.local, local) && sameNodes(last.nodes, nodes) {
		byName := routesOfNodes(nodes)
		routes = haveRoutes
		if err := changeMap(d.objs.RouteByPrefix, routes, plainRoutes(self, byName, stale), plainRoutes(self, byName, fresh)); err != nil {
			return fmt.Errorf("write routes: %w", err)
		}
	} else {
		routes, byUnderlay = topology(self, local, nodes, endpoints)
		for k, r := range routes {
			routes[k] = last.withState(r)
		}
		if err := syncMap(d.objs.RouteByPrefix, haveRoutes, routes); err != nil {
			return fmt.Errorf("write routes: %w", err)
		}
		if err := syncMap(d.objs.NodeByUnderlay, haveNodes, byUnderlay); err != nil {
			return fmt.Errorf("write nodes: %w", err)
		}
	}
	last.routes, last.byUnderlay = routes, byUnderlay
	if !sameNodes(last.nodes, nodes) || last.prefixesAt == nil {
		last.prefixesAt = make(map[netip.Addr][]netip.Prefix, len(nodes))
		for _, n := range nodes {
			last.prefixesAt[n.Underlay] = append(append(last.prefixesAt[n.Underlay], n.Prefixes...), movedPrefixes(n)...)
		}
	}
	last.self, last.local, last.nodes, last.endpoints = self, local, nodes, endpoints
	return nil
}

func sameNodes(a, b []model.Node) bool { return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0]) }

// unlike gives the parts of two lists of endpoints between what both begin and end with.
func unlike(a, b []model.Endpoint) (fromA, fromB []model.Endpoint) {
	alike := func(x, y *model.Endpoint) bool {
		return x.Node == y.Node && x.Intercepted == y.Intercepted && slices.Equal(x.Addrs, y.Addrs) && alikeCarried(x.Carried, y.Carried)
	}
	for len(a) > 0 && len(b) > 0 && (&a[0] == &b[0] || alike(&a[0], &b[0])) {
		a, b = a[1:], b[1:]
	}
	for len(a) > 0 && len(b) > 0 && alike(&a[len(a)-1], &b[len(b)-1]) {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	return a, b
}

func isCarried(e model.Endpoint) bool { return e.Carried != nil }

func alikeCarried(x, y *model.Carried) bool {
	return (x == nil) == (y == nil) && (x == nil || slices.Equal(x.Prefixes, y.Prefixes))
}

// changeMap replaces the entries stale of m by fresh; have is what is in m, and becomes what is then.
func changeMap[K, V comparable](m *ebpf.Map, have, stale, fresh map[K]V) error {
	for k, v := range fresh {
		if old, ok := have[k]; ok && old == v {
			continue
		}
		if err := m.Put(&k, &v); err != nil {
			return fmt.Errorf("update: %w", err)
		}
		have[k] = v
	}
	for k := range stale {
		if _, stays := fresh[k]; stays {
			continue
		}
		if err := ignoreAbsent(m.Delete(&k)); err != nil {
			return fmt.Errorf("delete: %w", err)
		}
		delete(have, k)
	}
	return nil
}

// topology computes the contents of route_by_prefix and node_by_underlay.
func topology(self string, local []netip.Prefix, nodes []model.Node, endpoints []model.Endpoint) (map[heddleRouteKey]heddleRoute, map[heddleAddress]heddleRoute) {
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
		for _, p := range movedPrefixes(n) {
			routes[routeKey(p)] = r
		}
	}
	node := byName[self]
	node.Flags = uint32(heddleRouteFlagsROUTE_NODE_ADDR)
	for _, p := range own {
		routes[routeKey(p)] = node
	}
	maps.Copy(routes, plainRoutes(self, byName, endpoints))
	addCarried(routes, byName, self, endpoints)
	return routes, byUnderlay
}

// movedPrefixes gives the addresses that live on n by a move. An endpoint of this node's prefixes that lives elsewhere is
// nobody else's: its entry is longer than the prefix's.
func movedPrefixes(n model.Node) []netip.Prefix {
	out := make([]netip.Prefix, len(n.Moved))
	for i, a := range n.Moved {
		out[i] = hostPrefix(a)
	}
	return out
}

// anyMoved reports whether one of the endpoints has an address that has moved.
func anyMoved(nodes []model.Node, lists ...[]model.Endpoint) bool {
	moved := make(map[netip.Addr]bool)
	for _, n := range nodes {
		for _, a := range n.Moved {
			moved[a] = true
		}
	}
	return len(moved) > 0 && slices.ContainsFunc(lists, func(es []model.Endpoint) bool {
		return slices.ContainsFunc(es, func(e model.Endpoint) bool { return moved[e.Addr4()] })
	})
}

// routesOfNodes gives how each node is reached.
func routesOfNodes(nodes []model.Node) map[string]heddleRoute {
	byName := make(map[string]heddleRoute, len(nodes))
	for _, n := range nodes {
		r := heddleRoute{Underlay: fromAddr(n.Underlay), PortFirst: n.DirectPorts.First, PortLast: n.DirectPorts.Last}
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
		if e.Intercepted || e.Node == self || e.Carried != nil {
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

// addCarried adds the endpoints whose addresses are another network's: each by itself, since nothing says which of its
// prefixes are where, and the network's addresses around them.
func addCarried(routes map[heddleRouteKey]heddleRoute, nodes map[string]heddleRoute, self string, endpoints []model.Endpoint) {
	const plain, carried = uint32(heddleRouteFlagsROUTE_PLAIN), uint32(heddleRouteFlagsROUTE_CARRIED)
	claimed := make(map[heddleRouteKey]bool)
	for _, e := range endpoints {
		r, known := nodes[e.Node]
		if e.Carried == nil || !known {
			continue
		}
		for _, p := range e.Carried.Prefixes {
			if key := routeKey(p); routes[key] == (heddleRoute{}) {
				routes[key] = heddleRoute{Flags: plain | carried}
			}
		}
		r.Flags |= carried
		if e.Node == self {
			r.Flags |= uint32(heddleRouteFlagsROUTE_SELF)
		} else if !e.Intercepted {
			r.Flags |= plain
		}
		key := routeKey(hostPrefix(e.Addr4()))
		if claimed[key] {
			// Two nodes say that it is theirs, as may be while it moves. Only the network that carries it can tell.
			r = heddleRoute{Flags: plain | carried}
		}
		claimed[key] = true
		routes[key] = r
	}
}

func hostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// syncMap brings m to the contents of want: new and changed entries first, then stale ones out, so no
// key that stays is ever missing. have is what is in m, or nil to read that.
func syncMap[K, V comparable](m *ebpf.Map, have, want map[K]V) error {
	var (
		k     K
		v     V
		stale []K
	)
	if have == nil {
		have = make(map[K]V)
		it := m.Iterate()
		for it.Next(&k, &v) {
			have[k] = v
		}
		if err := it.Err(); err != nil {
			return fmt.Errorf("list %s: %w", m, err)
		}
	}
	for k, v := range want {
		if old, ok := have[k]; ok && old == v {
			continue
		}
		if err := m.Put(&k, &v); err != nil {
			return fmt.Errorf("update: %w", err)
		}
	}
	for k := range have {
		if _, ok := want[k]; !ok {
			stale = append(stale, k)
		}
	}
	for _, k := range stale {
		if err := ignoreAbsent(m.Delete(&k)); err != nil {
			return fmt.Errorf("delete: %w", err)
		}
	}
	return nil
}

func ignoreAbsent(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}
