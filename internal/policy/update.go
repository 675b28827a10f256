package policy

import (
	"maps"
	"net/netip"
	"reflect"

	"heddle.dev/heddle/internal/model"
)

// same reports whether two slices are one.
func same[T any](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// unlike gives the parts of two lists of endpoints between what both begin and end with. It looks at little, and may
// take endpoints for unlike that are not.
func unlike(a, b []model.Endpoint) (fromA, fromB []model.Endpoint) {
	if same(a, b) {
		return nil, nil
	}
	for len(a) > 0 && len(b) > 0 && untouched(&a[0], &b[0]) {
		a, b = a[1:], b[1:]
	}
	for len(a) > 0 && len(b) > 0 && untouched(&a[len(a)-1], &b[len(b)-1]) {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	return a, b
}

// untouched reports whether two endpoints are copies of one.
func untouched(a, b *model.Endpoint) bool {
	return a.ID == b.ID && a.Node == b.Node && a.Name == b.Name && same(a.Addrs, b.Addrs) &&
		reflect.ValueOf(a.Labels).Pointer() == reflect.ValueOf(b.Labels).Pointer()
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

func (c *Compiler) updateNodes(s *State) {
	now := make(map[netip.Addr]bool)
	for _, n := range s.Nodes {
		kind := pointNode
		if n.Name == c.node {
			kind = pointHost
		}
		for _, a := range n.Addrs {
			if now[a] {
				continue // the first one's
			}
			now[a] = true
			p := c.nodePoints[a]
			if p == nil {
				p = &point{addrs: []netip.Addr{a}, forms: c.state.forms(a), kind: kind}
				c.nodePoints[a], c.dirty[p] = p, true
			} else if p.kind != kind || p.gone {
				p.kind, p.gone, c.dirty[p] = kind, false, true
			}
		}
	}
	for a, p := range c.nodePoints {
		if !now[a] {
			p.gone, c.dirty[p] = true, true
		}
	}
}

// updateEndpoints brings the points of endpoints to those that are there now; it gets all that may have changed.
func (c *Compiler) updateEndpoints(before, after []model.Endpoint) {
	now := make(map[endpointKey]bool, len(after))
	for _, e := range after {
		key := endpointKey{e.Node, e.ID}
		now[key] = true
		p := c.endpoints[key]
		if p != nil && sameEndpoint(p, e) {
			continue
		}
		if p != nil {
			c.removeEndpoint(key, p)
		}
		p = c.endpointPoint(e)
		c.endpoints[key], c.dirty[p] = p, true
		for _, a := range p.addrs {
			c.atAddr[a] = p
		}
		c.selectors.addEndpoint(p)
		put(c.inNamespace, p.namespace, p)
	}
	for _, e := range before {
		key := endpointKey{e.Node, e.ID}
		if p := c.endpoints[key]; p != nil && !now[key] {
			c.removeEndpoint(key, p)
		}
	}
}

func (c *Compiler) removeEndpoint(key endpointKey, p *point) {
	delete(c.endpoints, key)
	c.selectors.removeEndpoint(p)
	take(c.inNamespace, p.namespace, p)
	for _, a := range p.addrs {
		if c.atAddr[a] == p {
			delete(c.atAddr, a)
		}
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
