package node

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
)

func at(s string) netip.Addr { return netip.MustParseAddr(s) }

// namedEndpoint is an endpoint of a node at an address.
func namedEndpoint(node string, id model.EndpointID, name, addr string) model.Endpoint {
	return model.Endpoint{ID: id, Name: name, Node: node, Addrs: []netip.Addr{at(addr)}, Labels: map[string]string{"app": name}}
}

// TestDirectoryFollows: addresses are found as the last state has them, also one that moved.
func TestDirectoryFollows(t *testing.T) {
	a, b := namedEndpoint("n1", 1, "a", "10.244.0.2"), namedEndpoint("n2", 1, "b", "10.244.1.2")
	moved := b
	moved.Node, moved.ID = "n1", 2
	n1 := model.Node{Name: "n1", Underlay: at("192.0.2.1"), Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/24")}}
	n2 := model.Node{Name: "n2", Underlay: at("192.0.2.2"), Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}}
	var d directory
	for i, step := range []struct {
		endpoints model.Endpoints
		nodes     []model.Node
		want      string
	}{
		{model.EndpointsOf(a, b), []model.Node{n1, n2}, "a:80 b:80 node n1:80 node n2:80 198.51.100.1:80"},
		{model.EndpointsOf(a, moved), []model.Node{n1, n2}, "a:80 b:80 node n1:80 node n2:80 198.51.100.1:80"},
		{model.EndpointsOf(moved), []model.Node{n1}, "10.244.0.2:80 b:80 node n1:80 192.0.2.2:80 198.51.100.1:80"},
		{model.EndpointsOf(a), []model.Node{n2}, "a:80 10.244.1.2:80 10.244.0.1:80 node n2:80 198.51.100.1:80"},
		{nil, nil, "10.244.0.2:80 10.244.1.2:80 10.244.0.1:80 192.0.2.2:80 198.51.100.1:80"},
	} {
		d.follow(step.endpoints, step.nodes, netip.Prefix{})
		got := ""
		for _, addr := range []string{"10.244.0.2", "10.244.1.2", "10.244.0.1", "192.0.2.2", "198.51.100.1"} {
			got += d.peer(netip.AddrPortFrom(at(addr), 80)).String() + " "
		}
		if got != step.want+" " {
			t.Errorf("step %d: %s, want %s", i, got, step.want)
		}
	}
	if len(d.byAddr)+len(d.nodeAt) != 0 {
		t.Errorf("left of what is gone: %v, %v", d.byAddr, d.nodeAt)
	}
}

// rulesAbout is a state in which a policy says what becomes of port 80 of b.
func rulesAbout(action policy.Action) *policy.State {
	return &policy.State{
		Pool: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}, Self: "n1",
		Endpoints: model.EndpointsOf(namedEndpoint("n1", 1, "a", "10.244.0.2"), namedEndpoint("n2", 1, "b", "10.244.1.2")),
		Policies: []*policy.Policy{{Name: "p", Subject: policy.Subject{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.1.2/32")}},
			Ingress: &policy.Direction{Rules: []policy.Rule{{Name: "eighty", Action: action, Ports: []policy.Ports{{Protocol: model.ProtocolTCP, First: 80, Last: 80}}}}}}},
	}
}

// asked is a flow from a to a port of b.
func asked(port uint16) *flow.Flow {
	return &flow.Flow{Protocol: "tcp", From: flow.Peer{Addr: at("10.244.0.2")}, To: flow.Peer{Addr: at("10.244.1.2"), Port: port}}
}

// TestJudge: a flow is explained by the state that judged it, the latest or the one before.
func TestJudge(t *testing.T) {
	var j judge
	open, closed := rulesAbout(policy.Allow), rulesAbout(policy.Block)
	for _, c := range []struct {
		port      uint16
		forbidden bool
		states    []*policy.State
		want      string
	}{
		{80, true, []*policy.State{closed, open}, "p: b: reject by rule 0 (eighty) of policy p"},
		{80, true, []*policy.State{open, closed}, "p: b: reject by rule 0 (eighty) of policy p"},
		{80, false, []*policy.State{closed, open}, "p: b: allow by rule 0 (eighty) of policy p"},
		{81, false, []*policy.State{closed, open}, ": "},
		{80, true, []*policy.State{open, open}, ": "},
		{80, true, []*policy.State{nil, nil}, ": "},
		{80, true, []*policy.State{{}, closed}, "p: b: reject by rule 0 (eighty) of policy p"},
	} {
		if name, rule := (&judge{}).explain(&flow.Flow{Protocol: "udp", From: asked(80).From, To: asked(80).To}, true, closed); name+rule != "" {
			t.Errorf("a rule for TCP decides on UDP: %s: %s", name, rule)
		}
		name, rule := j.explain(asked(c.port), c.forbidden, c.states...)
		if got := name + ": " + rule; got != c.want {
			t.Errorf("port %d, forbidden %v: %q, want %q", c.port, c.forbidden, got, c.want)
		}
	}
}

// TestJudgeIsBounded: whoever scans gets no more rules explained than the agent has time for, and
// what is known costs nothing; what is allowed leaves some for what is not.
func TestJudgeIsBounded(t *testing.T) {
	var j judge
	j.since = time.Now().Add(time.Hour) // a second that does not end
	closed := rulesAbout(policy.Block)
	explained := func(from, to int, forbidden bool) (n int) {
		for port := from; port < to; port++ {
			if _, ok := j.ask(closed, asked(uint16(port)), forbidden); ok {
				n++
			}
		}
		return n
	}
	if n := explained(1, 10_000, false); n != rulesForAllowed {
		t.Errorf("%d allowed ones explained, want %d", n, rulesForAllowed)
	}
	if n := explained(10_000, 20_000, true); n != rulesASecond-rulesForAllowed {
		t.Errorf("%d forbidden ones explained, want %d", n, rulesASecond-rulesForAllowed)
	}
	if n := explained(1, 10_000, true); n != rulesForAllowed {
		t.Errorf("%d known ones explained, want %d", n, rulesForAllowed)
	}
	for port := range 3 * rulesKept {
		j.spent = 0
		j.ask(closed, asked(uint16(port)), true)
		if len(j.rules) > rulesKept {
			t.Fatalf("%d rules are kept", len(j.rules))
		}
	}
	if got := fmt.Sprint(j.spend(j.since.Add(rulesBudgetLasts), false), j.spent); got != "true 1" {
		t.Errorf("in the next second: %s", got)
	}
}
