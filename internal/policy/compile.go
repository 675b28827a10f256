package policy

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	"heddle.dev/heddle/internal/model"
)

// Compiler keeps the tables of one node in step with a State. What an Update costs depends on what
// has changed and on what it concerns, but for a quick comparison of the two states' lists. It is
// not safe for concurrent use.
//
// An endpoint, a node's address or a prefix is a point. Points that the same subjects and the same
// peers of rules select have the same signature, and so one class: no rule can tell them apart. A
// pair of classes has an entry where rules make its verdict another than the defaults of both.
type Compiler struct {
	node  string
	state *State // the last one compiled; nil before
	seen  *State // what of it counted: nothing but the pool while there are no policies

	policies map[*Policy]policyID
	byID     map[policyID]*compiled
	lastID   policyID

	terms    map[termID]*term
	termOf   map[string]termID // by the peer's JSON
	entities map[Entity]termID
	lastTerm termID
	usedBy   map[termID]map[policyID]bool

	selectors   selectorIndex
	prefixTerms prefixIndex
	namespaces  map[string]map[string]string // labels, by name

	endpoints    map[endpointKey]*point
	inNamespace  map[string]map[*point]bool
	nodePoints   map[netip.Addr]*point
	nodeRefs     map[netip.Addr]nodeRefs
	prefixPoints map[netip.Prefix]*point
	prefixUses   map[netip.Prefix]int

	classes   map[string]*class // by the signature's key
	withTerm  map[termID]map[*class]bool
	withRules map[policyID]map[*class]bool
	wide      map[*class]bool // whose rules for any peer name ports, so that every pair may need an entry
	lastClass model.Class

	atAddr holders         // endpoints, whose addresses no node's point may take
	hidden map[*point]bool // points whose address another had
	based  bool            // the prefixes of State.base are there

	removed map[policyID]*compiled // gone since the last reclassify, which looks for the pairs that they made

	dirty    map[*point]bool
	allDirty bool // every point is in dirty: nothing needs to be looked for
	tables   model.PolicyTables
	// The change being made, and what may be gone when it is done.
	change       model.PolicyChange
	goneAddrs    map[netip.Addr]bool
	gonePrefixes map[netip.Prefix]bool
	gonePairs    map[model.ClassPair]bool
}

// term is one peer of rules: rules that name the same share it.
type term struct {
	id        termID
	key       string
	peer      Peer
	uses      int // of policies, counted once for each time they name it
	selection *selection
	in, out   []netip.Prefix // of a prefix: what is in it in both families, and the exceptions
}

// compiled is a policy with terms instead of peers.
type compiled struct {
	id         policyID
	policy     *Policy
	subject    *selection
	directions [2]direction // egress, ingress
	terms      map[termID]bool
}

const (
	egress  = 0
	ingress = 1
)

type direction struct {
	byDefault model.Verdict
	byTerm    map[termID][]*compiledRule
	any       []*compiledRule // without peers
}

// class is a set of points with one signature.
type class struct {
	number    model.Class
	signature *signature
	general   [2]general // egress, ingress: of the signature's policies
	members   map[*point]bool
	info      model.ClassInfo
	pairs     map[*class]bool // the other ends of its entries in the tables, either way
}

// NewCompiler gives the compiler of a node that lives by the given name.
func NewCompiler(node string) *Compiler {
	c := &Compiler{node: node}
	c.forget()
	return c
}

func (c *Compiler) forget() {
	*c = Compiler{
		node: c.node, lastClass: c.lastClass,
		policies: make(map[*Policy]policyID), byID: make(map[policyID]*compiled),
		terms: make(map[termID]*term), termOf: make(map[string]termID), entities: make(map[Entity]termID),
		usedBy: make(map[termID]map[policyID]bool), selectors: newSelectorIndex(), prefixTerms: newPrefixIndex(),
		namespaces: make(map[string]map[string]string), endpoints: make(map[endpointKey]*point),
		inNamespace: make(map[string]map[*point]bool), nodePoints: make(map[netip.Addr]*point), nodeRefs: make(map[netip.Addr]nodeRefs),
		prefixPoints: make(map[netip.Prefix]*point), prefixUses: make(map[netip.Prefix]int),
		classes: make(map[string]*class), withTerm: make(map[termID]map[*class]bool),
		withRules: make(map[policyID]map[*class]bool), wide: make(map[*class]bool), dirty: make(map[*point]bool),
		removed: make(map[policyID]*compiled),
		tables:  emptyTables(), atAddr: make(holders), hidden: make(map[*point]bool),
	}
}

func emptyTables() model.PolicyTables {
	return model.PolicyTables{ByAddr: make(map[netip.Addr]model.ClassInfo), ByPrefix: make(map[netip.Prefix]model.ClassInfo),
		Pairs: make(map[model.ClassPair]model.PairVerdict)}
}

// Tables gives the tables that the last Update led to. The caller must not change them, and not
// keep them beyond the next Update.
func (c *Compiler) Tables() model.PolicyTables { return c.tables }

// Whole gives a change that brings any datapath to Tables.
func (c *Compiler) Whole() model.PolicyChange {
	return model.PolicyChange{Reset: true, Set: c.tables}
}

// Update compiles s, and gives what has changed since the last Update; the first time everything,
// with Reset. Without policies the tables are empty. s must not change while it is the last one,
// and a slice of s that is the last one's, its memory included, must be as it was: then it costs
// nothing.
func (c *Compiler) Update(s *State) model.PolicyChange {
	first := c.state == nil || !slices.Equal(c.state.Pool, s.Pool) || c.state.Prefix6 != s.Prefix6
	if first {
		c.forget()
	}
	c.change = model.PolicyChange{Reset: first, Set: emptyTables()}
	c.goneAddrs, c.gonePrefixes, c.gonePairs = make(map[netip.Addr]bool), make(map[netip.Prefix]bool), make(map[model.ClassPair]bool)
	c.state = s
	c.allDirty = len(c.classes) == 0
	if len(s.Policies) == 0 {
		// Everything is open: no class is worth its place.
		s = &State{Pool: s.Pool, Prefix6: s.Prefix6}
	}
	before := c.seen
	if before == nil {
		before = &State{}
	}
	if !same(before.Namespaces, s.Namespaces) {
		c.updateNamespaces(s)
	}
	c.updateNodes(before.Nodes, s.Nodes)
	c.updateEndpoints(s.Endpoints.ChangedSince(before.Endpoints))
	c.updateBase(s)
	if !same(before.Policies, s.Policies) {
		c.updatePolicies(s)
	}
	c.seen = s
	c.reclassify()
	return c.finish()
}

// finish gives the change, with what is gone and has not come again.
func (c *Compiler) finish() model.PolicyChange {
	out := c.change
	c.change = model.PolicyChange{}
	if out.Reset {
		return out
	}
	for a := range c.goneAddrs {
		if _, there := c.tables.ByAddr[a]; !there {
			out.DeleteAddrs = append(out.DeleteAddrs, a)
		}
	}
	for p := range c.gonePrefixes {
		if _, there := c.tables.ByPrefix[p]; !there {
			out.DeletePrefixes = append(out.DeletePrefixes, p)
		}
	}
	for p := range c.gonePairs {
		if _, there := c.tables.Pairs[p]; !there {
			out.DeletePairs = append(out.DeletePairs, p)
		}
	}
	return out
}

// manyTerms is how many new terms make it cheaper to look at every point once than to look for
// those that each concerns.
const manyTerms = 200

// manyNewTerms reports whether policies name more than manyTerms peers that no policy named before,
// or are that many.
func (c *Compiler) manyNewTerms(added []*Policy) bool {
	fresh := len(added)
	for _, p := range added {
		for _, d := range []*Direction{p.Egress, p.Ingress} {
			if d == nil {
				continue
			}
			for _, r := range d.Rules {
				for _, peer := range r.Peers {
					if fresh > manyTerms {
						return true
					}
					key, _ := termKey(peer)
					if _, known := c.termOf[key]; !known {
						fresh++
					}
				}
			}
		}
	}
	return fresh > manyTerms
}

// touchAll makes every point dirty.
func (c *Compiler) touchAll() {
	c.allDirty = true
	for _, p := range c.endpoints {
		c.dirty[p] = true
	}
	for _, p := range c.nodePoints {
		c.dirty[p] = true
	}
	for _, p := range c.prefixPoints {
		c.dirty[p] = true
	}
}

// updatePolicies compiles new policies before it forgets old ones, so that the terms both have
// stay.
func (c *Compiler) updatePolicies(s *State) {
	now := make(map[*Policy]bool, len(s.Policies))
	var added []*Policy
	for _, p := range s.Policies {
		now[p] = true
		if _, known := c.policies[p]; !known {
			added = append(added, p)
		}
	}
	if !c.allDirty && c.manyNewTerms(added) {
		c.touchAll()
	}
	for _, p := range added {
		c.addPolicy(p)
	}
	for p, id := range c.policies {
		if !now[p] {
			c.removePolicy(p, id)
		}
	}
}

func (c *Compiler) addPolicy(p *Policy) {
	c.lastID++
	x := &compiled{id: c.lastID, policy: p, terms: make(map[termID]bool)}
	c.policies[p], c.byID[x.id] = x.id, x
	for i, d := range []*Direction{p.Egress, p.Ingress} {
		out := &x.directions[i]
		out.byTerm = make(map[termID][]*compiledRule)
		if d == nil {
			continue
		}
		if d.Default == DefaultDeny {
			out.byDefault = d.Deny.verdict()
		}
		for _, r := range d.Rules {
			rule := &compiledRule{ports: r.Ports}
			if r.Action == Block {
				rule.verdict = r.verdict(d)
			}
			if len(r.Peers) == 0 {
				out.any = append(out.any, rule)
			}
			for _, peer := range r.Peers {
				t := c.useTerm(peer)
				x.terms[t] = true
				out.byTerm[t] = append(out.byTerm[t], rule)
			}
		}
	}
	for t := range x.terms {
		put(c.usedBy, t, x.id)
	}
	x.subject = &selection{selector: &p.Subject.Selector, prefixes: p.Subject.Prefixes, policy: x.id}
	c.addSelection(x.subject)
}

func (c *Compiler) addSelection(s *selection) {
	c.selectors.add(s)
	if !c.allDirty {
		c.selectors.selected(s, c.endpoints, func(p *point) { c.dirty[p] = true })
	}
}

func (c *Compiler) removePolicy(p *Policy, id policyID) {
	x := c.byID[id]
	delete(c.policies, p)
	delete(c.byID, id)
	c.selectors.remove(x.subject)
	for k := range c.withRules[id] {
		c.touchMembers(k)
	}
	c.removed[id] = x
	for t := range x.terms {
		take(c.usedBy, t, id)
	}
	for _, d := range []*Direction{p.Egress, p.Ingress} {
		if d == nil {
			continue
		}
		for _, r := range d.Rules {
			for _, peer := range r.Peers {
				c.dropTerm(peer)
			}
		}
	}
}

func (c *Compiler) touchMembers(k *class) {
	for p := range k.members {
		c.dirty[p] = true
	}
}

func termKey(p Peer) (string, Peer) {
	if p.Endpoints != nil && p.Endpoints.Namespace == nil && len(p.Endpoints.Labels) == 0 && len(p.Endpoints.Expressions) == 0 {
		p = Peer{Entity: EntityEndpoints}
	}
	key, err := json.Marshal(p)
	if err != nil {
		panic(fmt.Sprintf("peer %+v: %v", p, err)) // no valid policy has one that cannot be written
	}
	return string(key), p
}

// useTerm gives the term of a peer, and makes it if it is new.
func (c *Compiler) useTerm(peer Peer) termID {
	key, peer := termKey(peer)
	if id, known := c.termOf[key]; known {
		c.terms[id].uses++
		return id
	}
	c.lastTerm++
	t := &term{id: c.lastTerm, key: key, peer: peer, uses: 1}
	c.terms[t.id], c.termOf[key] = t, t.id
	switch {
	case peer.Endpoints != nil:
		t.selection = &selection{selector: peer.Endpoints, term: t.id}
		c.addSelection(t.selection)
	case peer.Entity != "":
		c.entities[peer.Entity] = t.id
		c.touchEntity(peer.Entity)
	default:
		t.in, t.out = c.expandAll([]netip.Prefix{peer.Prefix}), c.expandAll(peer.Except)
		for _, p := range t.in {
			c.prefixTerms.add(p, t.id)
		}
		for _, p := range slices.Concat(t.in, t.out) {
			c.usePrefix(p)
		}
		c.touchPrefixes(t)
	}
	return t.id
}

func (c *Compiler) dropTerm(peer Peer) {
	key, _ := termKey(peer)
	t := c.terms[c.termOf[key]]
	if t.uses--; t.uses > 0 {
		return
	}
	delete(c.terms, t.id)
	delete(c.termOf, key)
	for k := range c.withTerm[t.id] {
		c.touchMembers(k)
	}
	switch {
	case t.selection != nil:
		c.selectors.remove(t.selection)
	case t.peer.Entity != "":
		delete(c.entities, t.peer.Entity)
	default:
		for _, p := range t.in {
			c.prefixTerms.remove(p, t.id)
		}
		for _, p := range slices.Concat(t.in, t.out) {
			c.dropPrefix(p)
		}
	}
}

func (c *Compiler) touchEntity(e Entity) {
	if c.allDirty {
		return
	}
	if e == EntityEndpoints {
		for _, p := range c.endpoints {
			c.dirty[p] = true
		}
	}
	if e != EntityEndpoints {
		for _, p := range c.prefixPoints {
			c.dirty[p] = true
		}
	}
	if e == EntityNodes || e == EntityHost {
		for _, p := range c.nodePoints {
			c.dirty[p] = true
		}
	}
}

// touchPrefixes finds what is inside the prefixes of a new term.
func (c *Compiler) touchPrefixes(t *term) {
	if c.allDirty {
		return
	}
	for _, in := range t.in {
		touch := func(p *point) {
			if !c.dirty[p] && slices.ContainsFunc(p.forms, in.Contains) {
				c.dirty[p] = true
			}
		}
		for _, p := range c.endpoints {
			touch(p)
		}
		for _, p := range c.nodePoints {
			touch(p)
		}
		if in.IsSingleIP() { // nothing else is inside
			c.dirty[c.prefixPoints[in]] = true
			continue
		}
		for q, p := range c.prefixPoints {
			if contains(in, q) {
				c.dirty[p] = true
			}
		}
	}
}

// usePrefix makes the point of a prefix if it is new. Nothing else changes: what was around it is
// as it was.
func (c *Compiler) usePrefix(q netip.Prefix) {
	c.prefixUses[q]++
	if p := c.prefixPoints[q]; p != nil {
		if p.gone { // it went in this same update
			p.gone, c.dirty[p] = false, true
		}
		return
	}
	within := func(prefixes []netip.Prefix) bool {
		return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return contains(p, q) })
	}
	p := &point{kind: pointPrefix, prefix: q, inPool: within(c.state.pools()), onLink: within(linkPrefixes)}
	c.prefixPoints[q], c.dirty[p] = p, true
}

func (c *Compiler) dropPrefix(q netip.Prefix) {
	if c.prefixUses[q]--; c.prefixUses[q] == 0 {
		delete(c.prefixUses, q)
		p := c.prefixPoints[q]
		p.gone, c.dirty[p] = true, true
	}
}
