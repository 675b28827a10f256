package policy

import (
	"maps"
	"net/netip"

	"heddle.dev/heddle/internal/model"
)

// same reports whether two slices are one.
func same[T any](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

func (c *Compiler) updateNamespaces(s *State) {
	now := make(map[string]map[string]string, len(s.Namespaces))
	for _, n := range s.Namespaces {
		now[n.Name] = n.all()
	}
	before := c.namespaces
	c.namespaces = now
	for name := range mergedKeys(before, now) {
		for p := range c.inNamespace[name] {
			labels := c.namespaceLabels(name)
			if maps.Equal(labels, p.nsLabels) {
				continue
			}
			c.selectors.removeEndpoint(p)
			p.nsLabels = labels
			c.selectors.addEndpoint(p)
			c.dirty[p] = true
		}
	}
}

func mergedKeys[V any](a, b map[string]V) map[string]bool {
	out := make(map[string]bool, len(a)+len(b))
	for k := range a {
		out[k] = true
	}
	for k := range b {
		out[k] = true
	}
	return out
}

// nodeRefs counts the nodes that have an address: this one, and others. It is the host's if it is
// this one's, too.
type nodeRefs struct{ host, others int }

// updateNodes brings the points of nodes' addresses to those that are there now. It looks at what
// is between what both lists begin and end with.
func (c *Compiler) updateNodes(before, after []Node) {
	for len(before) > 0 && len(after) > 0 && untouched(before[0], after[0]) {
		before, after = before[1:], after[1:]
	}
	for len(before) > 0 && len(after) > 0 && untouched(before[len(before)-1], after[len(after)-1]) {
		before, after = before[:len(before)-1], after[:len(after)-1]
	}
	touched := make(map[netip.Addr]bool)
	count := func(nodes []Node, by int) {
		for _, n := range nodes {
			for _, a := range n.Addrs {
				refs := c.nodeRefs[a]
				if n.Name == c.node {
					refs.host += by
				} else {
					refs.others += by
				}
				c.nodeRefs[a], touched[a] = refs, true
			}
		}
	}
	count(before, -1)
	count(after, 1)
	for a := range touched {
		refs, p := c.nodeRefs[a], c.nodePoints[a]
		kind := pointNode
		if refs.host > 0 {
			kind = pointHost
		}
		switch {
		case refs == nodeRefs{}:
			delete(c.nodeRefs, a)
			if p != nil {
				p.gone, c.dirty[p] = true, true
			}
		case p == nil:
			p = &point{addrs: []netip.Addr{a}, forms: c.state.forms(a), kind: kind}
			c.nodePoints[a], c.dirty[p] = p, true
		case p.kind != kind || p.gone:
			p.kind, p.gone, c.dirty[p] = kind, false, true
		}
	}
}

// untouched reports whether two nodes are copies of one.
func untouched(a, b Node) bool { return a.Name == b.Name && same(a.Addrs, b.Addrs) }

// updateEndpoints brings the points of endpoints to those that are there now.
func (c *Compiler) updateEndpoints(changes []model.GroupChange) {
	for _, g := range changes {
		for e := range g.After.All() {
			key := endpointKey{e.Node, e.ID}
			p := c.endpoints[key]
			if p != nil && sameEndpoint(p, e) {
				continue
			}
			if p != nil {
				c.removeEndpoint(key, p)
			}
			p = c.endpointPoint(e)
			c.endpoints[key], c.dirty[p] = p, true
			c.atAddr.add(p)
			c.selectors.addEndpoint(p)
			put(c.inNamespace, p.namespace, p)
		}
	}
	for _, g := range changes {
		after := g.After.Joined() // sorted by id, as what was before
		for e := range g.Before.All() {
			key := endpointKey{g.Node, e.ID}
			for len(after) > 0 && after[0].ID < key.id {
				after = after[1:]
			}
			if p := c.endpoints[key]; p != nil && (len(after) == 0 || after[0].ID != key.id) {
				c.removeEndpoint(key, p)
			}
		}
	}
}

func (c *Compiler) removeEndpoint(key endpointKey, p *point) {
	delete(c.endpoints, key)
	c.selectors.removeEndpoint(p)
	take(c.inNamespace, p.namespace, p)
	c.atAddr.remove(p) // who has its addresses then is entered when its own entries are gone
	for _, a := range p.addrs {
		if n := c.nodePoints[a]; n != nil {
			c.hidden[n] = true
		}
	}
	p.gone, c.dirty[p] = true, true
}

// updateBase keeps the prefixes that every table has while there are policies.
func (c *Compiler) updateBase(s *State) {
	switch want := len(s.Policies) > 0; {
	case want && !c.based:
		for _, p := range s.base() {
			c.usePrefix(p)
		}
	case !want && c.based:
		for _, p := range s.base() {
			c.dropPrefix(p)
		}
	}
	c.based = len(s.Policies) > 0
}
