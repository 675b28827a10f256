package model

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
)

// endpoints gives those of a node by ids, which are in order.
func endpoints(node, name string, ids ...int) (out []Endpoint) {
	for _, id := range ids {
		out = append(out, Endpoint{Node: node, ID: EndpointID(id), Name: name})
	}
	return out
}

// randomIDs gives as many different ids below limit, in order.
func randomIDs(r *rand.Rand, n, limit int) []int {
	ids := r.Perm(limit)[:n]
	slices.Sort(ids)
	return ids
}

// checkOrder fails unless es is in order, in groups that are none too large, and holds each
// endpoint once.
func checkOrder(t *testing.T, es Endpoints) {
	t.Helper()
	flat := slices.Collect(es.All())
	if !slices.IsSortedFunc(flat, func(a, b Endpoint) int { return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.ID, b.ID), 1) }) {
		t.Fatalf("not in order, or twice: %v", flat)
	}
	for i, group := range es {
		if len(group) == 0 || len(group) > GroupSize || group[0].Node != group[len(group)-1].Node {
			t.Fatalf("group %d has %d endpoints", i, len(group))
		}
	}
	if len(flat) != es.Len() {
		t.Fatalf("%d endpoints, and Len says %d", len(flat), es.Len())
	}
}

// apply gives a list that changes lead to, in another way than lists are made.
func apply(list Endpoints, changes []GroupChange) []Endpoint {
	all := make(map[string]Endpoint)
	key := func(e Endpoint) string { return fmt.Sprintf("%s/%05d", e.Node, e.ID) }
	for e := range list.All() {
		all[key(e)] = e
	}
	for _, c := range changes {
		for e := range c.Before.All() {
			delete(all, key(e))
		}
	}
	for _, c := range changes {
		for e := range c.After.All() {
			all[key(e)] = e
		}
	}
	var out []Endpoint
	for _, k := range slices.Sorted(maps.Keys(all)) {
		out = append(out, all[k])
	}
	return out
}

// TestEndpointsChange: what ChangedSince names, and nothing else, leads from one list to the next.
func TestEndpointsChange(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	list := EndpointsOf()
	for step := range 500 {
		byNode := make(map[string][]Endpoint)
		for range r.IntN(4) {
			name := fmt.Sprint("n", r.IntN(6))
			size := []int{r.IntN(3), r.IntN(3 * GroupSize)}[r.IntN(2)]
			byNode[name] = endpoints(name, fmt.Sprint(step), randomIDs(r, size, 2000)...)
		}
		next := list.With(byNode)
		checkOrder(t, next)
		for name, want := range byNode {
			if got := next.Of(name); len(got) != len(want) || len(got) > 0 && !reflect.DeepEqual(got, want) {
				t.Fatalf("step %d: %s has %d endpoints, want %d", step, name, len(got), len(want))
			}
		}
		changes := next.ChangedSince(list)
		for _, c := range changes {
			if _, named := byNode[c.Node]; !named {
				t.Fatalf("step %d: %s has changed, which has not", step, c.Node)
			}
		}
		if !reflect.DeepEqual(apply(list, changes), slices.Collect(next.All())) {
			t.Fatalf("step %d: the changes lead to something else", step)
		}
		list = next
	}
}

// TestPatched: a node's groups have what a change says, and a change of one endpoint among ten
// thousand touches one group, or two neighbours that it makes one.
func TestPatched(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 4))
	want := make(map[EndpointID]Endpoint)
	var list Endpoints
	for step := range 3000 {
		now := make(map[EndpointID]*Endpoint)
		grows := step < 1500
		for range 1 + r.IntN(8)*r.IntN(2) {
			id := EndpointID(1 + r.IntN(int(MaxEndpointID)))
			if (r.IntN(8) > 0) == grows {
				now[id] = &Endpoint{Node: "n1", ID: id, Name: fmt.Sprint(step)}
				want[id] = *now[id]
			} else {
				now[id] = nil
				delete(want, id)
			}
		}
		next := list.Patched(now)
		if step%50 == 0 {
			checkOrder(t, next)
		}
		old, fresh := 0, 0
		for _, c := range next.ChangedSince(list) {
			old, fresh = old+len(c.Before), fresh+len(c.After)
		}
		if old > 2*len(now) || fresh > 2*len(now)+1 {
			t.Fatalf("step %d: a change of %d endpoints has touched %d groups, which are %d now", step, len(now), old, fresh)
		}
		list = next
	}
	got := make(map[EndpointID]Endpoint)
	for e := range list.All() {
		got[e.ID] = e
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("%d endpoints, want %d", len(got), len(want))
	}
	if most := 1 + 4*list.Len()/GroupSize; len(list) > most {
		t.Errorf("%d endpoints are in %d groups, want %d at most", list.Len(), len(list), most)
	}
}

// TestNodeEqual: Equal looks at every field.
func TestNodeEqual(t *testing.T) {
	base := Node{Name: "n", Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}}
	others := map[string]func(*Node){
		"Name": func(n *Node) { n.Name = "m" }, "Underlay": func(n *Node) { n.Underlay = netip.MustParseAddr("192.0.2.1") },
		"IPv6":      func(n *Node) { n.IPv6.Address = netip.MustParseAddr("fd00::1") },
		"WireGuard": func(n *Node) { n.WireGuard.Key[0] = 1 },
		"Prefixes":  func(n *Node) { n.Prefixes = nil }, "VTEPMAC": func(n *Node) { n.VTEPMAC = "x" },
		"ReadsSchema": func(n *Node) { n.ReadsSchema = 2 }, "Planes": func(n *Node) { n.Planes.TCP.AnswersProbes = true },
		"PeerAPI": func(n *Node) { n.PeerAPI.Port = 1 }, "Moved": func(n *Node) { n.Moved = []netip.Addr{netip.MustParseAddr("10.0.0.9")} },
	}
	fields := reflect.TypeFor[Node]()
	for i := range fields.NumField() {
		change := others[fields.Field(i).Name]
		if change == nil {
			t.Fatalf("nothing changes field %s here: does Equal look at it?", fields.Field(i).Name)
		}
		other := base
		change(&other)
		if base.Equal(&other) || !base.Equal(&Node{Name: "n", Prefixes: slices.Clone(base.Prefixes)}) {
			t.Errorf("Equal does not look at %s", fields.Field(i).Name)
		}
	}
}

// TestChangedNodes: what is named leads from one list to the next.
func TestChangedNodes(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 3))
	var list []Node
	for step := range 500 {
		next := slices.Clone(list)
		for range r.IntN(4) {
			n := Node{Name: fmt.Sprint("n", r.IntN(6)), VTEPMAC: fmt.Sprint(r.IntN(3))}
			next = slices.DeleteFunc(next, func(o Node) bool { return o.Name == n.Name })
			if r.IntN(3) > 0 {
				next = append(next, n)
			}
		}
		slices.SortFunc(next, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
		got := make(map[string]Node)
		for _, n := range list {
			got[n.Name] = n
		}
		for _, c := range ChangedNodes(list, next) {
			if c.Before != nil {
				if c.After != nil && c.Before.Equal(c.After) {
					t.Fatalf("step %d: %v has not changed", step, c.Name())
				}
				delete(got, c.Name())
			}
			if c.After != nil {
				got[c.Name()] = *c.After
			}
		}
		want := make(map[string]Node)
		for _, n := range next {
			want[n.Name] = n
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("step %d: changes of %v lead to %v, want %v", step, list, got, want)
		}
		list = next
	}
}
