package store

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
)

// viewPair holds what a store has, and a view that has seen every change of it.
type viewPair struct {
	t       *testing.T
	keys    Keys
	values  map[string][]byte
	created map[string]int64
	view    *View
	skipped int
}

func (p *viewPair) put(key string, value []byte, err error, now int64) {
	if err != nil {
		p.t.Fatal(err)
	}
	if _, there := p.values[key]; !there {
		p.created[key] = now
	}
	p.values[key] = value
	p.view.Set(key, value, p.created[key])
}

func (p *viewPair) delete(key string) {
	delete(p.values, key)
	p.view.Delete(key)
}

// check compares the view with one that reads everything anew.
func (p *viewPair) check(what string) State {
	fresh := NewView(p.keys, slog.New(slog.DiscardHandler), func() {})
	for key, value := range p.values {
		fresh.Set(key, value, p.created[key])
	}
	got, want := p.view.State(7), fresh.State(7)
	for _, part := range []struct{ got, want any }{{got.Nodes, want.Nodes}, {got.Endpoints, want.Endpoints},
		{got.Moves, want.Moves}, {got.Policies, want.Policies}, {got.Namespaces, want.Namespaces}} {
		if !reflect.DeepEqual(part.got, part.want) && reflect.ValueOf(part.got).Len()+reflect.ValueOf(part.want).Len() > 0 {
			p.t.Fatalf("%s:\n got %v\nwant %v", what, part.got, part.want)
		}
	}
	return got
}

// TestViewFollowsChanges: a view that has followed every change gives the same state as one that
// reads everything anew: with nodes and endpoints that contradict each other, and with ones that
// hardly do.
func TestViewFollowsChanges(t *testing.T) {
	for seed := range uint64(60) {
		w := &viewWriter{Rand: rand.New(rand.NewPCG(seed, 1)), nodes: 4}
		if seed%3 == 0 {
			w.nodes = 40
		}
		w.viewPair = &viewPair{t: t, keys: KeysOf(1), values: make(map[string][]byte), created: make(map[string]int64)}
		w.view = NewView(w.keys, slog.New(slog.DiscardHandler), func() { w.skipped++ })
		var rejected, free int
		for step := range int64(80) {
			w.step(step)
			if w.IntN(3) > 0 {
				got := w.check(fmt.Sprintf("seed %d, step %d", seed, step))
				out := len(w.values) - len(got.Nodes) - got.Endpoints.Len() - len(got.Moves)
				rejected += out
				if len(w.view.excludedNodes) == 0 {
					free++
				}
			}
		}
		if rejected == 0 || w.nodes > 4 && free == 0 {
			t.Fatalf("seed %d: %d values contradicted others, and %d times no node did", seed, rejected, free)
		}
	}
}

// viewWriter writes at random what a number of nodes might.
type viewWriter struct {
	*rand.Rand
	*viewPair
	nodes int
}

func (w *viewWriter) addr(first, n int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 244, byte(w.IntN(w.nodes)), byte(first + w.IntN(n))})
}

func (w *viewWriter) step(step int64) {
	i := w.IntN(w.nodes)
	name, id := fmt.Sprintf("n%d", i), model.EndpointID(1+w.IntN(4))
	switch w.IntN(10) {
	case 8, 9: // of addresses that endpoints have, to nodes that may not be there
		addr := w.addr(1, 4)
		if w.IntN(3) == 0 {
			w.delete(w.keys.Move(addr))
			return
		}
		raw, err := EncodeMove(model.Move{Addr: addr, Node: name, From: "n0", Home: "n1", Name: "c"})
		w.put(w.keys.Move(addr), raw, err, step)
	case 0, 1: // prefixes and addresses of two nodes may collide
		if w.nodes == 4 || w.IntN(8) == 0 {
			i = w.IntN(w.nodes)
		}
		bits := 24 + w.IntN(2)
		raw, err := EncodeNode(testNode(name, fmt.Sprintf("192.0.2.%d", 1+(i+w.IntN(2)*w.nodes)), fmt.Sprintf("10.244.%d.0/%d", i, bits)))
		w.put(w.keys.Node(name), raw, err, step)
	case 2:
		w.delete(w.keys.Node(name))
	case 3:
		w.delete(w.keys.Endpoint(name, id))
	case 4:
		w.put(w.keys.Endpoint(name, id), []byte("{"), nil, step)
	default:
		e := model.Endpoint{ID: id, Node: name, Name: fmt.Sprint("c", 1+w.IntN(6)), Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 244, byte(i), byte(2 + w.IntN(3))})}, Created: time.Unix(step, 0).UTC()}
		if w.IntN(3) == 0 {
			e.Addrs[0] = w.addr(2, 3)
		}
		if w.IntN(4) == 0 { // of another network, and perhaps in a node's prefix
			e.Adopted = &model.Adopted{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}
			e.Addrs[0] = netip.AddrFrom4([4]byte{10, byte(243 + w.IntN(2)), byte(i), 130})
		}
		raw, err := EncodeEndpoint(e)
		w.put(w.keys.Endpoint(name, id), raw, err, step)
	}
}

// TestViewMoves: an address that has moved is the other node's, and nobody else's.
func TestViewMoves(t *testing.T) {
	p := &viewPair{t: t, keys: KeysOf(1), values: make(map[string][]byte), created: make(map[string]int64)}
	p.view = NewView(p.keys, slog.New(slog.DiscardHandler), func() { p.skipped++ })
	for i := range 2 {
		raw, err := EncodeNode(testNode(fmt.Sprint("n", i+1), fmt.Sprint("192.0.2.", i+1), fmt.Sprintf("10.244.%d.0/24", i+1)))
		p.put(p.keys.Node(fmt.Sprint("n", i+1)), raw, err, 1)
	}
	addr := netip.MustParseAddr("10.244.1.2")
	endpoint := func(node string) {
		raw, err := EncodeEndpoint(model.Endpoint{ID: 1, Node: node, Name: "c", Addrs: []netip.Addr{addr}, Created: time.Unix(1, 0).UTC()})
		p.put(p.keys.Endpoint(node, 1), raw, err, 1)
	}
	move := func(a netip.Addr, node string) {
		raw, err := EncodeMove(model.Move{Addr: a, Node: node, From: "n1", Home: "n1", Name: "c"})
		p.put(p.keys.Move(a), raw, err, 1)
	}
	where := func(what string, endpoints, moved string) {
		t.Helper()
		s := p.check(what)
		var on, to string
		for e := range s.Endpoints.All() {
			on += e.Node
		}
		for _, n := range s.Nodes {
			for _, a := range n.Moved {
				to += n.Name + " " + a.String()
			}
		}
		if on != endpoints || to != moved {
			t.Errorf("%s: endpoints on %q, moved to %q; want %q, %q", what, on, to, endpoints, moved)
		}
	}
	endpoint("n1")
	endpoint("n2")
	where("before", "n1", "")
	move(addr, "n2")
	where("moved", "n2", "n2 10.244.1.2")
	move(addr, "n3")
	where("moved to nobody", "n1", "")
	move(addr, "n1")
	where("back home", "n1", "n1 10.244.1.2")
	move(netip.MustParseAddr("10.244.1.1"), "n2")
	where("a gateway", "n1", "n1 10.244.1.2")
	move(addr, "n2")
	p.delete(p.keys.Node("n2"))
	where("its node left", "n1", "")
	p.delete(p.keys.Move(addr))
	where("after", "n1", "")
}

// TestViewOfOneNameTwice: of two endpoints of a node with one name, the one with the lower id is
// there, whichever came first.
func TestViewOfOneNameTwice(t *testing.T) {
	p := &viewPair{t: t, keys: KeysOf(1), values: make(map[string][]byte), created: make(map[string]int64)}
	p.view = NewView(p.keys, slog.New(slog.DiscardHandler), func() { p.skipped++ })
	raw, err := EncodeNode(testNode("n1", "192.0.2.1", "10.244.1.0/24"))
	p.put(p.keys.Node("n1"), raw, err, 1)
	endpoint := func(id model.EndpointID) {
		raw, err := EncodeEndpoint(model.Endpoint{ID: id, Node: "n1", Name: "c", Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 244, 1, byte(id)})}, Created: time.Unix(1, 0).UTC()})
		p.put(p.keys.Endpoint("n1", id), raw, err, 1)
	}
	for _, c := range []struct {
		do      func()
		there   model.EndpointID
		skipped int
	}{
		{func() { endpoint(3) }, 3, 0},
		{func() { endpoint(4) }, 3, 1},
		{func() { endpoint(2) }, 2, 2},
		{func() { p.delete(p.keys.Endpoint("n1", 2)) }, 3, 2},
		{func() { p.delete(p.keys.Endpoint("n1", 3)) }, 4, 2},
	} {
		c.do()
		all := p.check("one name").Endpoints.Joined()
		if len(all) != 1 || all[0].ID != c.there || p.skipped < c.skipped {
			t.Errorf("endpoints %+v, %d skipped; want endpoint %d, %d", all, p.skipped, c.there, c.skipped)
		}
	}
}

// TestViewSharesWhatHasNotChanged: receivers go by that.
func TestViewSharesWhatHasNotChanged(t *testing.T) {
	p := &viewPair{t: t, keys: KeysOf(1), values: make(map[string][]byte), created: make(map[string]int64)}
	p.view = NewView(p.keys, slog.New(slog.DiscardHandler), func() {})
	raw, err := EncodeNode(testNode("n1", "192.0.2.1", "10.244.1.0/24"))
	p.put(p.keys.Node("n1"), raw, err, 1)
	endpoint := func(label string) ([]byte, error) {
		return EncodeEndpoint(model.Endpoint{ID: 1, Node: "n1", Name: "c1", Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.2")},
			Labels: map[string]string{"app": label}, Created: time.Unix(1, 0).UTC()})
	}
	raw, err = endpoint("a")
	p.put(p.keys.Endpoint("n1", 1), raw, err, 1)
	first := p.check("first")
	raw, err = EncodePolicy(testPolicy("p", 1))
	p.put(p.keys.Policy("p"), raw, err, 2)
	second := p.check("policy")
	if &first.Nodes[0] != &second.Nodes[0] || !first.Endpoints.Same(second.Endpoints) {
		t.Error("a policy made nodes or endpoints others")
	}
	raw, err = endpoint("b")
	p.put(p.keys.Endpoint("n1", 1), raw, err, 3)
	third := p.check("endpoint")
	if second.Endpoints.Same(third.Endpoints) || second.Endpoints[0][0].Labels["app"] != "a" || third.Endpoints[0][0].Labels["app"] != "b" {
		t.Error("an endpoint that has changed is not seen, or an old state has changed")
	}
	if &second.Policies[0] != &third.Policies[0] || &second.Nodes[0] != &third.Nodes[0] {
		t.Error("an endpoint made nodes or policies others")
	}
}
