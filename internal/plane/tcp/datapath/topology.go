package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
)

// writtenTopology is what the maps were brought to last.
type writtenTopology struct {
	mu    sync.Mutex
	tried bool // SetTopology was called
	known bool // the maps have what routes and byUnderlay say; else nobody knows
	topology
	flags map[heddleAddress]uint32 // of other nodes' direct paths, by underlay address: SetPeerState
	// unsure are nodes whose routes may have other flags than these: they could not be written.
	unsure map[heddleAddress]bool
}

// hasState reports whether the state of its node's direct path matters for r.
func hasState(r heddleRoute) bool {
	const others = heddleRouteFlagsROUTE_SELF | heddleRouteFlagsROUTE_NODE_ADDR | heddleRouteFlagsROUTE_PLAIN
	flags := heddleRouteFlags(r.Flags)
	return flags&heddleRouteFlagsROUTE_DIRECT != 0 && flags&others == 0
}

// withState gives r with the state of its node's direct path, if that matters for it.
func (t *writtenTopology) withState(r heddleRoute) heddleRoute {
	if hasState(r) {
		r.Flags = r.Flags&^uint32(heddleRouteFlagsROUTE_NOT_PROVEN) | t.flags[r.Underlay]
	}
	return r
}

// SetTopology makes the programs know exactly these nodes and, of the endpoints, those on other
// nodes that are not intercepted. self names this node among them; local is what its own processes
// may listen on, beside its gateway and underlay addresses. The caller must not write to the lists
// afterwards. After the first call it costs what is different from the last one, with the endpoints
// of the nodes concerned: entries that do not change are not looked at.
func (d *Datapath) SetTopology(self string, local []netip.Prefix, nodes []model.Node, endpoints model.Endpoints) error {
	t := &d.routes
	t.mu.Lock()
	defer t.mu.Unlock()
	known := t.known && t.self == self
	t.tried, t.known = true, false // as long as this may fail
	if !known {
		t.topology = newTopology(self)
	}
	was := t.change(local, nodes, endpoints)
	var err error
	if known {
		err = errors.Join(
			changeMap(d.objs.RouteByPrefix, was.routes, func(k heddleRouteKey) heddleRoute { return t.routes.best(k) }, t.withState),
			changeMap(d.objs.NodeByUnderlay, was.nodes, func(k heddleAddress) heddleRoute { return t.byUnderlay[k] },
				func(r heddleRoute) heddleRoute { return r }),
			changeMap(d.objs.VtepByUnderlay, was.vteps, func(k heddleAddress) heddleVtep { return t.vteps[k] },
				func(v heddleVtep) heddleVtep { return v }),
			changeMap(d.objs.MappedByInner, was.inner, func(k uint32) heddleMappedNode { return t.byInner[k] }, asIs),
			changeMap(d.objs.MappedByOuter, was.outer, func(k heddleAddress) heddleMappedNode { return t.byOuter[k] }, asIs))
	} else {
		routes := make(map[heddleRouteKey]heddleRoute, len(t.routes))
		for k := range t.routes {
			routes[k] = t.withState(t.routes.best(k))
		}
		err = errors.Join(syncMap(d.objs.RouteByPrefix, routes), syncMap(d.objs.NodeByUnderlay, t.byUnderlay),
			syncMap(d.objs.VtepByUnderlay, t.vteps),
			syncMap(d.objs.MappedByInner, t.byInner), syncMap(d.objs.MappedByOuter, t.byOuter))
	}
	if err != nil {
		return fmt.Errorf("write topology: %w", err)
	}
	if !known {
		clear(t.unsure) // all flags are written
	}
	t.known = true
	return nil
}

func asIs(m heddleMappedNode) heddleMappedNode { return m }

// setPeerState notes the flags of routes to the node at underlay, and brings those that there are
// to them. After an error some routes may have them and others not, until the next call for this
// node or SetTopology of everything.
func (t *writtenTopology) setPeerState(m *ebpf.Map, underlay heddleAddress, flags uint32) error {
	if t.flags == nil {
		t.flags, t.unsure = make(map[heddleAddress]uint32), make(map[heddleAddress]bool)
	}
	before := t.flags[underlay]
	t.flags[underlay] = flags
	if !t.tried || before == flags && !t.unsure[underlay] {
		return nil // SetTopology writes them, or they are there
	}
	t.unsure[underlay] = true
	routes, err := t.routesTo(m, underlay)
	if err != nil {
		return fmt.Errorf("list %s: %w", m, err)
	}
	for k, r := range routes {
		r = t.withState(r)
		if err := m.Put(&k, &r); err != nil {
			return fmt.Errorf("update %s: %w", m, err)
		}
	}
	delete(t.unsure, underlay)
	return nil
}

// routesTo gives the routes in m that have the state of the direct path to underlay.
func (t *writtenTopology) routesTo(m *ebpf.Map, underlay heddleAddress) (map[heddleRouteKey]heddleRoute, error) {
	out := make(map[heddleRouteKey]heddleRoute)
	if t.known {
		t.each(t.nameAt[underlay], func(k heddleRouteKey, _ candidate) {
			if r := t.routes.best(k); hasState(r) && r.Underlay == underlay {
				out[k] = r
			}
		})
		return out, nil
	}
	// A topology is half written: what the map has of it, and of the one before, counts until it is
	// written whole.
	var k heddleRouteKey
	var r heddleRoute
	it := m.Iterate()
	for it.Next(&k, &r) {
		if hasState(r) && r.Underlay == underlay {
			out[k] = r
		}
	}
	return out, it.Err()
}
