package policy

import (
	"cmp"
	"slices"

	"heddle.dev/heddle/internal/model"
)

// protocols that rules tell apart; the first stands for what has no name.
var protocols = [...]model.Protocol{model.ProtocolOther, model.ProtocolICMP, model.ProtocolTCP, model.ProtocolUDP}

// segment is a range of ports with one verdict.
type segment struct {
	first, last uint16
	verdict     model.Verdict
}

// profile is a verdict for every port of each of protocols, in that order: segments that cover all
// ports, in order, neighbours different.
type profile [len(protocols)][]segment

// compiledRule is a rule without its peers.
type compiledRule struct {
	verdict model.Verdict
	ports   []Ports // empty: all
}

// constant gives a profile that has v everywhere.
func constant(v model.Verdict) (p profile) {
	for i := range p {
		p[i] = []segment{{0, lastPort, v}}
	}
	return p
}

func (p profile) isConstant() bool {
	for _, segments := range p {
		if len(segments) != 1 || segments[0].verdict != p[0][0].verdict {
			return false
		}
	}
	return true
}

// profileOf gives what rules that match a peer come to: of the denials the worst, else allow if one
// allows, else byDefault.
func profileOf(byDefault model.Verdict, rules []*compiledRule) (p profile) {
	if len(rules) == 0 {
		return constant(byDefault)
	}
	for i, protocol := range protocols {
		p[i] = sweep(byDefault, protocol, rules)
	}
	return p
}

// boundary is where rules begin (+1) or end (-1) to match, by what they say.
type boundary struct {
	port    int
	verdict model.Verdict
	step    int
}

func sweep(byDefault model.Verdict, protocol model.Protocol, rules []*compiledRule) (out []segment) {
	var boundaries []boundary
	for _, r := range rules {
		if len(r.ports) == 0 {
			boundaries = append(boundaries, boundary{0, r.verdict, 1})
		}
		for _, p := range r.ports {
			if p.Protocol == protocol {
				boundaries = append(boundaries, boundary{int(p.First), r.verdict, 1}, boundary{int(p.Last) + 1, r.verdict, -1})
			}
		}
	}
	slices.SortFunc(boundaries, func(a, b boundary) int { return cmp.Compare(a.port, b.port) })
	var matching [model.VerdictDrop + 1]int
	at := 0
	emit := func(until int) {
		v := byDefault
		switch {
		case matching[model.VerdictDrop] > 0:
			v = model.VerdictDrop
		case matching[model.VerdictReject] > 0:
			v = model.VerdictReject
		case matching[model.VerdictAllow] > 0:
			v = model.VerdictAllow
		}
		if n := len(out); n > 0 && out[n-1].verdict == v {
			out[n-1].last = uint16(until - 1)
		} else {
			out = append(out, segment{uint16(at), uint16(until - 1), v})
		}
		at = until
	}
	for _, e := range boundaries {
		if e.port > at {
			emit(e.port)
		}
		matching[e.verdict] += e.step
	}
	if at <= lastPort {
		emit(lastPort + 1)
	}
	return out
}

// pairVerdict takes both directions together: the worse of the two, everywhere.
func pairVerdict(egress, ingress profile) model.PairVerdict {
	out := model.PairVerdict{Default: egress[0][0].verdict.Worse(ingress[0][0].verdict)}
	for i, protocol := range protocols[1:] {
		a, b := egress[i+1], ingress[i+1]
		for len(a) > 0 && len(b) > 0 {
			first, last := max(a[0].first, b[0].first), min(a[0].last, b[0].last)
			v := a[0].verdict.Worse(b[0].verdict)
			if v != out.Default {
				n := len(out.Ports)
				if n > 0 && out.Ports[n-1].Protocol == protocol && out.Ports[n-1].Verdict == v && out.Ports[n-1].Last+1 == first {
					out.Ports[n-1].Last = last
				} else {
					out.Ports = append(out.Ports, model.PortVerdict{Protocol: protocol, First: first, Last: last, Verdict: v})
				}
			}
			if a[0].last == last {
				a = a[1:]
			}
			if b[0].last == last {
				b = b[1:]
			}
		}
	}
	return out
}

func equalVerdicts(a, b model.PairVerdict) bool {
	return a.Default == b.Default && slices.Equal(a.Ports, b.Ports)
}
