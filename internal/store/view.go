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
	endpoints map[endpointKey]model.Endpoint
	policies
	holders map[string]Holder
	// excluded holds why a valid value is not part of the last state, by key, so that the same
	// contradiction is reported once.
	excluded map[string]string
}

type nodeRecord struct {
	node    model.Node
	created int64 // the store's revision that made the key: the older of two contradicting nodes wins
}

type endpointKey struct {
	node string
	id   model.EndpointID
}

// NewView gives an empty view. onInvalid is called for every value that is skipped.
func NewView(keys Keys, log *slog.Logger, onInvalid func()) *View {
	v := &View{keys: keys, log: log, onInvalid: onInvalid, excluded: make(map[string]string)}
	v.Reset()
	return v
}

// Reset forgets all values, before they are read anew.
func (v *View) Reset() {
	v.nodes = make(map[string]nodeRecord)
	v.endpoints = make(map[endpointKey]model.Endpoint)
	v.policies.reset()
	v.holders = make(map[string]Holder)
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
		n, err := ParseNode(k.Node, value)
		if err != nil {
			delete(v.nodes, k.Node)
			v.skip(key, err.Error())
			return
		}
		v.nodes[k.Node] = nodeRecord{node: n, created: created}
	case KeyHolder:
		h, err := ParseHolder(k.Node, value)
		if err != nil {
			delete(v.holders, k.Node)
			v.skip(key, err.Error())
			return
		}
		v.holders[k.Node] = h
	case KeyEndpoint:
		id := endpointKey{k.Node, k.Endpoint}
		e, err := ParseEndpoint(k.Node, k.Endpoint, value)
		if err != nil {
			delete(v.endpoints, id)
			v.skip(key, err.Error())
			return
		}
		v.endpoints[id] = e
	case KeyPolicy:
		if err := v.setPolicy(k.Name, value); err != nil {
			v.skip(key, err.Error())
		}
	case KeyNamespace:
		n, err := ParseNamespace(k.Name, value)
		if err != nil {
			delete(v.namespaces, k.Name)
			v.skip(key, err.Error())
			return
		}
		v.namespaces[k.Name] = n
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
		delete(v.nodes, k.Node)
	case KeyHolder:
		delete(v.holders, k.Node)
	case KeyEndpoint:
		delete(v.endpoints, endpointKey{k.Node, k.Endpoint})
	case KeyPolicy:
		v.deletePolicy(k.Name)
	case KeyNamespace:
		delete(v.namespaces, k.Name)
	}
}

// State gives the state at revision. Values that contradict older ones, which no writer that keeps to the
// schema produces, are left out, logged and counted.
func (v *View) State(revision int64) State {
	excluded := make(map[string]string)
	exclude := func(key, why string) {
		excluded[key] = why
		if v.excluded[key] != why {
			v.skip(key, why)
		}
	}
	s := State{Revision: revision, Holders: maps.Clone(v.holders)}
	accepted := v.acceptNodes(exclude)
	for _, n := range accepted {
		s.Nodes = append(s.Nodes, n)
	}
	slices.SortFunc(s.Nodes, func(a, b model.Node) int { return cmp.Compare(a.Name, b.Name) })

	all := make([]model.Endpoint, 0, len(v.endpoints))
	for _, e := range v.endpoints {
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b model.Endpoint) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.ID, b.ID))
	})
	holder := make(map[netip.Addr]model.EndpointID, len(all))
	for _, e := range all {
		if why := refuseEndpoint(e, accepted, holder); why != "" {
			exclude(v.keys.Endpoint(e.Node, e.ID), why)
			continue
		}
		holder[e.Addr4()] = e.ID
		s.Endpoints = append(s.Endpoints, e)
	}
	v.excluded = excluded
	v.policies.addTo(&s)
	return s
}

// acceptNodes picks the nodes whose prefixes and underlay addresses contradict no older node's.
func (v *View) acceptNodes(exclude func(key, why string)) map[string]model.Node {
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
	return accepted
}

// refuseEndpoint says why e contradicts the nodes or an endpoint before it, or "".
func refuseEndpoint(e model.Endpoint, nodes map[string]model.Node, holder map[netip.Addr]model.EndpointID) string {
	n, ok := nodes[e.Node]
	if !ok {
		return "its node is not in the network"
	}
	if err := CheckAddr(n, e.Addr4()); err != nil {
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
