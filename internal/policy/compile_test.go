package policy_test

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/policy/generate"
)

// apply does to tables what model.PolicyChange says, as a datapath would.
func apply(t *model.PolicyTables, c model.PolicyChange) {
	if c.Reset {
		*t = model.PolicyTables{ByAddr: map[netip.Addr]model.ClassInfo{}, ByPrefix: map[netip.Prefix]model.ClassInfo{},
			Pairs: map[model.ClassPair]model.PairVerdict{}}
	}
	maps.Copy(t.ByAddr, c.Set.ByAddr)
	maps.Copy(t.ByPrefix, c.Set.ByPrefix)
	maps.Copy(t.Pairs, c.Set.Pairs)
	for _, a := range c.DeleteAddrs {
		delete(t.ByAddr, a)
	}
	for _, p := range c.DeletePrefixes {
		delete(t.ByPrefix, p)
	}
	for _, p := range c.DeletePairs {
		delete(t.Pairs, p)
	}
}

// lookUp finds a verdict as model.PolicyTables says it is found.
func lookUp(t *model.PolicyTables, p policy.Probe) model.Verdict {
	info := func(a netip.Addr) model.ClassInfo {
		if i, ok := t.ByAddr[a]; ok {
			return i
		}
		for bits := a.BitLen(); bits >= 0; bits-- {
			if i, ok := t.ByPrefix[netip.PrefixFrom(a, bits).Masked()]; ok {
				return i
			}
		}
		return model.ClassInfo{}
	}
	from, to := info(p.From), info(p.To)
	pair, ok := t.Pairs[model.ClassPair{From: from.Class, To: to.Class}]
	if !ok {
		return from.Egress.Worse(to.Ingress)
	}
	for _, r := range pair.Ports {
		if r.Protocol == p.Protocol && p.Port >= r.First && p.Port <= r.Last {
			return r.Verdict
		}
	}
	return pair.Default
}

// randomState is a State that changes at random.
type randomState struct {
	*generate.Generator
	state policy.State
	next  int
	addrs []netip.Addr // everything worth a probe
}

func newRandomState(seed uint64) *randomState {
	w := &randomState{Generator: generate.New(seed)}
	prefix6 := netip.MustParsePrefix("fd48:6464:1::/96")
	addr := netip.MustParseAddr
	w.state = policy.State{
		Pool: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}, Prefix6: prefix6, Self: "n1",
		Nodes: []policy.Node{
			{Name: "n1", Addrs: []netip.Addr{addr("172.31.0.1"), addr("10.244.1.1"), addr("fd48:6464:1::af4:101")}},
			{Name: "n2", Addrs: []netip.Addr{addr("172.31.0.2"), addr("10.244.2.1"), addr("172.31.0.1")}},
		},
	}
	w.addrs = []netip.Addr{addr("192.0.2.7"), addr("192.0.2.8"), addr("2001:db8::1"), addr("10.244.9.9"), addr("fd48:6464:1::af4:909"),
		addr("172.31.0.1"), addr("172.31.0.2"), addr("10.244.1.1"), addr("fd48:6464:1::af4:101"),
		addr("255.255.255.255"), addr("224.0.0.251"), addr("ff02::fb"), addr("fe80::7")}
	for i := range 8 {
		a := netip.AddrFrom4([4]byte{10, 244, byte(1 + i%2), byte(2 + i/2)})
		w.addrs = append(w.addrs, model.OverlayAddrs(prefix6, a)...)
	}
	w.Addrs = w.addrs
	return w
}

func (w *randomState) endpoint(i int) model.Endpoint {
	a := netip.AddrFrom4([4]byte{10, 244, byte(1 + i%2), byte(2 + i/2)})
	addrs := model.OverlayAddrs(w.state.Prefix6, a)
	if w.Intn(8) == 0 {
		addrs = addrs[:1]
	}
	if w.Intn(4) == 0 { // one that another may have, on this node or another
		j := w.Intn(8)
		addrs = model.OverlayAddrs(w.state.Prefix6, netip.AddrFrom4([4]byte{10, 244, byte(1 + j%2), byte(2 + j/2)}))
	}
	return w.Endpoint(fmt.Sprintf("n%d", 1+i%2), model.EndpointID(1+i), addrs)
}

// step changes one thing, in copies: the last state stays as it was.
func (w *randomState) step() {
	s := w.state
	switch w.Intn(8) {
	case 0, 1, 2:
		s.Policies = slices.Clone(s.Policies)
		w.next++
		s.Policies = append(s.Policies, w.Policy(fmt.Sprintf("p%d", w.next)))
	case 3:
		s.Policies = slices.Clone(s.Policies)
		if n := len(s.Policies); n > 0 {
			i := w.Intn(n)
			s.Policies[i] = w.Policy(s.Policies[i].Name)
		}
	case 4:
		if n := len(s.Policies); n > 0 {
			i := w.Intn(n)
			s.Policies = slices.Concat(s.Policies[:i], s.Policies[i+1:])
		}
		if w.Intn(6) == 0 {
			s.Policies = nil
		}
	case 5, 6:
		e := w.endpoint(w.Intn(8))
		group := slices.DeleteFunc(slices.Clone(s.Endpoints.Of(e.Node)), func(o model.Endpoint) bool { return o.ID == e.ID })
		if w.Intn(4) > 0 {
			group = append(group, e)
		}
		slices.SortFunc(group, func(a, b model.Endpoint) int { return cmp.Compare(a.ID, b.ID) })
		s.Endpoints = s.Endpoints.With(map[string][]model.Endpoint{e.Node: group})
	case 7:
		name := w.Namespaces[w.Intn(len(w.Namespaces))]
		s.Namespaces = slices.DeleteFunc(slices.Clone(s.Namespaces), func(n policy.Namespace) bool { return n.Name == name })
		if w.Intn(3) > 0 {
			s.Namespaces = append(s.Namespaces, policy.Namespace{Name: name, Labels: w.Labels()})
		}
		if w.Intn(3) == 0 { // a node takes or loses an address, perhaps one that an endpoint has
			s.Nodes = slices.Clone(s.Nodes)
			n := &s.Nodes[w.Intn(len(s.Nodes))]
			n.Addrs = slices.Concat(n.Addrs[:2], []netip.Addr{w.addrs[w.Intn(len(w.addrs))]})
		} else if w.Intn(3) == 0 { // another comes, with addresses that some may have, or goes
			name := fmt.Sprint("n", 3+w.Intn(3))
			nodes := slices.DeleteFunc(slices.Clone(s.Nodes), func(n policy.Node) bool { return n.Name == name })
			if len(nodes) == len(s.Nodes) {
				at := 1 + w.Intn(len(nodes))
				nodes = slices.Insert(nodes, at, policy.Node{Name: name, Addrs: []netip.Addr{w.addrs[w.Intn(len(w.addrs))], w.addrs[w.Intn(len(w.addrs))]}})
			}
			s.Nodes = nodes
		}
	}
	w.state = s
}

// TestCompilerAgreesWithDecide: after any sequence of changes, applied one by one, the tables say
// what the rules say.
func TestCompilerAgreesWithDecide(t *testing.T) {
	states, steps := 60, 25
	if testing.Short() {
		states = 10
	}
	var allowed, denied int
	for seed := range uint64(states) {
		w := newRandomState(seed)
		c := policy.NewCompiler("n1")
		var tables model.PolicyTables
		for step := range steps {
			for range 1 + w.Intn(3) {
				w.step()
			}
			state := w.state
			apply(&tables, c.Update(&state))
			for range 150 {
				p := w.Probe(w.addrs)
				if p.From == p.To || !w.local(p.From) && !w.local(p.To) || w.itself(p) {
					continue
				}
				want := policy.Decide(&state, p)
				if got := lookUp(&tables, p); got != want {
					t.Fatalf("seed %d, step %d: %v: tables say %v, rules %v", seed, step, p, got, want)
				}
				if want == model.VerdictAllow {
					allowed++
				} else {
					denied++
				}
			}
			checkWhole(t, seed, step, c, &tables, w.hidden())
			if diff := differing(&tables, compiledAnew(&state)); diff != "" {
				t.Fatalf("seed %d, step %d: other tables than from everything anew: %s", seed, step, diff)
			}
		}
	}
	t.Logf("%d allowed, %d denied", allowed, denied)
	if min(allowed, denied) < (allowed+denied)/10 {
		t.Errorf("the probes do not tell much: %d allowed, %d denied", allowed, denied)
	}
}

// checkWhole compares the tables that changes led to with those that the compiler believes in, and
// makes sure that no entry is left over. With hidden, a class may have no address to show.
func checkWhole(t *testing.T, seed uint64, step int, c *policy.Compiler, tables *model.PolicyTables, hidden bool) {
	t.Helper()
	whole := c.Tables()
	if !maps.Equal(tables.ByAddr, whole.ByAddr) || !maps.Equal(tables.ByPrefix, whole.ByPrefix) || len(tables.Pairs) != len(whole.Pairs) {
		t.Fatalf("seed %d, step %d: changes lead to other tables: %v, want %v", seed, step, tables, whole)
	}
	used := map[model.Class]bool{}
	for _, i := range whole.ByAddr {
		used[i.Class] = true
	}
	for _, i := range whole.ByPrefix {
		used[i.Class] = true
	}
	for p := range whole.Pairs {
		if !hidden && (!used[p.From] || !used[p.To]) {
			t.Fatalf("seed %d, step %d: pair %v of a class that nobody has", seed, step, p)
		}
	}
}

// compiledAnew gives the tables that a compiler makes of s that has seen nothing before.
func compiledAnew(s *policy.State) *model.PolicyTables {
	var out model.PolicyTables
	apply(&out, policy.NewCompiler(s.Self).Update(s))
	return &out
}

// differing says what is different about two tables, but for the numbers of classes. Pairs of a
// class that has no address to show are left out.
func differing(have, want *model.PolicyTables) string {
	number := make(map[model.Class]model.Class) // in want, by that in have
	same := func(a, b model.ClassInfo) bool {
		if n, known := number[a.Class]; known && n != b.Class {
			return false
		}
		number[a.Class] = b.Class
		a.Class = b.Class
		return a == b
	}
	for a, info := range want.ByAddr {
		if got, there := have.ByAddr[a]; !there || !same(got, info) {
			return fmt.Sprintf("%s: %v (%v), want %v", a, got, there, info)
		}
	}
	for p, info := range want.ByPrefix {
		if got, there := have.ByPrefix[p]; !there || !same(got, info) {
			return fmt.Sprintf("%s: %v (%v), want %v", p, got, there, info)
		}
	}
	if len(have.ByAddr) != len(want.ByAddr) || len(have.ByPrefix) != len(want.ByPrefix) {
		return fmt.Sprintf("%d addresses and %d prefixes, want %d and %d", len(have.ByAddr), len(have.ByPrefix), len(want.ByAddr), len(want.ByPrefix))
	}
	for a, x := range number {
		for b, y := range number {
			got, is := have.Pairs[model.ClassPair{From: a, To: b}]
			should, shall := want.Pairs[model.ClassPair{From: x, To: y}]
			if is != shall || !reflect.DeepEqual(got, should) {
				return fmt.Sprintf("pair %d,%d: %v (%v), want %v (%v)", a, b, got, is, should, shall)
			}
		}
	}
	return ""
}

// at gives the endpoint that a is judged as: of several n1's, else the first by node and id.
func (w *randomState) at(a netip.Addr) (found model.Endpoint, is bool) {
	for e := range w.state.Endpoints.All() {
		if slices.Contains(e.Addrs, a) && (!is || e.Node == "n1" && found.Node != "n1") {
			found, is = e, true
		}
	}
	return found, is
}

// hidden reports whether an endpoint or a node has an address that is judged as another endpoint's.
func (w *randomState) hidden() bool {
	for e := range w.state.Endpoints.All() {
		for _, a := range e.Addrs {
			if first, _ := w.at(a); first.ID != e.ID {
				return true
			}
		}
	}
	return slices.ContainsFunc(w.state.Nodes, func(n policy.Node) bool {
		return slices.ContainsFunc(n.Addrs, func(a netip.Addr) bool { _, is := w.at(a); return is })
	})
}

func (w *randomState) local(a netip.Addr) bool {
	e, ok := w.at(a)
	return ok && e.Node == "n1"
}

func (w *randomState) itself(p policy.Probe) bool {
	a, isA := w.at(p.From)
	b, isB := w.at(p.To)
	return isA && isB && a.ID == b.ID
}

// TestNoPoliciesNoTables: without policies the datapath has nothing to look up.
func TestNoPoliciesNoTables(t *testing.T) {
	w := newRandomState(1)
	for range 20 {
		w.step()
	}
	c := policy.NewCompiler("n1")
	var tables model.PolicyTables
	state := w.state
	apply(&tables, c.Update(&state))
	if len(tables.ByAddr) == 0 {
		t.Fatal("no tables with policies")
	}
	empty := state
	empty.Policies = nil
	apply(&tables, c.Update(&empty))
	if n := len(tables.ByAddr) + len(tables.ByPrefix) + len(tables.Pairs); n != 0 {
		t.Errorf("%d entries without policies: %v", n, tables)
	}
}

// TestCompilerFollowsNamespaces: an endpoint whose namespace gets or loses labels keeps its class
// and all it has, but for the pairs with those whose rules name the namespace.
func TestCompilerFollowsNamespaces(t *testing.T) {
	addr := netip.MustParseAddr
	peer := policy.Selector{Namespace: &policy.NamespaceSelector{Requirements: policy.Requirements{Labels: map[string]string{"tier": "shop"}}}}
	subject := policy.Subject{Selector: policy.Selector{Requirements: policy.Requirements{Labels: map[string]string{"app": "db"}}}}
	web := policy.Subject{Selector: policy.Selector{Requirements: policy.Requirements{Labels: map[string]string{"app": "web"}}}}
	state := policy.State{
		Pool: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
		Endpoints: model.EndpointsOf([]model.Endpoint{
			{ID: 1, Node: "n1", Name: "db/1", Addrs: []netip.Addr{addr("10.244.1.2")}, Labels: map[string]string{"app": "db"}},
			{ID: 1, Node: "n2", Name: "web/1", Addrs: []netip.Addr{addr("10.244.2.2")}, Labels: map[string]string{"app": "web"}},
		}...),
		Policies: []*policy.Policy{{Name: "db", Subject: subject, Ingress: &policy.Direction{Default: policy.DefaultDeny,
			Rules: []policy.Rule{{Action: policy.Allow, Peers: []policy.Peer{{Endpoints: &peer}}}}}},
			// So that no prefix is of its class.
			{Name: "web", Subject: web, Egress: &policy.Direction{Rules: []policy.Rule{{Action: policy.Block, Peers: []policy.Peer{{Entity: policy.EntityHost}}}}}}},
	}
	probe := policy.Probe{From: addr("10.244.2.2"), To: addr("10.244.1.2"), Protocol: model.ProtocolTCP, Port: 80}
	c := policy.NewCompiler("n1")
	var tables model.PolicyTables
	for i, labels := range []map[string]string{nil, {"tier": "shop"}, {"tier": "other"}, {"tier": "shop"}, nil} {
		now := state
		now.Namespaces = []policy.Namespace{{Name: "web", Labels: labels}}
		class := tables.ByAddr[probe.From].Class
		apply(&tables, c.Update(&now))
		want := model.VerdictReject
		if labels["tier"] == "shop" {
			want = model.VerdictAllow
		}
		if got := lookUp(&tables, probe); got != want || policy.Decide(&now, probe) != want {
			t.Errorf("namespace labels %v: tables say %v, rules %v, want %v", labels, got, policy.Decide(&now, probe), want)
		}
		if got := tables.ByAddr[probe.From].Class; i > 1 && got != class {
			t.Errorf("namespace labels %v: class %d became %d", labels, class, got)
		}
	}
}

// TestSharedAddress: of two endpoints with one address this node's is judged, else the first; the
// other one is as soon as it is gone, by all its rules.
func TestSharedAddress(t *testing.T) {
	for _, nodes := range [][2]string{{"n1", "n2"}, {"n1", "n0"}, {"n2", "n0"}, {"n1", "n1"}} {
		for guarded := range 2 { // who is denied to all
			for first := range 3 { // who comes first; 2: both at once
				for leaves := range 2 {
					t.Run(fmt.Sprintf("%s and %s, guarded %d, first %d, leaves %d", nodes[0], nodes[1], guarded, first, leaves), func(t *testing.T) {
						checkShared(t, nodes, guarded, first, leaves)
					})
				}
			}
		}
	}
}

func checkShared(t *testing.T, nodes [2]string, guarded, first, leaves int) {
	addr := netip.MustParseAddr
	shared := addr("10.88.0.2") // another network's
	caller := model.Endpoint{ID: 9, Node: "n1", Name: "caller", Addrs: []netip.Addr{addr("10.244.1.9")}}
	var both [2]model.Endpoint
	for i, node := range nodes {
		both[i] = model.Endpoint{ID: model.EndpointID(1 + i), Node: node, Name: fmt.Sprint("e", i), Addrs: []netip.Addr{shared}}
		if i == guarded {
			both[i].Labels = map[string]string{"app": "db"}
		}
	}
	db := policy.Subject{Selector: policy.Selector{Requirements: policy.Requirements{Labels: map[string]string{"app": "db"}}}}
	host := []policy.Peer{{Entity: policy.EntityHost}}
	state := policy.State{Self: "n1", Pool: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
		Policies: []*policy.Policy{{Name: "db", Subject: db, Ingress: &policy.Direction{Default: policy.DefaultDeny, Rules: []policy.Rule{{Action: policy.Allow, Peers: host}}}}}}
	c := policy.NewCompiler("n1")
	var tables model.PolicyTables
	step := func(judged int, there ...model.Endpoint) {
		t.Helper()
		state := state
		state.Endpoints = model.EndpointsOf(append(there, caller)...)
		apply(&tables, c.Update(&state))
		if diff := differing(&tables, compiledAnew(&state)); diff != "" {
			t.Fatalf("%d there: other tables than from everything anew: %s", len(there), diff)
		}
		want := model.VerdictAllow
		if judged == guarded {
			want = model.VerdictReject
		}
		p := policy.Probe{From: caller.Addrs[0], To: shared, Protocol: model.ProtocolTCP, Port: 80}
		if got, rules := lookUp(&tables, p), policy.Decide(&state, p); got != want || rules != want {
			t.Fatalf("%d there: tables say %v, rules %v; want %v", len(there), got, rules, want)
		}
	}
	step(-1)
	if first < 2 {
		step(first, both[first])
	}
	judged := 0 // n1's, which is the first where both are
	if nodes[1] < nodes[0] && nodes[0] != "n1" {
		judged = 1
	}
	step(judged, both[:]...)
	step(1-leaves, both[1-leaves])
	step(-1)
}
