package model

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"sort"
)

// Endpoints are the endpoints of many nodes, in groups: one for each node that has any, sorted by
// id; the groups are sorted by the names of their nodes. Lists share groups, so that nobody must
// write to one. A group that is another list's, its memory included, has not changed: what is
// different about two lists is found without a look at the rest.
type Endpoints [][]Endpoint

// EndpointsOf gives the list of some endpoints, which may be in any order.
func EndpointsOf(some ...Endpoint) Endpoints {
	byNode := make(map[string][]Endpoint)
	for _, e := range some {
		byNode[e.Node] = append(byNode[e.Node], e)
	}
	for _, group := range byNode {
		slices.SortStableFunc(group, func(a, b Endpoint) int { return cmp.Compare(a.ID, b.ID) })
	}
	return Endpoints(nil).With(byNode)
}

// All gives every endpoint, in order.
func (es Endpoints) All() iter.Seq[Endpoint] {
	return func(yield func(Endpoint) bool) {
		for _, group := range es {
			for i := range group {
				if !yield(group[i]) {
					return
				}
			}
		}
	}
}

// Len gives the number of endpoints.
func (es Endpoints) Len() (n int) {
	for _, group := range es {
		n += len(group)
	}
	return n
}

// Of gives the endpoints of one node.
func (es Endpoints) Of(node string) []Endpoint {
	at, found := slices.BinarySearchFunc(es, node, func(group []Endpoint, name string) int { return cmp.Compare(group[0].Node, name) })
	if !found {
		return nil
	}
	return es[at]
}

// With gives the list with other groups for some nodes, sorted by id; an empty one takes the node's
// endpoints out.
func (es Endpoints) With(groups map[string][]Endpoint) Endpoints {
	out := make(Endpoints, 0, len(es)+len(groups))
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		for len(es) > 0 && es[0][0].Node < name {
			out, es = append(out, es[0]), es[1:]
		}
		if len(es) > 0 && es[0][0].Node == name {
			es = es[1:]
		}
		if group := groups[name]; len(group) > 0 {
			out = append(out, group)
		}
	}
	return append(out, es...)
}

// Patched gives a copy of a group with what some ids stand for now; nil: nothing. It costs the
// copy.
func Patched(group []Endpoint, now map[EndpointID]*Endpoint) []Endpoint {
	out := make([]Endpoint, 0, len(group)+len(now))
	for _, id := range slices.Sorted(maps.Keys(now)) {
		at := sort.Search(len(group), func(i int) bool { return group[i].ID >= id })
		out, group = append(out, group[:at]...), group[at:]
		if len(group) > 0 && group[0].ID == id {
			group = group[1:]
		}
		if e := now[id]; e != nil {
			out = append(out, *e)
		}
	}
	return append(out, group...)
}

// Same reports whether two lists are one, their memory included.
func (es Endpoints) Same(other Endpoints) bool { return sameMemory(es, other) }

// GroupChange is that a node has other endpoints than before; nil: none.
type GroupChange struct {
	Node          string
	Before, After []Endpoint
}

// ChangedSince gives the groups that are not those of an earlier list. It costs a comparison for
// each node, and looks at no endpoint.
func (es Endpoints) ChangedSince(before Endpoints) (out []GroupChange) {
	if es.Same(before) {
		return nil
	}
	for len(es) > 0 || len(before) > 0 {
		switch {
		case len(before) == 0 || len(es) > 0 && es[0][0].Node < before[0][0].Node:
			out, es = append(out, GroupChange{Node: es[0][0].Node, After: es[0]}), es[1:]
		case len(es) == 0 || es[0][0].Node > before[0][0].Node:
			out, before = append(out, GroupChange{Node: before[0][0].Node, Before: before[0]}), before[1:]
		default:
			if !sameMemory(es[0], before[0]) {
				out = append(out, GroupChange{Node: es[0][0].Node, Before: before[0], After: es[0]})
			}
			es, before = es[1:], before[1:]
		}
	}
	return out
}

func sameMemory[T any](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// Equal reports whether two nodes are the same in everything.
func (n *Node) Equal(m *Node) bool {
	return n.Name == m.Name && n.Underlay == m.Underlay && n.IPv6 == m.IPv6 && n.WireGuard == m.WireGuard && n.VTEPMAC == m.VTEPMAC && n.ReadsSchema == m.ReadsSchema && n.Planes == m.Planes && n.PeerAPI == m.PeerAPI &&
		slices.Equal(n.Prefixes, m.Prefixes) && slices.Equal(n.Moved, m.Moved)
}

// NodeChange is that a node is another than before; nil: it is not there.
type NodeChange struct {
	Before, After *Node
}

// Name gives the node's name.
func (c NodeChange) Name() string {
	if c.After != nil {
		return c.After.Name
	}
	return c.Before.Name
}

// ChangedNodes gives what is different about two lists of nodes, both sorted by name. It costs a
// comparison for each node, or nothing if the lists are one.
func ChangedNodes(before, after []Node) (out []NodeChange) {
	if sameMemory(before, after) {
		return nil
	}
	for len(before) > 0 || len(after) > 0 {
		switch {
		case len(before) == 0 || len(after) > 0 && after[0].Name < before[0].Name:
			out, after = append(out, NodeChange{After: &after[0]}), after[1:]
		case len(after) == 0 || after[0].Name > before[0].Name:
			out, before = append(out, NodeChange{Before: &before[0]}), before[1:]
		default:
			if !before[0].Equal(&after[0]) {
				out = append(out, NodeChange{Before: &before[0], After: &after[0]})
			}
			before, after = before[1:], after[1:]
		}
	}
	return out
}

// Sides gives what changed nodes were and what they are.
func Sides(changes []NodeChange) (before, now []Node) {
	for _, c := range changes {
		if c.Before != nil {
			before = append(before, *c.Before)
		}
		if c.After != nil {
			now = append(now, *c.After)
		}
	}
	return before, now
}
