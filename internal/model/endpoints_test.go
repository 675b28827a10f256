package model

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
)

// TestEndpointsChange: what ChangedSince names, and nothing else, leads from one list to the next.
func TestEndpointsChange(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	list := EndpointsOf()
	for step := range 500 {
		groups := make(map[string][]Endpoint)
		for range r.IntN(4) {
			name := fmt.Sprint("n", r.IntN(6))
			groups[name] = nil
			for id := range r.IntN(3) {
				groups[name] = append(groups[name], Endpoint{Node: name, ID: EndpointID(id), Name: fmt.Sprint(step)})
			}
		}
		next := list.With(groups)
		var flat []Endpoint
		for e := range next.All() {
			flat = append(flat, e)
		}
		if !slices.IsSortedFunc(flat, func(a, b Endpoint) int { return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.ID, b.ID)) }) {
			t.Fatalf("step %d: not sorted: %v", step, flat)
		}
		if len(flat) != next.Len() || !reflect.DeepEqual(EndpointsOf(flat...), next) {
			t.Fatalf("step %d: %v is not the list of its own endpoints", step, next)
		}
		again := make(map[string][]Endpoint)
		for _, c := range next.ChangedSince(list) {
			if _, named := groups[c.Node]; !named || !reflect.DeepEqual(c.Before, list.Of(c.Node)) || !reflect.DeepEqual(c.After, next.Of(c.Node)) {
				t.Fatalf("step %d: change %v of %v into %v", step, c, list, next)
			}
			again[c.Node] = c.After
		}
		if got := list.With(again); !reflect.DeepEqual(got, next) {
			t.Fatalf("step %d: changes lead to %v, want %v", step, got, next)
		}
		list = next
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
