package policy_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
)

// largeState has rules allow rules of 100 to a policy, and endpoints in groups of ten (an app),
// spread over 100 nodes: each app takes connections from 100 others, each on a port of its own.
func largeState(rules, endpoints int) *policy.State {
	s := &policy.State{Pool: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, Prefix6: netip.MustParsePrefix("fd48:6464:1::/96")}
	apps := endpoints / 10
	label := func(i int) map[string]string {
		return map[string]string{"app": fmt.Sprint("app", i%apps), "team": fmt.Sprint("t", i%7)}
	}
	var all []model.Endpoint
	for i := range endpoints {
		a := netip.AddrFrom4([4]byte{10, byte(i % 100), byte(i / 100), byte(2 + i%3)})
		all = append(all, model.Endpoint{ID: model.EndpointID(1 + i/100), Node: fmt.Sprint("n", i%100),
			Name: fmt.Sprint("c", i), Addrs: model.OverlayAddrs(s.Prefix6, a), Labels: label(i / 10)})
	}
	s.Endpoints = model.EndpointsOf(all...)
	for i := range 100 {
		s.Nodes = append(s.Nodes, policy.Node{Name: fmt.Sprint("n", i), Addrs: []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})}})
	}
	for i := range rules / 100 {
		s.Policies = append(s.Policies, largePolicy(i, 100, apps))
	}
	return s
}

func largePolicy(i, rules, apps int) *policy.Policy {
	subject := policy.Subject{Selector: policy.Selector{Requirements: policy.Requirements{Labels: map[string]string{"app": fmt.Sprint("app", i%apps)}}}}
	d := &policy.Direction{Default: policy.DefaultDeny}
	for r := range rules {
		peer := policy.Selector{Requirements: policy.Requirements{Labels: map[string]string{"app": fmt.Sprint("app", (i+7*r+1)%apps)}}}
		port := uint16(1000 + r)
		d.Rules = append(d.Rules, policy.Rule{Action: policy.Allow, Peers: []policy.Peer{{Endpoints: &peer}},
			Ports: []policy.Ports{{Protocol: model.ProtocolTCP, First: port, Last: port}}})
	}
	return &policy.Policy{Name: fmt.Sprint("p", i), Subject: subject, Ingress: d}
}

// BenchmarkCompile compiles everything for one of 100 nodes.
func BenchmarkCompile(b *testing.B) {
	for _, size := range []struct{ rules, endpoints int }{{100, 10000}, {10000, 10000}, {100000, 10000}} {
		s := largeState(size.rules, size.endpoints)
		b.Run(fmt.Sprintf("rules=%d/endpoints=%d", size.rules, size.endpoints), func(b *testing.B) {
			for b.Loop() {
				change := policy.NewCompiler("n1").Update(s)
				b.ReportMetric(float64(len(change.Set.Pairs)), "pairs")
			}
		})
	}
}

// BenchmarkUpdate changes one policy of 100 rules, and one endpoint's labels, among more and more
// rules.
func BenchmarkUpdate(b *testing.B) {
	for _, rules := range []int{100, 1000, 10000, 100000} {
		s := largeState(rules, 10000)
		c := policy.NewCompiler("n1")
		c.Update(s)
		b.Run(fmt.Sprintf("policy/rules=%d", rules), func(b *testing.B) {
			n := 0
			for b.Loop() {
				next := *s
				next.Policies = slices.Clone(s.Policies)
				next.Policies[0] = largePolicy(0, 99+n%2, 1000)
				n++
				b.ReportMetric(float64(len(c.Update(&next).Set.Pairs)), "pairs")
				s = &next
			}
		})
		b.Run(fmt.Sprintf("endpoint/rules=%d", rules), func(b *testing.B) {
			n := 0
			for b.Loop() {
				next := *s
				group := slices.Clone(s.Endpoints.Of("n1"))
				group[0].Labels = map[string]string{"app": fmt.Sprint("app", n%2)}
				next.Endpoints = s.Endpoints.With(map[string][]model.Endpoint{"n1": group})
				n++
				b.ReportMetric(float64(len(c.Update(&next).Set.Pairs)), "pairs")
				s = &next
			}
		})
	}
}

// BenchmarkUpdateOneSubject changes a policy of one rule among more and more that are all about the
// same endpoints.
func BenchmarkUpdateOneSubject(b *testing.B) {
	subject := policy.Subject{Selector: policy.Selector{Requirements: policy.Requirements{Labels: map[string]string{"app": "app0"}}}}
	for _, rules := range []int{100, 1000, 10000, 100000} {
		s := largeState(rules, 10000)
		for _, p := range s.Policies {
			p.Subject = subject
		}
		toggle := func(port uint16) *policy.Policy {
			return &policy.Policy{Name: "toggle", Subject: subject, Ingress: &policy.Direction{Rules: []policy.Rule{{Action: policy.Block,
				Peers: []policy.Peer{{Endpoints: &subject.Selector}}, Ports: []policy.Ports{{Protocol: model.ProtocolTCP, First: port, Last: port}}}}}}
		}
		s.Policies = append(s.Policies, toggle(1))
		c := policy.NewCompiler("n1")
		c.Update(s)
		b.Run(fmt.Sprintf("rules=%d", rules), func(b *testing.B) {
			for n := uint16(0); b.Loop(); n++ {
				next := *s
				next.Policies = slices.Clone(s.Policies)
				next.Policies[len(next.Policies)-1] = toggle(1 + n%2)
				c.Update(&next)
				s = &next
			}
		})
	}
}
