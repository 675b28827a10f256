package node

import (
	"net/netip"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
)

// directory finds endpoints and nodes by address. It follows states of the store, and touches only
// what has changed. The zero directory knows nobody.
type directory struct {
	self      string // set before the first state: the node whose endpoints are judged by ownAt
	endpoints model.Endpoints
	nodes     []model.Node
	byAddr    map[netip.Addr]*model.Endpoint // into the groups, which nobody writes to
	ownAt     map[netip.Addr]*model.Endpoint // the same of the node itself
	nodeAt    map[netip.Addr]string
}

// follow brings the directory to a state.
func (d *directory) follow(endpoints model.Endpoints, nodes []model.Node, prefix6 netip.Prefix) {
	if d.byAddr == nil {
		d.byAddr, d.ownAt, d.nodeAt = make(map[netip.Addr]*model.Endpoint), make(map[netip.Addr]*model.Endpoint), make(map[netip.Addr]string)
	}
	groups := endpoints.ChangedSince(d.endpoints)
	// All that goes before all that comes: an endpoint may have moved.
	for _, g := range groups {
		for e := range g.Before.All() {
			for _, a := range e.Addrs {
				delete(d.byAddr, a)
				if g.Node == d.self {
					delete(d.ownAt, a)
				}
			}
		}
	}
	for _, g := range groups {
		for _, part := range g.After {
			for i := range part {
				d.add(&part[i])
			}
		}
	}
	changes := model.ChangedNodes(d.nodes, nodes)
	for _, c := range changes {
		for _, a := range addrsOf(c.Before, prefix6) {
			delete(d.nodeAt, a)
		}
	}
	for _, c := range changes {
		for _, a := range addrsOf(c.After, prefix6) {
			d.nodeAt[a] = c.Name()
		}
	}
	d.endpoints, d.nodes = endpoints, nodes
}

// addrsOf gives the addresses by which a node's own processes are known; none of nil.
func addrsOf(n *model.Node, prefix6 netip.Prefix) []netip.Addr {
	if n == nil {
		return nil
	}
	out := []netip.Addr{n.Underlay}
	if n.Inner().IsValid() {
		out = append(out, n.Outer())
	}
	for _, p := range model.WithOverlay6(prefix6, n.Prefixes) {
		out = append(out, model.Gateway(p))
	}
	return out
}

// peer gives the end of a connection at an address.
func (d *directory) peer(at netip.AddrPort) flow.Peer {
	p := flow.Peer{Addr: at.Addr(), Port: at.Port()}
	if e := d.byAddr[p.Addr]; e != nil {
		p.Endpoint, p.Node, p.Labels = e.Name, e.Node, e.Labels
	} else {
		p.Node = d.nodeAt[p.Addr]
	}
	return p
}

// add enters an endpoint.
func (d *directory) add(e *model.Endpoint) {
	for _, a := range e.Addrs {
		d.byAddr[a] = e
		if e.Node == d.self {
			d.ownAt[a] = e
		}
	}
}

// judged gives the endpoint that policy judges an address as: of several the own node's is it.
func (d *directory) judged(a netip.Addr) (model.Endpoint, bool) {
	e := d.ownAt[a]
	if e == nil {
		e = d.byAddr[a]
	}
	if e == nil {
		return model.Endpoint{}, false
	}
	return *e, true
}
