package node

import (
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
)

// Bounds of a judge. To explain takes time with the rules of the network, and what containers do
// must not take the agent's time: what comes above is told without its rule.
const (
	rulesKept        = 4096
	rulesASecond     = 256
	rulesForAllowed  = 128 // of these, so that what is allowed leaves some for what is not
	rulesBudgetLasts = time.Second
)

// judge says which rule decides on flows, and remembers it while the policy is the same. The zero
// judge knows nothing.
type judge struct {
	state *policy.State // that rules were explained by
	rules map[ruleKey]ruleFound
	by    directory // the endpoints of a state, as they are asked for
	since time.Time // from when on budget is spent
	spent int
}

type ruleKey struct {
	from, to netip.Addr
	port     uint16
	protocol model.Protocol
}

// policyProtocols are what policy tells apart, by the names that flows have for them.
var policyProtocols = map[string]model.Protocol{"tcp": model.ProtocolTCP, flow.RDMA: model.ProtocolTCP, "udp": model.ProtocolUDP, "icmp": model.ProtocolICMP, "other": model.ProtocolOther}

type ruleFound struct {
	verdict      model.Verdict
	policy, rule string
}

// explain gives the policy and the rule that decide on a flow; empty: none, or too many have asked.
// forbidden says that it is not allowed: states are the latest first, and one before it may be what
// it was judged by.
func (j *judge) explain(f *flow.Flow, forbidden bool, states ...*policy.State) (name, rule string) {
	for i, state := range states {
		if state == nil || len(state.Policies) == 0 || i > 0 && state == states[0] {
			continue
		}
		found, ok := j.ask(state, f, forbidden)
		if ok && (found.verdict != model.VerdictAllow) == forbidden {
			return found.policy, found.rule
		}
	}
	return "", ""
}

// ask explains a flow by one state; false: too many have asked.
func (j *judge) ask(state *policy.State, f *flow.Flow, urgent bool) (ruleFound, bool) {
	if j.state != state || len(j.rules) >= rulesKept {
		j.state, j.rules = state, make(map[ruleKey]ruleFound)
	}
	key := ruleKey{f.From.Addr, f.To.Addr, f.To.Port, policyProtocols[f.Protocol]}
	if found, ok := j.rules[key]; ok {
		return found, true
	}
	if !f.From.Addr.IsValid() || !f.To.Addr.IsValid() || !j.spend(time.Now(), urgent) {
		return ruleFound{}, false
	}
	j.by.self = state.Self
	j.by.follow(state.Endpoints, nil, netip.Prefix{})
	x := policy.ExplainBy(state, policy.Probe{From: key.from, To: key.to, Protocol: key.protocol, Port: key.port}, j.by.judged)
	found := ruleFound{verdict: x.Verdict}
	side := x.Egress
	if x.Ingress.Verdict > x.Egress.Verdict || x.Egress.Policy == "" {
		side = x.Ingress
	}
	if side.Policy != "" {
		found.policy, found.rule = side.Policy, side.String()
	}
	j.rules[key] = found
	return found, true
}

// spend reports whether something more may be explained now.
func (j *judge) spend(now time.Time, urgent bool) bool {
	if now.Sub(j.since) >= rulesBudgetLasts {
		j.since, j.spent = now, 0
	}
	if j.spent >= rulesASecond || !urgent && j.spent >= rulesForAllowed {
		return false
	}
	j.spent++
	return true
}
