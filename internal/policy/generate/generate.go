// Package generate makes random rules, labels and probes for tests: small states in which much
// collides, so that few probes meet many cases. The same seed gives the same.
package generate

import (
	"fmt"
	"math/rand/v2"
	"net/netip"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
)

// Generator makes random things. Its fields may be set before the first call.
type Generator struct {
	rnd *rand.Rand
	// Addrs are the addresses that prefixes are made around.
	Addrs []netip.Addr
	// Namespaces are names of namespaces.
	Namespaces []string
	// Ports are the ports that rules begin and end at, and probes ask for.
	Ports []uint16
	// Quiet leaves out rules that drop: a probe that hears nothing takes its time.
	Quiet bool
}

// New gives a generator.
func New(seed uint64) *Generator {
	return &Generator{rnd: rand.New(rand.NewPCG(seed, seed)), Namespaces: []string{"a", "b", "default"}, Ports: []uint16{80, 81, 443, 8080}}
}

// Intn gives a number in [0, n).
func (g *Generator) Intn(n int) int { return g.rnd.IntN(n) }

// chance is true once in n times.
func (g *Generator) chance(n int) bool { return g.rnd.IntN(n) == 0 }

func pick[T any](g *Generator, from []T) T { return from[g.rnd.IntN(len(from))] }

var (
	keys   = []string{"app", "tier", "zone"}
	values = []string{"x", "y", "z"}
)

// Labels gives labels of an endpoint or a namespace.
func (g *Generator) Labels() map[string]string {
	out := make(map[string]string)
	for _, k := range keys {
		if !g.chance(3) {
			out[k] = pick(g, values)
		}
	}
	return out
}

func (g *Generator) requirements() (r policy.Requirements) {
	if g.chance(2) {
		r.Labels = map[string]string{pick(g, keys): pick(g, values)}
	}
	if g.chance(3) {
		e := policy.Expression{Key: pick(g, keys), Operator: pick(g, []policy.Operator{policy.In, policy.NotIn, policy.Exists, policy.NotExists})}
		if e.Operator == policy.In || e.Operator == policy.NotIn {
			e.Values = []string{pick(g, values), pick(g, values)}
		}
		r.Expressions = append(r.Expressions, e)
	}
	return r
}

func (g *Generator) selector() (s policy.Selector) {
	s.Requirements = g.requirements()
	if g.chance(3) {
		s.Namespace = &policy.NamespaceSelector{Requirements: g.requirements()}
		if g.chance(2) {
			s.Namespace.Name = pick(g, g.Namespaces)
		}
	}
	return s
}

func (g *Generator) prefix() netip.Prefix {
	a := pick(g, g.Addrs)
	bits := a.BitLen() - pick(g, []int{0, 0, 1, 2, 8, 16, a.BitLen()})
	return netip.PrefixFrom(a, bits).Masked()
}

func (g *Generator) peer() (p policy.Peer) {
	switch kind := g.rnd.IntN(6); {
	case kind < 3 || len(g.Addrs) == 0:
		s := g.selector()
		p.Endpoints = &s
	case kind < 5:
		p.Prefix = g.prefix()
		x := netip.PrefixFrom(pick(g, g.Addrs), 0)
		x = netip.PrefixFrom(x.Addr(), x.Addr().BitLen()-g.rnd.IntN(3)).Masked()
		if g.chance(2) && x.Bits() > p.Prefix.Bits() && p.Prefix.Contains(x.Addr()) {
			p.Except = append(p.Except, x)
		}
	default:
		p.Entity = pick(g, []policy.Entity{policy.EntityNodes, policy.EntityHost, policy.EntityEndpoints, policy.EntityOutside})
	}
	return p
}

func (g *Generator) ports() policy.Ports {
	switch g.rnd.IntN(6) {
	case 0:
		return policy.Ports{Protocol: model.ProtocolICMP, Last: 1<<16 - 1}
	case 1:
		return policy.Ports{Protocol: pick(g, []model.Protocol{model.ProtocolTCP, model.ProtocolUDP}), Last: 1<<16 - 1}
	}
	a, b := pick(g, g.Ports), pick(g, g.Ports)
	return policy.Ports{Protocol: pick(g, []model.Protocol{model.ProtocolTCP, model.ProtocolTCP, model.ProtocolUDP}), First: min(a, b), Last: max(a, b)}
}

func (g *Generator) deny() policy.Deny {
	if !g.Quiet && g.chance(3) {
		return policy.Drop
	}
	return pick(g, []policy.Deny{"", policy.Reject})
}

func (g *Generator) direction() *policy.Direction {
	d := &policy.Direction{Default: pick(g, []policy.Default{policy.DefaultNone, policy.DefaultAllow, policy.DefaultDeny, policy.DefaultDeny}), Deny: g.deny()}
	for range g.rnd.IntN(4) {
		r := policy.Rule{Action: policy.Allow}
		if g.chance(3) {
			r.Action, r.Deny = policy.Block, g.deny()
		}
		for range g.rnd.IntN(3) {
			r.Peers = append(r.Peers, g.peer())
		}
		for range g.rnd.IntN(3) {
			r.Ports = append(r.Ports, g.ports())
		}
		d.Rules = append(d.Rules, r)
	}
	return d
}

// Policy gives a valid policy called name.
func (g *Generator) Policy(name string) *policy.Policy {
	for {
		p := &policy.Policy{Name: name, Subject: policy.Subject{Selector: g.selector()}}
		if len(g.Addrs) > 0 && g.chance(5) {
			p.Subject.Prefixes = []netip.Prefix{g.prefix()}
		}
		if !g.chance(3) {
			p.Ingress = g.direction()
		}
		if !g.chance(3) {
			p.Egress = g.direction()
		}
		if p.Validate() == nil {
			return p
		}
	}
}

// Endpoint gives an endpoint of a node with an address, without labels of its own if plain is set.
func (g *Generator) Endpoint(node string, id model.EndpointID, addrs []netip.Addr) model.Endpoint {
	e := model.Endpoint{ID: id, Node: node, Name: fmt.Sprintf("%s/c%d", pick(g, g.Namespaces), id), Addrs: addrs, Labels: g.Labels()}
	if g.chance(4) {
		e.Labels[policy.NamespaceLabel] = pick(g, g.Namespaces)
	}
	return e
}

// Probe gives a connection between two of addrs.
func (g *Generator) Probe(addrs []netip.Addr) policy.Probe {
	p := policy.Probe{From: pick(g, addrs), To: pick(g, addrs), Protocol: pick(g, []model.Protocol{
		model.ProtocolTCP, model.ProtocolTCP, model.ProtocolUDP, model.ProtocolICMP, model.ProtocolOther})}
	if p.Protocol.HasPorts() {
		p.Port = pick(g, g.Ports) + uint16(g.rnd.IntN(3)) - 1
	}
	return p
}
