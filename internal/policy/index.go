package policy

import (
	"net/netip"
	"slices"
)

// indexKey is a label that an endpoint may have, or its namespace (scope 'n'): with one value, or
// with any.
type indexKey struct {
	scope    byte // 'e' or 'n'
	key      string
	value    string
	anyValue bool
}

// selection is a selector that the index knows: a policy's subject, or a term.
type selection struct {
	selector *Selector
	prefixes []netip.Prefix // of a subject
	policy   policyID       // of a subject, else 0
	term     termID         // of a term, else 0
	keys     []indexKey     // where it is found; none: it has to be tried with every endpoint
}

// selectorIndex finds the selectors that select an endpoint, and the endpoints that a selector
// selects, without trying each with each. Every selector hangs on one label that it requires, the
// rarest among endpoints.
type selectorIndex struct {
	byKey     map[indexKey]map[*selection]bool
	unkeyed   map[*selection]bool
	endpoints map[indexKey]map[*point]bool
}

func newSelectorIndex() selectorIndex {
	return selectorIndex{make(map[indexKey]map[*selection]bool), make(map[*selection]bool), make(map[indexKey]map[*point]bool)}
}

// put adds v to the set under k, take removes it.
func put[K, V comparable](sets map[K]map[V]bool, k K, v V) {
	set := sets[k]
	if set == nil {
		set = make(map[V]bool)
		sets[k] = set
	}
	set[v] = true
}

func take[K, V comparable](sets map[K]map[V]bool, k K, v V) {
	set := sets[k]
	delete(set, v)
	if len(set) == 0 {
		delete(sets, k)
	}
}

// alternatives gives, for each requirement that the index can go by, the keys of which an endpoint
// that meets it has exactly one.
func (r *Requirements) alternatives(scope byte) (out [][]indexKey) {
	for k, v := range r.Labels {
		out = append(out, []indexKey{{scope: scope, key: k, value: v}})
	}
	for _, e := range r.Expressions {
		switch e.Operator {
		case In:
			var all []indexKey
			for _, v := range e.Values {
				if a := (indexKey{scope: scope, key: e.Key, value: v}); !slices.Contains(all, a) {
					all = append(all, a)
				}
			}
			out = append(out, all)
		case Exists:
			out = append(out, []indexKey{{scope: scope, key: e.Key, anyValue: true}})
		}
	}
	return out
}

func (x *selectorIndex) add(s *selection) {
	all := s.selector.alternatives('e')
	if ns := s.selector.Namespace; ns != nil {
		all = append(all, ns.alternatives('n')...)
		if ns.Name != "" {
			all = append(all, []indexKey{{scope: 'n', key: NamespaceNameLabel, value: ns.Name}})
		}
	}
	best := -1
	for _, keys := range all {
		cost := 0
		for _, a := range keys {
			cost += len(x.endpoints[a])
		}
		if best < 0 || cost < best {
			best, s.keys = cost, keys
		}
	}
	if len(s.keys) == 0 {
		x.unkeyed[s] = true
	}
	for _, a := range s.keys {
		put(x.byKey, a, s)
	}
}

func (x *selectorIndex) remove(s *selection) {
	delete(x.unkeyed, s)
	for _, a := range s.keys {
		take(x.byKey, a, s)
	}
}

func (p *point) keys() (out []indexKey) {
	for scope, labels := range map[byte]map[string]string{'e': p.labels, 'n': p.nsLabels} {
		for k, v := range labels {
			out = append(out, indexKey{scope: scope, key: k, value: v}, indexKey{scope: scope, key: k, anyValue: true})
		}
	}
	return out
}

func (x *selectorIndex) addEndpoint(p *point) {
	for _, a := range p.keys() {
		put(x.endpoints, a, p)
	}
}

func (x *selectorIndex) removeEndpoint(p *point) {
	for _, a := range p.keys() {
		take(x.endpoints, a, p)
	}
}

// selecting calls found for each selector that selects p.
func (x *selectorIndex) selecting(p *point, found func(*selection)) {
	try := func(set map[*selection]bool) {
		for s := range set {
			if s.selects(p) {
				found(s)
			}
		}
	}
	try(x.unkeyed)
	for _, a := range p.keys() {
		try(x.byKey[a])
	}
}

// selected calls found for each endpoint of all that s selects.
func (x *selectorIndex) selected(s *selection, all map[endpointKey]*point, found func(*point)) {
	if len(s.keys) == 0 {
		for _, p := range all {
			if s.selects(p) {
				found(p)
			}
		}
	}
	for _, a := range s.keys {
		for p := range x.endpoints[a] {
			if s.selects(p) {
				found(p)
			}
		}
	}
}

func (s *selection) selects(p *point) bool {
	if !s.selector.matches(p.labels, p.namespace, p.nsLabels) {
		return false
	}
	return len(s.prefixes) == 0 || slices.ContainsFunc(s.prefixes, func(q netip.Prefix) bool { return inPrefix(q, nil, p.forms) })
}

// prefixIndex finds the terms whose prefix contains an address.
type prefixIndex struct {
	terms map[netip.Prefix]map[termID]bool
	// lengths counts the prefixes of each length, so that only those are looked up.
	lengths [2][129]int // IPv4, IPv6
}

func newPrefixIndex() prefixIndex { return prefixIndex{terms: make(map[netip.Prefix]map[termID]bool)} }

func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

func (x *prefixIndex) add(p netip.Prefix, t termID) {
	if x.terms[p] == nil {
		x.lengths[family(p.Addr())][p.Bits()]++
	}
	put(x.terms, p, t)
}

func (x *prefixIndex) remove(p netip.Prefix, t termID) {
	take(x.terms, p, t)
	if x.terms[p] == nil {
		x.lengths[family(p.Addr())][p.Bits()]--
	}
}

// containing calls found for each term whose prefix contains all of p.
func (x *prefixIndex) containing(p netip.Prefix, found func(termID)) {
	for bits := 0; bits <= p.Bits(); bits++ {
		if x.lengths[family(p.Addr())][bits] == 0 {
			continue
		}
		for t := range x.terms[netip.PrefixFrom(p.Addr(), bits).Masked()] {
			found(t)
		}
	}
}

// contains reports whether all of inner is in outer.
func contains(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}
