package policy

import (
	"fmt"
	"net/netip"
	"slices"

	"heddle.dev/heddle/internal/model"
)

// State is everything that rules are judged by.
type State struct {
	// Pool are the overlay's IPv4 prefixes, Prefix6 makes their IPv6 forms (model.Overlay6); the
	// zero Prefix: none.
	Pool    []netip.Prefix
	Prefix6 netip.Prefix
	Nodes   []Node
	// Self is the node that judges.
	Self string
	// Endpoints have unique pairs of Node and ID. An address that several have, as may be while one
	// with an address of another network moves, or where an entry of the store is stale, is judged
	// as that of Self's endpoint, else of the first in order.
	Endpoints  model.Endpoints
	Namespaces []Namespace
	// Policies are valid and have unique names. They are not changed once they are here: a policy
	// that changes is another *Policy.
	Policies []*Policy
	// found is what is known of the addresses of a question, for as long as it is answered.
	found []found
}

// found is what an address is judged as.
type found struct {
	addr       netip.Addr
	endpoint   model.Endpoint
	isEndpoint bool
	node       string
	isNode     bool
}

// Node is a node with its own addresses, gateways included: those that a node process may use
// towards containers.
type Node struct {
	Name  string
	Addrs []netip.Addr
}

// forms gives the addresses that stand for the same as a: of an overlay address both forms.
func (s *State) forms(a netip.Addr) []netip.Addr {
	if b := model.Overlay4(s.Prefix6, a); b.IsValid() && s.inPool4(b) {
		return []netip.Addr{a, b}
	}
	if s.inPool4(a) {
		if b := model.Overlay6(s.Prefix6, a); b.IsValid() {
			return []netip.Addr{a, b}
		}
	}
	return []netip.Addr{a}
}

func (s *State) inPool4(a netip.Addr) bool {
	return slices.ContainsFunc(s.Pool, func(p netip.Prefix) bool { return p.Contains(a) })
}

// inPool reports whether a is an overlay address, somebody's or not.
func (s *State) inPool(a netip.Addr) bool {
	return slices.ContainsFunc(s.forms(a), s.inPool4)
}

// linkPrefixes hold what goes no further than the link between an endpoint and its node: who hears
// it is the node.
var linkPrefixes = []netip.Prefix{
	netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("255.255.255.255/32"),
	netip.MustParsePrefix("ff00::/8"), netip.MustParsePrefix("fe80::/10"),
}

func isOnLink(a netip.Addr) bool {
	return slices.ContainsFunc(linkPrefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

func (s *State) namespaceLabels(name string) map[string]string {
	for _, n := range s.Namespaces {
		if n.Name == name {
			return n.all()
		}
	}
	return Namespace{Name: name}.all()
}

// Probe is a connection, or a datagram, to be judged. Of ICMP and of protocols without ports the
// port means nothing.
type Probe struct {
	From, To netip.Addr
	Protocol model.Protocol
	Port     uint16 // destination, host byte order
}

// Explanation says what becomes of a probe and why.
type Explanation struct {
	Verdict model.Verdict
	// Egress is what From may send, Ingress what To may receive. Of an address that is no
	// endpoint's, nobody says anything.
	Egress, Ingress Side
	// Itself: both addresses are one endpoint's. No rule is asked about that.
	Itself bool
}

// Side is what the policies of one end say.
type Side struct {
	// Endpoint is the name of this end, "" if it is no endpoint.
	Endpoint string
	Verdict  model.Verdict
	// Policies are the names of all that speak of this endpoint and direction, sorted.
	Policies []string
	// Policy is the one that decided, "" if there is none. Rule is its rule's index, or -1 if its
	// default decided; RuleName the rule's name if it has one.
	Policy   string
	Rule     int
	RuleName string
}

// Decide gives the verdict on a probe, from the rules as they are written, without any of the
// compiler's shortcuts.
func Decide(s *State, p Probe) model.Verdict { return Explain(s, p).Verdict }

// Explain gives the verdict on a probe, and the rule on either side that leads to it.
func Explain(s *State, p Probe) Explanation { return ExplainBy(s, p, s.endpointAt) }

// ExplainBy is Explain for who finds the endpoints of s by address faster than by a look at all.
// Each end is looked for once, however many rules are asked.
func ExplainBy(s *State, p Probe, find func(netip.Addr) (model.Endpoint, bool)) Explanation {
	judge := *s
	for _, a := range []netip.Addr{p.From, p.To} {
		f := found{addr: a}
		f.endpoint, f.isEndpoint = find(a)
		f.node, f.isNode = s.nodeAt(a)
		judge.found = append(judge.found, f)
	}
	return judge.explain(p)
}

func (s *State) explain(p Probe) Explanation {
	from, isFrom := s.endpointAt(p.From)
	to, isTo := s.endpointAt(p.To)
	x := Explanation{Egress: Side{Rule: -1}, Ingress: Side{Rule: -1}}
	if isFrom {
		x.Egress.Endpoint = from.Name
	}
	if isTo {
		x.Ingress.Endpoint = to.Name
	}
	if isFrom && isTo && from.Node == to.Node && from.ID == to.ID {
		x.Itself = true
		return x
	}
	if isFrom {
		s.judge(&x.Egress, from, p.To, p, func(p *Policy) *Direction { return p.Egress })
	}
	if isTo {
		s.judge(&x.Ingress, to, p.From, p, func(p *Policy) *Direction { return p.Ingress })
	}
	x.Verdict = x.Egress.Verdict.Worse(x.Ingress.Verdict)
	return x
}

// judge asks the policies of one endpoint about a peer: the worst of all rules that deny, else the
// first that allows, else the worst of the defaults.
func (s *State) judge(side *Side, subject model.Endpoint, peer netip.Addr, probe Probe, direction func(*Policy) *Direction) {
	type decision struct {
		policy   *Policy
		rule     int
		verdict  model.Verdict
		decisive bool
	}
	var allow, deny, byDefault decision
	for _, p := range s.Policies {
		d := direction(p)
		if d == nil || !s.selects(&p.Subject, subject) {
			continue
		}
		side.Policies = append(side.Policies, p.Name)
		for i, r := range d.Rules {
			if !s.ruleMatches(r, subject, peer, probe) {
				continue
			}
			if r.Action == Allow && !allow.decisive {
				allow = decision{p, i, model.VerdictAllow, true}
			}
			if v := r.verdict(d); r.Action == Block && v > deny.verdict {
				deny = decision{p, i, v, true}
			}
		}
		if d.Default == DefaultDeny && d.Deny.verdict() > byDefault.verdict {
			byDefault = decision{p, -1, d.Deny.verdict(), true}
		} else if d.Default == DefaultAllow && !byDefault.decisive {
			byDefault = decision{p, -1, model.VerdictAllow, true}
		}
	}
	slices.Sort(side.Policies)
	for _, d := range []decision{deny, allow, byDefault} {
		if d.decisive {
			side.Verdict, side.Policy, side.Rule = d.verdict, d.policy.Name, d.rule
			if d.rule >= 0 {
				side.RuleName = direction(d.policy).Rules[d.rule].Name
			}
			return
		}
	}
}

// verdict is what a rule that denies says to the sender.
func (r Rule) verdict(d *Direction) model.Verdict {
	if r.Deny != "" {
		return r.Deny.verdict()
	}
	return d.Deny.verdict()
}

func (s *State) selects(subject *Subject, e model.Endpoint) bool {
	ns := NamespaceOf(e)
	if !subject.Selector.matches(e.Labels, ns, s.namespaceLabels(ns)) {
		return false
	}
	return len(subject.Prefixes) == 0 || slices.ContainsFunc(subject.Prefixes, func(p netip.Prefix) bool {
		return inPrefix(p, nil, s.formsOf(e))
	})
}

// formsOf gives all addresses that stand for an endpoint.
func (s *State) formsOf(e model.Endpoint) (all []netip.Addr) {
	for _, a := range e.Addrs {
		all = append(all, s.forms(a)...)
	}
	return all
}

func (s *State) ruleMatches(r Rule, subject model.Endpoint, peer netip.Addr, probe Probe) bool {
	if len(r.Ports) > 0 && !slices.ContainsFunc(r.Ports, func(p Ports) bool { return p.Contains(probe.Protocol, probe.Port) }) {
		return false
	}
	return len(r.Peers) == 0 || slices.ContainsFunc(r.Peers, func(p Peer) bool { return s.peerMatches(p, subject, peer) })
}

func (s *State) peerMatches(p Peer, subject model.Endpoint, a netip.Addr) bool {
	e, isEndpoint := s.endpointAt(a)
	node, isNode := s.nodeAt(a)
	onLink := !isNode && isOnLink(a)
	switch {
	case p.Endpoints != nil:
		ns := NamespaceOf(e)
		return isEndpoint && p.Endpoints.matches(e.Labels, ns, s.namespaceLabels(ns))
	case p.Entity == EntityEndpoints:
		return isEndpoint
	case p.Entity == EntityNodes:
		return !isEndpoint && (isNode || onLink)
	case p.Entity == EntityHost:
		return !isEndpoint && (isNode && node == subject.Node || onLink)
	case p.Entity == EntityOutside:
		return !isEndpoint && !isNode && !onLink && !s.inPool(a)
	case isEndpoint:
		return inPrefix(p.Prefix, p.Except, s.formsOf(e))
	}
	return inPrefix(p.Prefix, p.Except, s.forms(a))
}

// endpointAt gives the endpoint that a is judged as.
func (s *State) endpointAt(a netip.Addr) (model.Endpoint, bool) {
	for i := range s.found {
		if s.found[i].addr == a {
			return s.found[i].endpoint, s.found[i].isEndpoint
		}
	}
	for e := range s.Endpoints.Groups(s.Self).All() {
		if slices.Contains(e.Addrs, a) {
			return e, true
		}
	}
	for e := range s.Endpoints.All() {
		if slices.Contains(e.Addrs, a) {
			return e, true
		}
	}
	return model.Endpoint{}, false
}

// nodeAt gives the node that has a. An address that several have is the first one's.
func (s *State) nodeAt(a netip.Addr) (string, bool) {
	for i := range s.found {
		if s.found[i].addr == a {
			return s.found[i].node, s.found[i].isNode
		}
	}
	for _, n := range s.Nodes {
		if slices.Contains(n.Addrs, a) {
			return n.Name, true
		}
	}
	return "", false
}

// String gives one line about the side: its verdict, and what led to it.
func (s Side) String() string {
	switch {
	case s.Endpoint == "":
		return "no endpoint: no policy applies"
	case s.Policy == "" && len(s.Policies) == 0:
		return fmt.Sprintf("%s: %s: no policy selects it", s.Endpoint, s.Verdict)
	case s.Policy == "":
		return fmt.Sprintf("%s: %s: no rule matches, and no policy has a default", s.Endpoint, s.Verdict)
	case s.Rule < 0:
		return fmt.Sprintf("%s: %s by the default of policy %s", s.Endpoint, s.Verdict, s.Policy)
	case s.RuleName != "":
		return fmt.Sprintf("%s: %s by rule %d (%s) of policy %s", s.Endpoint, s.Verdict, s.Rule, s.RuleName, s.Policy)
	}
	return fmt.Sprintf("%s: %s by rule %d of policy %s", s.Endpoint, s.Verdict, s.Rule, s.Policy)
}
