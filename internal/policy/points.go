package policy

import (
	"cmp"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"

	"heddle.dev/heddle/internal/model"
)

type (
	policyID uint32
	termID   uint32
)

type endpointKey struct {
	node string
	id   model.EndpointID
}

type pointKind uint8

const (
	pointEndpoint pointKind = iota
	pointNode               // an address of another node
	pointHost               // an address of this node
	pointPrefix             // what of a prefix is no other point
)

// point is what has one class: an endpoint with its addresses, an address of a node, or a prefix.
type point struct {
	kind   pointKind
	addrs  []netip.Addr // endpoints and nodes
	forms  []netip.Addr // addrs and their other forms
	prefix netip.Prefix
	inPool bool // of a prefix
	onLink bool // of a prefix: within linkPrefixes
	// Of an endpoint:
	key              endpointKey
	local            bool
	name, namespace  string
	labels, nsLabels map[string]string

	class *class
	next  *signature // what it shall have; nil: it stays as it is
	gone  bool
}

// signature is what two points must have in common to be of one class: who selects them, and which
// peers of rules they are.
type signature struct {
	policies []policyID
	terms    []termID
	local    bool
	key      string
}

func makeSignature(policies []policyID, terms []termID, local bool) *signature {
	slices.Sort(policies)
	slices.Sort(terms)
	s := &signature{policies: slices.Compact(policies), terms: slices.Compact(terms), local: local}
	key := make([]byte, 0, 4*(len(s.policies)+len(s.terms))+5)
	if local {
		key = append(key, 'l')
	} else {
		key = append(key, '-')
	}
	key = binary.LittleEndian.AppendUint32(key, uint32(len(s.policies)))
	for _, p := range s.policies {
		key = binary.LittleEndian.AppendUint32(key, uint32(p))
	}
	for _, t := range s.terms {
		key = binary.LittleEndian.AppendUint32(key, uint32(t))
	}
	s.key = string(key)
	return s
}

// signatureOf finds who selects p, and which terms it is.
func (c *Compiler) signatureOf(p *point) *signature {
	var policies []policyID
	var terms []termID
	entity := func(e Entity) {
		if t, used := c.entities[e]; used {
			terms = append(terms, t)
		}
	}
	switch p.kind {
	case pointEndpoint:
		c.selectors.selecting(p, func(s *selection) {
			if s.policy != 0 {
				policies = append(policies, s.policy)
			} else {
				terms = append(terms, s.term)
			}
		})
		entity(EntityEndpoints)
	case pointHost:
		entity(EntityNodes)
		entity(EntityHost)
	case pointNode:
		entity(EntityNodes)
	case pointPrefix:
		switch {
		case p.onLink:
			entity(EntityNodes)
			entity(EntityHost)
		case !p.inPool:
			entity(EntityOutside)
		}
	}
	for _, q := range p.prefixes() {
		c.prefixTerms.containing(q, func(t termID) {
			if !slices.ContainsFunc(c.terms[t].out, func(x netip.Prefix) bool { return contains(x, q) }) {
				terms = append(terms, t)
			}
		})
	}
	return makeSignature(policies, terms, p.local)
}

// prefixes gives what p covers, as prefixes.
func (p *point) prefixes() []netip.Prefix {
	if p.kind == pointPrefix {
		return []netip.Prefix{p.prefix}
	}
	out := make([]netip.Prefix, len(p.forms))
	for i, a := range p.forms {
		out[i] = netip.PrefixFrom(a, a.BitLen())
	}
	return out
}

// base are the prefixes that are always there: they tell outside from the overlay and from the
// link.
func (s *State) base() []netip.Prefix {
	out := []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
	return slices.Concat(out, linkPrefixes, s.pools())
}

func (s *State) pools() (out []netip.Prefix) {
	for _, p := range s.Pool {
		out = append(out, p)
		if p6 := model.OverlayPrefix6(s.Prefix6, p); p6.IsValid() {
			out = append(out, p6)
		}
	}
	return out
}

// expand gives p and what its overlay addresses are in the other family.
func (s *State) expand(p netip.Prefix) []netip.Prefix {
	out := []netip.Prefix{p}
	add := func(q netip.Prefix) {
		if q.IsValid() && !slices.Contains(out, q) {
			out = append(out, q)
		}
	}
	for _, pool := range s.Pool {
		pool6 := model.OverlayPrefix6(s.Prefix6, pool)
		if !pool6.IsValid() {
			continue
		}
		switch {
		case contains(pool, p):
			add(model.OverlayPrefix6(s.Prefix6, p))
		case contains(pool6, p):
			add(model.OverlayPrefix4(s.Prefix6, p))
		case contains(p, pool):
			add(pool6)
		case contains(p, pool6):
			add(pool)
		}
	}
	return out
}

func (c *Compiler) expandAll(list []netip.Prefix) (out []netip.Prefix) {
	for _, p := range list {
		out = append(out, c.state.expand(p)...)
	}
	return out
}

// endpointPoint makes the point of e.
func (c *Compiler) endpointPoint(e model.Endpoint) *point {
	p := &point{kind: pointEndpoint, key: endpointKey{e.Node, e.ID}, local: e.Node == c.node, addrs: e.Addrs, name: e.Name, labels: e.Labels, namespace: NamespaceOf(e)}
	p.nsLabels = c.namespaceLabels(p.namespace)
	for _, a := range e.Addrs {
		for _, f := range c.state.forms(a) {
			if !slices.Contains(p.forms, f) {
				p.forms = append(p.forms, f)
			}
		}
	}
	return p
}

func (c *Compiler) namespaceLabels(name string) map[string]string {
	if l, ok := c.namespaces[name]; ok {
		return l
	}
	return Namespace{Name: name}.all()
}

// sameEndpoint reports whether e is what p was made of.
func sameEndpoint(p *point, e model.Endpoint) bool {
	return p.name == e.Name && slices.Equal(p.addrs, e.Addrs) && maps.Equal(p.labels, e.Labels)
}

// holders are the endpoints that have an address, the one that it is judged as first: see
// State.Endpoints.
type holders map[netip.Addr][]*point

// of gives the endpoint that a is judged as; nil: a is no endpoint's.
func (h holders) of(a netip.Addr) *point {
	if len(h[a]) == 0 {
		return nil
	}
	return h[a][0]
}

func (h holders) add(p *point) {
	for _, a := range p.addrs {
		at, there := slices.BinarySearchFunc(h[a], p, compareHolders)
		if !there {
			h[a] = slices.Insert(h[a], at, p)
		}
	}
}

func (h holders) remove(p *point) {
	for _, a := range p.addrs {
		left := slices.DeleteFunc(h[a], func(q *point) bool { return q == p })
		if len(left) == 0 {
			delete(h, a)
		} else {
			h[a] = left
		}
	}
}

// compareHolders puts this node's endpoints first, and then goes by what State.endpointAt goes by.
func compareHolders(p, q *point) int {
	switch {
	case p.local && !q.local:
		return -1
	case q.local && !p.local:
		return 1
	}
	return cmp.Or(cmp.Compare(p.key.node, q.key.node), cmp.Compare(p.key.id, q.key.id))
}
