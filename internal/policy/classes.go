package policy

import (
	"cmp"
	"slices"

	"heddle.dev/heddle/internal/model"
)

// reclassify gives every dirty point its class, computes the pairs of classes that are new or mean
// something else, and notes all that in the change.
func (c *Compiler) reclassify() {
	changed := make(map[*class]bool)
	moves := make(map[*class]map[string][]*point) // by where points come from and go to
	for p := range c.dirty {
		if p.gone {
			c.leave(p, changed)
			c.removePoint(p)
			delete(c.dirty, p)
		}
	}
	for p := range c.dirty {
		p.next = c.signatureOf(p)
		if p.class != nil && p.class.signature.key == p.next.key {
			p.next = nil
			continue
		}
		if moves[p.class] == nil {
			moves[p.class] = make(map[string][]*point)
		}
		moves[p.class][p.next.key] = append(moves[p.class][p.next.key], p)
	}
	r := revision{fresh: make(map[*class]bool), before: make(map[*class]*signature)}
	for from, groups := range moves {
		c.move(from, groups, changed, r)
	}
	for _, k := range inOrder(changed) {
		if len(k.members) == 0 {
			c.removeClass(k)
			delete(changed, k)
		}
	}
	c.describe(changed)
	c.pairAll(changed, r)
	for p := range c.hidden {
		if !p.gone && p.class != nil {
			c.enter(p)
		}
	}
	clear(c.hidden)
	clear(c.dirty)
	clear(c.removed)
}

func inOrder(set map[*class]bool) []*class {
	out := make([]*class, 0, len(set))
	for k := range set {
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b *class) int { return cmp.Compare(a.number, b.number) })
	return out
}

// move brings points of one class to others. A class all of whose points go the same way keeps its
// number, so that their entries can stay.
func (c *Compiler) move(from *class, groups map[string][]*point, changed map[*class]bool, r revision) {
	for key, points := range groups {
		if from != nil && len(points) == len(from.members) && c.classes[key] == nil {
			c.unindex(from)
			r.before[from], from.signature = from.signature, points[0].next
			c.index(from)
			changed[from] = true
			for _, p := range points {
				p.next = nil
			}
			continue
		}
		to := c.classes[key]
		if to == nil {
			c.lastClass++
			to = &class{number: c.lastClass, signature: points[0].next, members: make(map[*point]bool), pairs: make(map[*class]bool)}
			c.index(to)
			changed[to], r.fresh[to] = true, true
		}
		for _, p := range points {
			c.leave(p, changed)
			p.class, p.next = to, nil
			to.members[p] = true
			c.enter(p)
		}
	}
}

// leave takes p out of its class. A class that nobody is left in is noted as changed.
func (c *Compiler) leave(p *point, changed map[*class]bool) {
	if p.class == nil {
		return
	}
	delete(p.class.members, p)
	if len(p.class.members) == 0 {
		changed[p.class] = true
	}
	p.class = nil
}

func (c *Compiler) index(k *class) {
	c.classes[k.signature.key] = k
	for _, t := range k.signature.terms {
		put(c.withTerm, t, k)
	}
	for _, id := range k.signature.policies {
		put(c.withRules, id, k)
	}
}

func (c *Compiler) unindex(k *class) {
	if c.classes[k.signature.key] == k {
		delete(c.classes, k.signature.key)
	}
	for _, t := range k.signature.terms {
		take(c.withTerm, t, k)
	}
	for _, id := range k.signature.policies {
		take(c.withRules, id, k)
	}
	delete(c.wide, k)
}

func (c *Compiler) removeClass(k *class) {
	c.unindex(k)
	for other := range k.pairs {
		c.deletePair(k, other)
		c.deletePair(other, k)
		delete(other.pairs, k)
	}
}

// describe brings the defaults of classes up to date, and the entries of their points with them.
func (c *Compiler) describe(changed map[*class]bool) {
	for k := range changed {
		k.general = [2]general{egress: c.generalOf(k.signature, egress), ingress: c.generalOf(k.signature, ingress)}
		egressProfile, ingressProfile := c.side(k, nil, egress), c.side(k, nil, ingress)
		info := model.ClassInfo{Class: k.number, Egress: egressProfile[0][0].verdict, Ingress: ingressProfile[0][0].verdict}
		delete(c.wide, k)
		if !egressProfile.isConstant() || !ingressProfile.isConstant() {
			c.wide[k] = true
		}
		if info == k.info {
			continue
		}
		k.info = info
		for p := range k.members {
			c.enter(p)
		}
	}
}

// enter writes the entries of p; those of a class that is being made are written by describe.
func (c *Compiler) enter(p *point) {
	info := p.class.info
	if info.Class == model.ClassNone {
		return
	}
	if p.kind == pointPrefix {
		if c.tables.ByPrefix[p.prefix] != info {
			c.tables.ByPrefix[p.prefix], c.change.Set.ByPrefix[p.prefix] = info, info
		}
		return
	}
	for _, a := range p.addrs {
		if at := c.atAddr.of(a); at != nil && at != p {
			continue // an endpoint's address is the endpoint's, and of several the first one's
		}
		if c.tables.ByAddr[a] != info {
			c.tables.ByAddr[a], c.change.Set.ByAddr[a] = info, info
		}
	}
}

// removePoint deletes the entries of a point that is gone; another may take its place afterwards.
func (c *Compiler) removePoint(p *point) {
	switch p.kind {
	case pointPrefix:
		delete(c.prefixPoints, p.prefix)
		delete(c.tables.ByPrefix, p.prefix)
		c.gonePrefixes[p.prefix] = true
		return
	case pointNode, pointHost:
		delete(c.nodePoints, p.addrs[0])
	}
	for _, a := range p.addrs {
		delete(c.tables.ByAddr, a)
		c.goneAddrs[a] = true
		if at := c.atAddr.of(a); at != nil && at.class != nil {
			c.hidden[at] = true
		}
	}
}

// general is what the policies of a class say in one direction, whoever the other end is.
type general struct {
	byDefault model.Verdict
	any       []*compiledRule
}

func (c *Compiler) generalOf(s *signature, direction int) (g general) {
	for _, id := range s.policies {
		d := &c.byID[id].directions[direction]
		g.byDefault = g.byDefault.Worse(d.byDefault)
		g.any = append(g.any, d.any...)
	}
	return g
}

// side gives what the policies of k say of connections in a direction with points of other; nil:
// with one that no peer selects. It costs what is said of other: k may have many policies.
func (c *Compiler) side(k, other *class, direction int) profile {
	rules := slices.Clip(k.general[direction].any)
	if other != nil {
		for _, t := range other.signature.terms {
			rules = c.appendRules(rules, k.signature.policies, t, direction)
		}
	}
	return profileOf(k.general[direction].byDefault, rules)
}

// appendRules adds the rules of policies that name t.
func (c *Compiler) appendRules(rules []*compiledRule, policies []policyID, t termID, direction int) []*compiledRule {
	users := c.usedBy[t]
	if len(users) < len(policies) {
		for id := range users {
			if _, found := slices.BinarySearch(policies, id); found {
				rules = append(rules, c.byID[id].directions[direction].byTerm[t]...)
			}
		}
		return rules
	}
	for _, id := range policies {
		if users[id] {
			rules = append(rules, c.byID[id].directions[direction].byTerm[t]...)
		}
	}
	return rules
}

// pair brings one pair's entry up to date; it reports whether there is one.
func (c *Compiler) pair(from, to *class) bool {
	key := model.ClassPair{From: from.number, To: to.number}
	v := pairVerdict(c.side(from, to, egress), c.side(to, from, ingress))
	if len(v.Ports) == 0 && v.Default == from.info.Egress.Worse(to.info.Ingress) {
		c.deletePair(from, to)
		return false
	}
	if have, ok := c.tables.Pairs[key]; !ok || !equalVerdicts(have, v) {
		c.tables.Pairs[key], c.change.Set.Pairs[key] = v, v
	}
	return true
}

func (c *Compiler) deletePair(from, to *class) {
	key := model.ClassPair{From: from.number, To: to.number}
	if _, ok := c.tables.Pairs[key]; ok {
		delete(c.tables.Pairs, key)
		delete(c.change.Set.Pairs, key)
		c.gonePairs[key] = true
	}
}
