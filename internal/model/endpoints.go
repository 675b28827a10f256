package model

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"sort"
)

// Endpoints are the endpoints of many nodes, in groups: one for each node that has any, several if
// it has many, sorted by id; the groups are sorted by the names of their nodes, then by ids. Lists
// share groups, so that nobody must write to one. A group that is another list's, its memory
// included, has not changed: what is different about two lists is found without a look at the rest.
type Endpoints [][]Endpoint

// GroupSize is how many endpoints a group has at most: a change of one copies no more than these.
// Two neighbours of a node that have no more than half of it together become one.
const GroupSize = 128

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

// Have reports whether is says so of an endpoint.
func (es Endpoints) Have(is func(*Endpoint) bool) bool {
	for _, group := range es {
		for i := range group {
			if is(&group[i]) {
				return true
			}
		}
	}
	return false
}

// Len gives the number of endpoints.
func (es Endpoints) Len() (n int) {
	for _, group := range es {
		n += len(group)
	}
	return n
}

// Groups gives the groups of one node.
func (es Endpoints) Groups(node string) Endpoints {
	at := sort.Search(len(es), func(i int) bool { return es[i][0].Node >= node })
	if at == len(es) || es[at][0].Node != node {
		return nil
	}
	return slices.Clip(es[at:].firstNode())
}

// Of gives the endpoints of one node: a copy, if they are in several groups.
func (es Endpoints) Of(node string) []Endpoint { return es.Groups(node).Joined() }

// Joined gives the endpoints as one list: a copy, if they are in several groups.
func (es Endpoints) Joined() []Endpoint {
	if len(es) == 1 {
		return es[0]
	}
	return slices.Concat(es...)
}

// With gives the list with other endpoints for some nodes, sorted by id; an empty list takes the
// node's out.
func (es Endpoints) With(byNode map[string][]Endpoint) Endpoints {
	groups := make(map[string]Endpoints, len(byNode))
	for name, all := range byNode {
		groups[name] = appendGroups(nil, all)
	}
	return es.WithGroups(groups)
}

// WithGroups gives the list with other groups for some nodes, which are groups of lists.
func (es Endpoints) WithGroups(byNode map[string]Endpoints) Endpoints {
	more := 0
	for _, groups := range byNode {
		more += len(groups)
	}
	out := make(Endpoints, 0, len(es)+more)
	for _, name := range slices.Sorted(maps.Keys(byNode)) {
		for len(es) > 0 && es[0][0].Node < name {
			out, es = append(out, es[0]), es[1:]
		}
		for len(es) > 0 && es[0][0].Node == name {
			es = es[1:]
		}
		out = append(out, byNode[name]...)
	}
	return append(out, es...)
}

// appendGroups appends endpoints of one node, sorted by id, in groups of about the same size.
func appendGroups(to Endpoints, all []Endpoint) Endpoints {
	for n := (len(all) + GroupSize - 1) / GroupSize; n > 0; n-- {
		size := (len(all) + n - 1) / n
		to, all = append(to, all[:size:size]), all[size:]
	}
	return to
}

// Patched gives the groups of one node with what some ids stand for now; nil: nothing. It costs a
// copy of the groups that have these, and of the list of groups.
func (es Endpoints) Patched(now map[EndpointID]*Endpoint) Endpoints {
	out := make(Endpoints, 0, len(es)+1)
	ids := slices.Sorted(maps.Keys(now))
	for i, group := range es {
		here := len(ids)
		if i+1 < len(es) {
			here = sort.Search(len(ids), func(k int) bool { return ids[k] >= es[i+1][0].ID })
		}
		if here > 0 {
			group = patched(group, ids[:here], now)
			ids = ids[here:]
		}
		if n := len(out); n > 0 && len(group) > 0 && len(out[n-1])+len(group) <= GroupSize/2 {
			group, out = slices.Concat(out[n-1], group), out[:n-1]
		}
		out = appendGroups(out, group)
	}
	return appendGroups(out, patched(nil, ids, now)) // these: if there were no groups
}

// patched gives a copy of a group with what some ids stand for now, which are sorted.
func patched(group []Endpoint, ids []EndpointID, now map[EndpointID]*Endpoint) []Endpoint {
	out := make([]Endpoint, 0, len(group)+len(ids))
	for _, id := range ids {
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

// GroupChange is that groups of a node are others than before.
type GroupChange struct {
	Node          string
	Before, After Endpoints
}

// ChangedSince gives what is in groups that are not those of an earlier list, node by node. It
// costs a comparison for each group, and looks at no endpoint.
func (es Endpoints) ChangedSince(before Endpoints) (out []GroupChange) {
	if es.Same(before) {
		return nil
	}
	for len(es) > 0 || len(before) > 0 {
		was, is := before.firstNode(), es.firstNode()
		switch {
		case len(was) == 0 || len(is) > 0 && is.node() < was.node():
			was = nil
		case len(is) == 0 || was.node() < is.node():
			is = nil
		}
		before, es = before[len(was):], es[len(is):]
		if gone, come := changedGroups(was, is); len(gone)+len(come) > 0 {
			out = append(out, GroupChange{Node: cmp.Or(gone.node(), come.node()), Before: gone, After: come})
		}
	}
	return out
}

// node gives the name of the first node, "" if there is none.
func (es Endpoints) node() string {
	if len(es) == 0 {
		return ""
	}
	return es[0][0].Node
}

// firstNode gives the groups of the first node.
func (es Endpoints) firstNode() Endpoints {
	n := 0
	for n < len(es) && es[n][0].Node == es[0][0].Node {
		n++
	}
	return es[:n]
}

// changedGroups gives the groups of a node that were and are not, and those that are and were not.
func changedGroups(was, is Endpoints) (gone, come Endpoints) {
	for len(was) > 0 || len(is) > 0 {
		var order int // what begins first goes first: the other may yet come on the other side
		switch {
		case len(is) == 0:
			order = -1
		case len(was) == 0:
			order = 1
		case sameMemory(was[0], is[0]):
			was, is = was[1:], is[1:]
			continue
		default:
			order = cmp.Compare(was[0][0].ID, is[0][0].ID)
		}
		if order <= 0 {
			gone, was = append(gone, was[0]), was[1:]
		}
		if order >= 0 {
			come, is = append(come, is[0]), is[1:]
		}
	}
	return gone, come
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
