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

// View builds States from the keys and values of one network. It is not safe for concurrent use:
// the goroutine that watches owns it.
type View struct {
	keys      Keys
	log       *slog.Logger
	onInvalid func()

	nodes     map[string]nodeRecord
	endpoints map[string]map[model.EndpointID]model.Endpoint // by node
	policies
	stacks
	nameLeases map[string]NameLease
	offline    map[string]OfflineRecord
	// Copies that states have; nil: what they are of has changed since.
	nameLeasesShown map[string]NameLease
	offlineShown    map[string]OfflineRecord
	moves           map[netip.Addr]model.Move

	// The last state, and what has changed since.
	last         State // Nodes, Endpoints and Moves only
	accepted     map[string]model.Node
	underlay     map[netip.Addr]string // of the accepted nodes, their names by address
	prefixes     model.PrefixHolders   // of the accepted nodes
	changedNodes map[string]bool
	movedTo      map[netip.Addr]string   // the accepted moves
	movedOn      map[string][]netip.Addr // the same, by node, sorted
	movesChanged map[netip.Addr]bool
	adoptedOn    map[string]bool // nodes with endpoints that have addresses of other networks
	// Nodes of which endpoints have changed, and which; nil: all have to be looked at.
	changedOn map[string]map[model.EndpointID]bool
	// Why a valid value is not part of the last state, by key, so that the same contradiction is
	// reported once: of nodes, of moves, and of endpoints by node.
	excludedNodes map[string]string
	excludedMoves map[string]string
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
	v.last, v.changedNodes, v.changedOn, v.adoptedOn = State{}, make(map[string]bool), make(map[string]map[model.EndpointID]bool), make(map[string]bool)
	v.accepted, v.underlay, v.prefixes = make(map[string]model.Node), make(map[netip.Addr]string), model.PrefixHolders{}
	v.moves, v.movedTo, v.movedOn, v.movesChanged = make(map[netip.Addr]model.Move), nil, nil, make(map[netip.Addr]bool)
	v.policies.reset()
	v.stacks.reset()
	v.nameLeases, v.offline = make(map[string]NameLease), make(map[string]OfflineRecord)
	v.nameLeasesShown, v.offlineShown = nil, nil
}

// Set takes in the value of key, which the store's revision created made first. A value that breaks
// the schema is logged and counted, and its key treated as absent.
func (v *View) Set(key string, value []byte, created int64) {
	k, err := v.keys.Parse(key)
	if err == nil {
		err = v.set(k, value, created)
	}
	if err != nil {
		v.skip(key, err.Error())
	}
}

// set is Set; after an error what there was under the key has gone, or is as setPolicy, setStack
// and setObject say.
func (v *View) set(k Key, value []byte, created int64) error {
	switch k.Kind {
	case KeyNode:
		v.changedNodes[k.Node] = true
		n, err := ParseNode(k.Node, value)
		return keep(v.nodes, k.Node, nodeRecord{node: n, created: created}, err)
	case KeyNameLease:
		v.nameLeasesShown = nil
		h, err := ParseNameLease(k.Node, value)
		return keep(v.nameLeases, k.Node, h, err)
	case KeyOffline:
		v.offlineShown = nil
		a, err := ParseOfflineRecord(k.Node, value)
		return keep(v.offline, k.Node, a, err)
	case KeyEndpoint:
		v.changedEndpoint(k)
		e, err := ParseEndpoint(k.Node, k.Endpoint, value)
		if err == nil && v.endpoints[k.Node] == nil {
			v.endpoints[k.Node] = make(map[model.EndpointID]model.Endpoint)
		}
		return keep(v.endpoints[k.Node], k.Endpoint, e, err)
	case KeyMove:
		m, err := ParseMove(k.Addr, value)
		if err != nil {
			v.setMove(k.Addr, nil)
			return err
		}
		v.setMove(k.Addr, &m)
	case KeyPolicy:
		return v.setPolicy(k.Name, value)
	case KeyNamespace:
		n, err := ParseNamespace(k.Name, value)
		if err != nil {
			v.deleteNamespace(k.Name)
			return err
		}
		v.setNamespace(n)
	case KeyStack:
		return v.setStack(k.Name, value)
	case KeyCongestion:
		return v.setObject(k.Name, value)
	}
	return nil
}

// keep sets an entry to what was read, and deletes it if that failed.
func keep[K comparable, V any](all map[K]V, key K, read V, err error) error {
	if err != nil {
		delete(all, key)
		return err
	}
	all[key] = read
	return nil
}

// Delete takes in that key is gone.
func (v *View) Delete(key string) {
	k, err := v.keys.Parse(key)
	if err != nil {
		return // Set skipped it
	}
	switch k.Kind {
	case KeyNode:
		v.changedNodes[k.Node] = true
		delete(v.nodes, k.Node)
	case KeyNameLease:
		v.nameLeasesShown = nil
		delete(v.nameLeases, k.Node)
	case KeyOffline:
		v.offlineShown = nil
		delete(v.offline, k.Node)
	case KeyEndpoint:
		v.changedEndpoint(k)
		delete(v.endpoints[k.Node], k.Endpoint)
	case KeyMove:
		v.setMove(k.Addr, nil)
	case KeyPolicy:
		v.deletePolicy(k.Name)
	case KeyNamespace:
		v.deleteNamespace(k.Name)
	case KeyStack:
		v.deleteStack(k.Name)
	case KeyCongestion:
		v.deleteObject(k.Name)
	}
}

// State gives the state at revision. Values that contradict older ones, which no writer that keeps
// to the schema produces, are left out, logged and counted. It costs what has changed since the
// last one, and a copy of the lists of nodes and of the same node's endpoints; nothing if nothing
// has changed.
func (v *View) State(revision int64) State {
	if len(v.changedNodes)+len(v.movesChanged) > 0 {
		v.refreshNodes()
	}
	v.refreshEndpoints()
	clear(v.changedOn)
	if v.nameLeasesShown == nil {
		v.nameLeasesShown = maps.Clone(v.nameLeases)
	}
	if v.offlineShown == nil {
		v.offlineShown = maps.Clone(v.offline)
	}
	s := State{Revision: revision, NameLeases: v.nameLeasesShown, Offline: v.offlineShown, Nodes: v.last.Nodes, Endpoints: v.last.Endpoints, Moves: v.last.Moves}
	v.policies.addTo(&s)
	v.stacks.addTo(&s)
	return s
}

// refreshNodes decides anew which nodes are there, of those that have changed, and which endpoints
// have to be looked at again for that.
func (v *View) refreshNodes() {
	before := make(map[string]model.Node) // of those that have changed, as they were
	note := func(name string) {
		if _, noted := before[name]; !noted {
			before[name] = v.accepted[name]
		}
	}
	v.acceptNodes(note)
	v.refreshMoves(note)
	var prefixes []netip.Prefix // those that have changed, as they were and as they are
	for name, old := range before {
		now := v.accepted[name]
		if !slices.Equal(old.Prefixes, now.Prefixes) {
			v.changedOn[name] = nil
			prefixes = slices.Concat(prefixes, old.Prefixes, now.Prefixes)
		}
	}
	v.changedAdopted(prefixes)
	v.last.Nodes = v.nodesWith(before)
	clear(v.changedNodes)
}

// nodesWith gives the list of nodes with what the named ones are now.
func (v *View) nodesWith(changed map[string]model.Node) []model.Node {
	names := slices.Sorted(maps.Keys(changed))
	out, rest := make([]model.Node, 0, len(v.accepted)), v.last.Nodes
	for _, name := range names {
		at, there := slices.BinarySearchFunc(rest, name, func(n model.Node, name string) int { return cmp.Compare(n.Name, name) })
		out, rest = append(out, rest[:at]...), rest[at:]
		if there {
			rest = rest[1:]
		}
		if n, is := v.accepted[name]; is {
			out = append(out, n)
		}
	}
	return append(out, rest...)
}

// changedAdopted has the endpoints looked at again whose addresses of other networks were, or are,
// in nodes' prefixes.
func (v *View) changedAdopted(prefixes []netip.Prefix) {
	if len(prefixes) == 0 {
		return
	}
	var changed model.PrefixHolders
	for _, p := range prefixes {
		changed.Add(p, "a node")
	}
	for name := range v.adoptedOn {
		inside := func(e *model.Endpoint) bool {
			_, held := changed.Holder(e.Addr4())
			return e.Adopted != nil && held
		}
		if len(v.excludedOn[name]) > 0 || v.last.Endpoints.Groups(name).Have(inside) {
			v.changedOn[name] = nil
		}
	}
}

// refreshEndpoints decides anew which endpoints are there, of those nodes where one has changed.
// Nodes' prefixes are disjoint, an address that has moved is one node's, and one of another network
// may be registered by two, so that no endpoint contradicts one of another node.
func (v *View) refreshEndpoints() {
	if len(v.changedOn) == 0 {
		return
	}
	groups := make(map[string]model.Endpoints, len(v.changedOn))
	for name, ids := range v.changedOn {
		if patched, only := v.patched(name, ids); only {
			groups[name] = patched
			continue
		}
		excluded := make(map[string]string)
		exclude := v.excluder(excluded, v.excludedOn[name])
		all := slices.SortedFunc(maps.Values(v.endpoints[name]), func(a, b model.Endpoint) int { return cmp.Compare(a.ID, b.ID) })
		held := holders{make(map[netip.Addr]model.EndpointID, len(all)), make(map[string]model.EndpointID, len(all))}
		delete(v.adoptedOn, name)
		accepted := all[:0]
		for _, e := range all {
			if e.Adopted != nil {
				v.adoptedOn[name] = true
			}
			if why := v.refuseEndpoint(e, held); why != "" {
				exclude(v.keys.Endpoint(e.Node, e.ID), why)
				continue
			}
			held.addrs[e.Addr4()], held.names[e.Name] = e.ID, e.ID
			accepted = append(accepted, e)
		}
		groups[name], v.excludedOn[name] = model.EndpointsOf(accepted...), excluded
		if len(excluded) == 0 {
			delete(v.excludedOn, name)
		}
	}
	for name := range groups {
		if len(v.endpoints[name]) == 0 {
			delete(v.endpoints, name)
		}
	}
	v.last.Endpoints = v.last.Endpoints.WithGroups(groups)
}

// changedEndpoint notes that the value of an endpoint's key is another.
func (v *View) changedEndpoint(k Key) {
	ids, marked := v.changedOn[k.Node]
	if marked && ids == nil {
		return
	}
	if ids == nil {
		ids = make(map[model.EndpointID]bool)
		v.changedOn[k.Node] = ids
	}
	ids[k.Endpoint] = true
}

// patchedAtMost is how many endpoints of a node may have changed for each to be compared with all.
const patchedAtMost = 8

// patched gives the endpoints of a node of which some have changed, without a look at more than the
// addresses and names of the others. It is false if that does not decide: if something contradicts
// something else, or has addresses of another network.
func (v *View) patched(name string, ids map[model.EndpointID]bool) (groups model.Endpoints, ok bool) {
	if len(ids) == 0 || len(ids) > patchedAtMost || len(v.excludedOn[name]) > 0 || v.adoptedOn[name] {
		return nil, false
	}
	now := make(map[model.EndpointID]*model.Endpoint, len(ids))
	for id := range ids {
		if e, there := v.endpoints[name][id]; there {
			now[id] = &e
		} else {
			now[id] = nil
		}
	}
	groups = v.last.Endpoints.Groups(name).Patched(now)
	for id, e := range now {
		if e == nil {
			continue
		}
		if e.Adopted != nil || v.refuseEndpoint(*e, holders{}) != "" {
			return nil, false
		}
		if groups.Have(func(x *model.Endpoint) bool { return x.ID != id && (x.Addr4() == e.Addr4() || x.Name == e.Name) }) {
			return nil, false
		}
	}
	return groups, true
}

// excluder gives a function that notes in now why a value is left out. What before says already is
// not reported again.
func (v *View) excluder(now, before map[string]string) func(key, why string) {
	return func(key, why string) {
		now[key] = why
		if before[key] != why {
			v.skip(key, why)
		}
	}
}

// acceptNodes brings the accepted nodes to those that contradict no older one by prefix or underlay
// address. As long as no node contradicts another, what has changed is all that has to be looked
// at.
func (v *View) acceptNodes(note func(name string)) {
	if len(v.excludedNodes) == 0 && v.acceptChanged(note) {
		return
	}
	for name := range v.accepted {
		note(name)
	}
	v.accepted, v.underlay, v.prefixes = make(map[string]model.Node), make(map[netip.Addr]string), model.PrefixHolders{}
	excluded := make(map[string]string)
	exclude := v.excluder(excluded, v.excludedNodes)
	byAge := slices.SortedFunc(maps.Values(v.nodes), func(a, b nodeRecord) int {
		return cmp.Or(cmp.Compare(a.created, b.created), cmp.Compare(a.node.Name, b.node.Name))
	})
	for _, r := range byAge {
		note(r.node.Name)
		if why := v.refuseNode(r.node); why != "" {
			exclude(v.keys.Node(r.node.Name), why)
			continue
		}
		v.accept(r.node)
	}
	v.excludedNodes = excluded
}

// acceptChanged takes the nodes that have changed as they are now. It is false, and the work half
// done, if one contradicts another.
func (v *View) acceptChanged(note func(name string)) bool {
	for name := range v.changedNodes {
		note(name)
		if old, was := v.accepted[name]; was {
			delete(v.accepted, name)
			delete(v.underlay, old.Underlay)
			for _, p := range old.Prefixes {
				v.prefixes.Remove(p)
			}
		}
	}
	for name := range v.changedNodes {
		r, is := v.nodes[name]
		if !is {
			continue
		}
		if v.refuseNode(r.node) != "" {
			return false
		}
		v.accept(r.node)
	}
	return true
}

func (v *View) accept(n model.Node) {
	n.Moved = v.movedOn[n.Name]
	v.accepted[n.Name], v.underlay[n.Underlay] = n, n.Name
	for _, p := range n.Prefixes {
		v.prefixes.Add(p, n.Name)
	}
}

// refuseNode says why n contradicts the nodes that are accepted, or "".
func (v *View) refuseNode(n model.Node) string {
	if other, used := v.underlay[n.Underlay]; used {
		return fmt.Sprintf("underlay address %s belongs to node %s", n.Underlay, other)
	}
	for _, p := range n.Prefixes {
		if _, _, used := v.prefixes.Overlapping(p); used {
			return fmt.Sprintf("prefix %s overlaps another node's", p)
		}
	}
	return ""
}

// holders are the endpoints of a node that have what another one there may not have.
type holders struct {
	addrs map[netip.Addr]model.EndpointID
	names map[string]model.EndpointID
}

// refuseEndpoint says why e contradicts the nodes or an endpoint before it, or "".
func (v *View) refuseEndpoint(e model.Endpoint, before holders) string {
	n, ok := v.accepted[e.Node]
	if !ok {
		return "its node is not in the network"
	}
	movedTo := v.movedTo[e.Addr4()]
	if e.Adopted != nil {
		if _, overlaps := v.prefixes.Holder(e.Addr4()); overlaps {
			return "its address is another network's, and in the prefixes of a node"
		}
	} else if movedTo != "" && movedTo != e.Node {
		return "its address has moved to node " + movedTo
	} else if err := CheckAddr(n, e.Addr4()); err != nil && movedTo == "" {
		return err.Error()
	}
	if id, used := before.addrs[e.Addr4()]; used {
		return fmt.Sprintf("address %s is held by endpoint %d", e.Addr4(), id)
	}
	if id, used := before.names[e.Name]; used {
		return fmt.Sprintf("name %s is held by endpoint %d", e.Name, id)
	}
	return ""
}

func (v *View) skip(key, why string) {
	v.onInvalid()
	v.log.Warn("store: value skipped", "key", key[:min(len(key), maxKeyBytes)], "why", why)
}
