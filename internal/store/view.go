package store

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"

	"heddle.dev/heddle/internal/model"
)

// View builds States from the keys and values of one network. It is not safe for concurrent use: the
// goroutine that watches owns it.
type View struct {
	keys      Keys
	log       *slog.Logger
	onInvalid func()

	nodes     map[string]nodeRecord
	endpoints map[string]map[model.EndpointID]model.Endpoint // by node
	policies
	holders map[string]Holder
	away    map[string]Away
	// Copies that states have; nil: what they are of has changed since.
	holdersShown map[string]Holder
	awayShown    map[string]Away
	moves        map[netip.Addr]model.Move

	// The last state, and what has changed since.
	last         State // Nodes, Endpoints and Moves only
	accepted     map[string]model.Node
	acceptedOn   map[string][]model.Endpoint // by node, sorted by id
	prefixes     *prefixSet                  // of the accepted nodes
	nodesChanged bool
	movedTo      map[netip.Addr]string // the accepted moves
	movesChanged map[netip.Addr]bool
	carriedOn    map[string]bool // nodes with endpoints that have addresses of other networks
	changedOn    map[string]bool // nodes of which an endpoint has changed
	// Why a valid value is not part of the last state, by key, so that the same contradiction is reported once:
	// of nodes, and of endpoints by node.
	excludedNodes map[string]string
	excludedOn    map[string]map[string]string
}

type nodeRecord struct {
	node    model.Node
	created int64 // the store's revision that made the key: the older of two contradicting nodes wins
}

// NewView gives an empty view. onInvalid is called for every value that is skipped.
func NewView(keys Keys, log *slog.Logger, onInvalid func()) *View {
	v := &View{keys: keys, log: log, onInvalid: onInvalid, excludedOn: make(map[string]map[string]string)}
	v.Reset()
	return v
}

// Reset forgets all values, before they are read anew.
func (v *View) Reset() {
	v.nodes = make(map[string]nodeRecord)
	v.endpoints = make(map[string]map[model.EndpointID]model.Endpoint)
	v.accepted, v.acceptedOn = nil, make(map[string][]model.Endpoint)
	v.last, v.nodesChanged, v.changedOn, v.carriedOn = State{}, true, make(map[string]bool), make(map[string]bool)
	v.moves, v.movedTo, v.movesChanged = make(map[netip.Addr]model.Move), nil, make(map[netip.Addr]bool)
	v.policies.reset()
	v.holders, v.away = make(map[string]Holder), make(map[string]Away)
	v.holdersShown, v.awayShown = nil, nil
}

// Set takes in the value of key, which the store's revision created made first. A value that breaks the
// schema is logged and counted, and its key treated as absent.
func (v *View) Set(key string, value []byte, created int64) {
	k, err := v.keys.Parse(key)
	if err != nil {
		v.skip(key, err.Error())
		return
	}
	switch k.Kind {
	case KeyNode:
		v.nodesChanged = true
		n, err := ParseNode(k.Node, value)
		if err != nil {
			delete(v.nodes, k.Node)
			v.skip(key, err.Error())
			return
		}
		v.nodes[k.Node] = nodeRecord{node: n, created: created}
	case KeyHolder:
		v.holdersShown = nil
		h, err := ParseHolder(k.Node, value)
		if err != nil {
			delete(v.holders, k.Node)
			v.skip(key, err.Error())
			return
		}
		v.holders[k.Node] = h
	case KeyAway:
		v.awayShown = nil
		a, err := ParseAway(k.Node, value)
		if err != nil {
			delete(v.away, k.Node)
			v.skip(key, err.Error())
			return
		}
		v.away[k.Node] = a
	case KeyEndpoint:
		v.changedOn[k.Node] = true
		e, err := ParseEndpoint(k.Node, k.Endpoint, value)
		if err != nil {
			delete(v.endpoints[k.Node], k.Endpoint)
			v.skip(key, err.Error())
			return
		}
		if v.endpoints[k.Node] == nil {
			v.endpoints[k.Node] = make(map[model.EndpointID]model.Endpoint)
		}
		v.endpoints[k.Node][k.Endpoint] = e
	case KeyMove:
		m, err := ParseMove(k.Addr, value)
		if err != nil {
			v.setMove(k.Addr, nil)
			v.skip(key, err.Error())
			return
		}
		v.setMove(k.Addr, &m)
	case KeyPolicy:
		if err := v.setPolicy(k.Name, value); err != nil {
			v.skip(key, err.Error())
		}
	case KeyNamespace:
		n, err := ParseNamespace(k.Name, value)
		if err != nil {
			v.deleteNamespace(k.Name)
			v.skip(key, err.Error())
			return
		}
		v.setNamespace(n)
	}
}

// Delete takes in that key is gone.
func (v *View) Delete(key string) {
	k, err := v.keys.Parse(key)
	if err != nil {
		return // Set skipped it
	}
	switch k.Kind {
	case KeyNode:
		v.nodesChanged = true
		delete(v.nodes, k.Node)
	case KeyHolder:
		v.holdersShown = nil
		delete(v.holders, k.Node)
	case KeyAway:
		v.awayShown = nil
		delete(v.away, k.Node)
	case KeyEndpoint:
		v.changedOn[k.Node] = true
		delete(v.endpoints[k.Node], k.Endpoint)
	case KeyMove:
		v.setMove(k.Addr, nil)
	case KeyPolicy:
		v.deletePolicy(k.Name)
	case KeyNamespace:
		v.deleteNamespace(k.Name)
	}
}

// State gives the state at revision. Values that contradict older ones, which no writer that keeps to the
// schema produces, are left out, logged and counted. It costs what has changed since the last one: the endpoints of nodes
// of which one has changed, and a copy of all that there are; nothing for what has not changed.
func (v *View) State(revision int64) State {
	if v.nodesChanged {
		v.refreshNodes()
	}
	if v.nodesChanged || len(v.changedOn) > 0 {
		v.refreshEndpoints()
	}
	v.nodesChanged = false
	clear(v.changedOn)
	if v.holdersShown == nil {
		v.holdersShown = maps.Clone(v.holders)
	}
	if v.awayShown == nil {
		v.awayShown = maps.Clone(v.away)
	}
	s := State{Revision: revision, Holders: v.holdersShown, Away: v.awayShown, Nodes: v.last.Nodes, Endpoints: v.last.Endpoints, Moves: v.last.Moves}
	v.policies.addTo(&s)
	return s
}

// refreshNodes decides anew which nodes are there, and which endpoints have to be looked at again for that.
func (v *View) refreshNodes() {
	before := v.accepted
	excluded := make(map[string]string)
	exclude := v.excluder(excluded, v.excludedNodes)
	v.accepted, v.prefixes = v.acceptNodes(exclude)
	v.refreshMoves(exclude)
	maps.Copy(v.changedOn, v.carriedOn) // the addresses of other networks must not be in any node's prefixes
	v.excludedNodes = excluded
	v.last.Nodes = make([]model.Node, 0, len(v.accepted))
	for name, n := range v.accepted {
		v.last.Nodes = append(v.last.Nodes, n)
		if old, was := before[name]; !was || !slices.Equal(old.Prefixes, n.Prefixes) {
			v.changedOn[name] = true
		}
	}
	for name := range before {
		if _, is := v.accepted[name]; !is {
			v.changedOn[name] = true
		}
	}
	slices.SortFunc(v.last.Nodes, func(a, b model.Node) int { return cmp.Compare(a.Name, b.Name) })
}

// refreshEndpoints decides anew which endpoints are there, of those nodes where one has changed. Nodes' prefixes are
// disjoint, an address that has moved is one node's, and one of another network may be claimed by two, so that no endpoint
// contradicts one of another node.
func (v *View) refreshEndpoints() {
	if len(v.changedOn) == 0 {
		return
	}
	for name := range v.changedOn {
		excluded := make(map[string]string)
		exclude := v.excluder(excluded, v.excludedOn[name])
		all := slices.SortedFunc(maps.Values(v.endpoints[name]), func(a, b model.Endpoint) int { return cmp.Compare(a.ID, b.ID) })
		holder := make(map[netip.Addr]model.EndpointID, len(all))
		delete(v.carriedOn, name)
		accepted := all[:0]
		for _, e := range all {
			if e.Carried != nil {
				v.carriedOn[name] = true
			}
			if why := v.refuseEndpoint(e, holder); why != "" {
				exclude(v.keys.Endpoint(e.Node, e.ID), why)
				continue
			}
			holder[e.Addr4()] = e.ID
			accepted = append(accepted, e)
		}
		v.acceptedOn[name], v.excludedOn[name] = accepted, excluded
		if len(v.endpoints[name]) == 0 {
			delete(v.acceptedOn, name)
			delete(v.excludedOn, name)
			delete(v.endpoints, name)
		}
	}
	count := 0
	for _, on := range v.acceptedOn {
		count += len(on)
	}
	v.last.Endpoints = make([]model.Endpoint, 0, count)
	for _, name := range slices.Sorted(maps.Keys(v.acceptedOn)) {
		v.last.Endpoints = append(v.last.Endpoints, v.acceptedOn[name]...)
	}
}

// excluder gives a function that notes in now why a value is left out. What before says already is not reported again.
func (v *View) excluder(now, before map[string]string) func(key, why string) {
	return func(key, why string) {
		now[key] = why
		if before[key] != why {
			v.skip(key, why)
		}
	}
}

// acceptNodes picks the nodes whose prefixes and underlay addresses contradict no older node's.
func (v *View) acceptNodes(exclude func(key, why string)) (map[string]model.Node, *prefixSet) {
	records := make([]nodeRecord, 0, len(v.nodes))
	for _, r := range v.nodes {
		records = append(records, r)
	}
	slices.SortFunc(records, func(a, b nodeRecord) int {
		return cmp.Or(cmp.Compare(a.created, b.created), cmp.Compare(a.node.Name, b.node.Name))
	})
	accepted := make(map[string]model.Node, len(records))
	underlay := make(map[netip.Addr]string, len(records))
	var taken prefixSet
	for _, r := range records {
		n := r.node
		if other, used := underlay[n.Underlay]; used {
			exclude(v.keys.Node(n.Name), fmt.Sprintf("underlay address %s belongs to node %s", n.Underlay, other))
			continue
		}
		if p, used := taken.overlapping(n.Prefixes); used {
			exclude(v.keys.Node(n.Name), fmt.Sprintf("prefix %s overlaps another node's", p))
			continue
		}
		underlay[n.Underlay] = n.Name
		taken.add(n.Prefixes)
		accepted[n.Name] = n
	}
	return accepted, &taken
}

// refuseEndpoint says why e contradicts the nodes or an endpoint before it, or "".
func (v *View) refuseEndpoint(e model.Endpoint, holder map[netip.Addr]model.EndpointID) string {
	n, ok := v.accepted[e.Node]
	if !ok {
		return "its node is not in the network"
	}
	movedTo := v.movedTo[e.Addr4()]
	if e.Carried != nil {
		if _, overlaps := v.prefixes.overlapping([]netip.Prefix{netip.PrefixFrom(e.Addr4(), 32)}); overlaps {
			return "its address is another network's, and in the prefixes of a node"
		}
	} else if movedTo != "" && movedTo != e.Node {
		return "its address has moved to node " + movedTo
	} else if err := CheckAddr(n, e.Addr4()); err != nil && movedTo == "" {
		return err.Error()
	}
	if id, used := holder[e.Addr4()]; used {
		return fmt.Sprintf("address %s is held by endpoint %d", e.Addr4(), id)
	}
	return ""
}

func (v *View) skip(key, why string) {
	v.onInvalid()
	v.log.Warn("store: value skipped", "key", key[:min(len(key), maxKeyBytes)], "why", why)
}

// prefixSet answers whether a prefix overlaps one of many, without comparing it with each.
type prefixSet struct {
	byPrefix map[netip.Prefix]bool // the prefixes themselves
	within   map[netip.Prefix]bool // every prefix around one of them, itself included
}

func (s *prefixSet) add(prefixes []netip.Prefix) {
	if s.byPrefix == nil {
		s.byPrefix, s.within = make(map[netip.Prefix]bool), make(map[netip.Prefix]bool)
	}
	for _, p := range prefixes {
		s.byPrefix[p] = true
		for bits := p.Bits(); bits >= 0; bits-- {
			around := netip.PrefixFrom(p.Addr(), bits).Masked()
			if s.within[around] {
				break // so are all that are shorter
			}
			s.within[around] = true
		}
	}
}

// overlapping gives the first of prefixes that overlaps one in the set: it lies around one, or inside one.
func (s *prefixSet) overlapping(prefixes []netip.Prefix) (netip.Prefix, bool) {
	for _, p := range prefixes {
		if s.within[p] {
			return p, true
		}
		for bits := p.Bits() - 1; bits >= 0; bits-- {
			if s.byPrefix[netip.PrefixFrom(p.Addr(), bits).Masked()] {
				return p, true
			}
		}
	}
	return netip.Prefix{}, false
}
