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
	known bool // the maps have what routes and byUnderlay say; else nobody knows
	topology
	flags map[heddleAddress]uint32 // of other nodes' direct paths, by underlay address: SetPeerState
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

// SetTopology makes the programs know exactly these nodes and, of the endpoints, those on other nodes
// that are not intercepted. self names this node among them; local is what its own processes may
// listen on, beside its gateway and underlay addresses. The caller must not
// write to the lists afterwards. After the first call it costs what is different from the last one, with the endpoints of the nodes concerned:
// entries that do not change are not looked at.
func (d *Datapath) SetTopology(self string, local []netip.Prefix, nodes []model.Node, endpoints model.Endpoints) error {
	t := &d.routes
	t.mu.Lock()
	defer t.mu.Unlock()
	known := t.known && t.self == self
	t.known = false // as long as this may fail
	if !known {
		t.topology = newTopology(self)
	}
	was := t.change(local, nodes, endpoints)
	var err error
	if known {
		err = errors.Join(
			changeMap(d.objs.RouteByPrefix, was.routes, func(k heddleRouteKey) heddleRoute { return t.routes.winner(k) }, t.withState),
			changeMap(d.objs.NodeByUnderlay, was.nodes, func(k heddleAddress) heddleRoute { return t.byUnderlay[k] },
				func(r heddleRoute) heddleRoute { return r }))
	} else {
		routes := make(map[heddleRouteKey]heddleRoute, len(t.routes))
		for k := range t.routes {
			routes[k] = t.withState(t.routes.winner(k))
		}
		err = errors.Join(syncMap(d.objs.RouteByPrefix, routes), syncMap(d.objs.NodeByUnderlay, t.byUnderlay))
	}
	if err != nil {
		return fmt.Errorf("write topology: %w", err)
	}
	t.known = true
	return nil
}

// changeMap brings entries of m from what they were to what now says: new and changed ones first, so that no key that stays is
// ever missing. The zero value is none. Before it is written, a value passes through written.
func changeMap[K, V comparable](m *ebpf.Map, was map[K]V, now func(K) V, written func(V) V) error {
	var none V
	for k, old := range was {
		v := now(k)
		if v == old || v == none {
			continue
		}
		v = written(v)
		if err := m.Put(&k, &v); err != nil {
			return fmt.Errorf("update %s: %w", m, err)
		}
	}
	for k, old := range was {
		if old == none || now(k) != none {
			continue
		}
		if err := ignoreAbsent(m.Delete(&k)); err != nil {
			return fmt.Errorf("delete from %s: %w", m, err)
		}
	}
	return nil
}

// setPeerState notes the flags of routes to the node at underlay, and brings those that there are to them.
func (t *writtenTopology) setPeerState(m *ebpf.Map, underlay heddleAddress, flags uint32) error {
	if t.flags == nil {
		t.flags = make(map[heddleAddress]uint32)
	}
	before := t.flags[underlay]
	t.flags[underlay] = flags
	if !t.known || before == flags {
		return nil // SetTopology writes them, or they are there
	}
	var err error
	t.each(t.nameAt[underlay], func(k heddleRouteKey, _ claim) {
		if r := t.routes.winner(k); err == nil && hasState(r) && r.Underlay == underlay {
			r = t.withState(r)
			err = m.Put(&k, &r)
		}
	})
	if err != nil {
		t.known = false
		return fmt.Errorf("update %s: %w", m, err)
	}
	return nil
}
