package verbs

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/verbs/protocol"
)

// Peers without Heddle: docs/decisions/0080-peers-without-heddle.md. The router asks for each queue
// pair that is to have one; the agent keeps nothing, and has all asked for again when something has
// changed.

// answer says whether an endpoint may speak to a peer by the card.
func (p *Plane) answer(l *link, asked heard) {
	p.mu.Lock()
	defer p.mu.Unlock()
	errno, marks := unix.EPERM, uint32(0) // the endpoint is gone, or another router's
	for _, ep := range p.endpoints {
		if ep.number == asked.Endpoint && ep.router == l {
			errno = p.mayReach(ep.Endpoint, asked.to)
			if l == p.router { // one of before may not know of them
				marks = marksOf(ep.Endpoint)
			}
		}
	}
	p.send(l, answerMessage(asked, errno, marks), nil)
}

// mayReach gives 0 if e and a peer at an address may speak to each other, either of them first, or
// why not. The caller holds mu.
func (p *Plane) mayReach(e model.Endpoint, peer netip.Addr) unix.Errno {
	own := e.Addr4()
	if peer.Is6() {
		own = e.Addr6()
	}
	in := func(prefix netip.Prefix) bool { return prefix.Contains(peer) }
	is := func(a netip.Addr) bool { return a.Unmap() == peer }
	// Cards of nodes carry pairs of other containers, as which this one could pass.
	isNodes := func(n model.Node) bool {
		card := n.Planes.Verbs.Card
		return n.Underlay == peer || slices.ContainsFunc(n.Prefixes, in) || card != nil && slices.ContainsFunc(card.GIDs, is)
	}
	switch {
	case !e.Planes.Verbs.Outside || !own.IsValid():
		return unix.EPERM
	case !slices.ContainsFunc(p.cfg.Outside, in) || slices.ContainsFunc(p.members.nodes, isNodes):
		return unix.EHOSTUNREACH
	}
	for _, way := range [][2]netip.Addr{{own, peer}, {peer, own}} {
		verdict, err := p.cfg.Decide(way[0], way[1], Port)
		if err != nil {
			p.cfg.Log.Error("policy of a peer without Heddle", "endpoint", e.Name, "peer", peer, "err", err)
			return unix.EIO
		}
		if verdict != model.VerdictAllow {
			return unix.EACCES
		}
	}
	return 0
}

// CutForbidden implements plane.Policy: queue pairs whose connections the TCP plane cuts end with
// these; the others are asked for again, and end by the answer.
func (p *Plane) CutForbidden() (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.askAnew()
	return 0, nil
}

// askAnew has routers ask for all queue pairs that have peers without Heddle. The caller holds mu.
func (p *Plane) askAnew() {
	if len(p.cfg.Outside) == 0 {
		return
	}
	for _, l := range p.routers() {
		p.send(l, plain(protocol.TypeAskAnew, 0), nil)
	}
}
