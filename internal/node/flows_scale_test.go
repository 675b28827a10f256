package node

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/flowlog"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/store"
)

// The network that the agent is to bear.
const (
	manyNodes     = 5_000
	manyEndpoints = 100_000
	manyFlows     = 50_000 // a second
)

// largeNetwork is a network of that size as the store's followers have it.
func largeNetwork() (nodes []model.Node, endpoints model.Endpoints) {
	each := manyEndpoints / manyNodes
	var all []model.Endpoint
	for n := range manyNodes {
		name := fmt.Sprintf("n%04d", n)
		prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(n >> 8), byte(n), 0}), 24)
		nodes = append(nodes, model.Node{Name: name, Underlay: netip.AddrFrom4([4]byte{172, 16 + byte(n>>16), byte(n >> 8), byte(n)}), Prefixes: []netip.Prefix{prefix}})
		for i := range each {
			k := n*each + i
			all = append(all, model.Endpoint{ID: model.EndpointID(i + 1), Name: fmt.Sprintf("shop/pod-%06d", k), Node: name,
				Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, byte(n >> 8), byte(n), byte(i + 2)})}, Labels: map[string]string{"app": fmt.Sprint("app", k%1000), "tier": fmt.Sprint(k % 3)}})
		}
	}
	return nodes, model.EndpointsOf(all...)
}

// largePolicy has a policy for each of 200 apps, which lets ten others in.
func largePolicy(nodes []model.Node, endpoints model.Endpoints) *policy.State {
	s := &policy.State{Pool: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, Self: nodes[0].Name, Endpoints: endpoints}
	app := func(n int) policy.Selector {
		return policy.Selector{Requirements: policy.Requirements{Labels: map[string]string{"app": fmt.Sprint("app", n%1000)}}}
	}
	for i := range 200 {
		rule := policy.Rule{Action: policy.Allow, Ports: []policy.Ports{{Protocol: model.ProtocolTCP, First: 8080, Last: 8080}}}
		for k := range 10 {
			peer := app(7*i + k)
			rule.Peers = append(rule.Peers, policy.Peer{Endpoints: &peer})
		}
		s.Policies = append(s.Policies, &policy.Policy{Name: fmt.Sprint("p", i), Subject: policy.Subject{Selector: app(i)},
			Ingress: &policy.Direction{Default: policy.DefaultDeny, Rules: []policy.Rule{rule}}})
	}
	return s
}

// observer is what an agent of such a network tells flows by.
func observer(nodes []model.Node, endpoints model.Endpoints) *flows {
	h := &host{self: nodes[0], known: newRegistry(), enforcer: &enforcer{}}
	h.view.publish(store.State{Nodes: nodes, Endpoints: endpoints}, nil)
	return newFlows(h)
}

// seen is the n-th of many observations: connections of this node's endpoints to all others that
// open and, 100 later, end, or, every other one, stay.
func seen(n int) flow.Observation {
	socket := n
	o := flow.Observation{At: time.Unix(0, int64(n)), Event: flow.Open}
	if n%3 == 2 {
		socket, o.Event = max(0, n-2-300), flow.End
	}
	to := socket * 7919 % manyEndpoints
	node := to / (manyEndpoints / manyNodes)
	o.Connection = model.Connection{Endpoint: model.EndpointID(socket%20 + 1), Cookie: uint64(socket), Path: "direct",
		Local:  netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(socket%20 + 2)}), uint16(socket)),
		Remote: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(node >> 8), byte(node), byte(to%20 + 2)}), 8080)}
	return o
}

// heap gives what is in use, collected.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestFlowsOfManyAreBounded: what the agent has of flows is full after some seconds of them, and
// then the same, whoever they are between.
func TestFlowsOfManyAreBounded(t *testing.T) {
	nodes, endpoints := largeNetwork()
	before := heap()
	fl := observer(nodes, endpoints)
	const filled = 5 * manyFlows // enough for 65,536 openings
	for i := range filled {
		fl.observe(seen(i))
	}
	full := heap()
	for i := range 2 * manyFlows {
		fl.observe(seen(filled + i))
	}
	after := heap()
	t.Logf("%d MiB with %d endpoints of %d nodes, after %d flows more %d KiB beside", (full-before)>>20, manyEndpoints, manyNodes, 2*manyFlows, (int64(after)-int64(full))>>10)
	if full-before > 64<<20 || int64(after)-int64(full) > 1<<20 {
		t.Errorf("%d bytes when full, want 64 MiB at most, and %d of %d flows more", full-before, int64(after)-int64(full), 2*manyFlows)
	}
	s := fl.kept.Stats()
	if s.Kept != flowlog.Kept || s.Counts[flowlog.Kind{Event: flow.Open, Path: "direct"}]+s.Counts[flowlog.Kind{Event: flow.End, Path: "direct"}] != filled+2*manyFlows {
		t.Errorf("kept: %+v", s)
	}
	if n := fl.openings.Len(); n > openConnections || n < openConnections/2 {
		t.Errorf("%d openings are remembered", n)
	}
	var last *flow.Flow
	emit := func(line api.FlowLine) error { last = line.Flow; return nil }
	if r, err := fl.kept.Recent(flow.Filter{Events: []flow.Event{flow.End}, Last: 1}, time.Now()); err != nil || emitAll(t.Context(), r, emit) != nil || last == nil || last.Duration == 0 || last.To.Endpoint == "" {
		t.Errorf("the last end: %+v, %v", last, err)
	}
}

func BenchmarkObserve(b *testing.B) {
	fl := observer(largeNetwork())
	for i := range 100_000 {
		fl.observe(seen(i))
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		fl.observe(seen(i))
	}
}

// BenchmarkRules is a flow whose rule nobody has asked for yet.
func BenchmarkRules(b *testing.B) {
	nodes, endpoints := largeNetwork()
	state := largePolicy(nodes, endpoints)
	var j judge
	for i := 0; b.Loop(); i++ {
		c := seen(2 * i).Connection
		j.spent = 0
		j.ask(state, &flow.Flow{Protocol: "tcp", From: flow.Peer{Addr: c.Local.Addr()}, To: flow.Peer{Addr: c.Remote.Addr(), Port: uint16(i)}}, true)
	}
}
