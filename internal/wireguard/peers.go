package wireguard

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"heddle.dev/heddle/internal/model"
)

// Peer is a key that the node accepts.
type Peer struct {
	Node     string
	Key      model.PublicKey
	Endpoint netip.AddrPort
	// Inner is the address that its holder sends from. The zero Addr: the key is about to be used,
	// and may shake hands only.
	Inner netip.Addr
}

// Peers gives the keys that self accepts of nodes, all of the network's, and why it communicates
// with some of them not at all. A key belongs to one node: the first by name that uses it.
func Peers(self model.Node, nodes []model.Node) (peers []Peer, unfit map[string]model.PlainReason) {
	unfit = make(map[string]model.PlainReason)
	taken := map[model.PublicKey]bool{}
	if self.Encrypts() {
		taken[self.WireGuard.Key], taken[self.WireGuard.Next] = true, true // a zero key is nobody's
	}
	nodes = slices.Clone(nodes)
	slices.SortFunc(nodes, func(a, b model.Node) int { return cmp.Compare(a.Name, b.Name) })
	for _, n := range nodes {
		if n.Name == self.Name {
			continue
		}
		why := self.Unfit(n)
		if why == "" && n.Encrypts() && taken[n.WireGuard.Key] {
			why = model.SameKey
		}
		if why != "" {
			unfit[n.Name] = why
			continue
		}
		if n.Encrypts() {
			taken[n.WireGuard.Key] = true
			peers = append(peers, Peer{Node: n.Name, Key: n.WireGuard.Key, Endpoint: n.WireGuard.Endpoint, Inner: n.Underlay})
		}
	}
	// Then those about to be used: none takes a key away from who uses it.
	for _, n := range nodes {
		if next := n.WireGuard.Next; n.Name != self.Name && unfit[n.Name] == "" && n.Encrypts() && !next.IsZero() && !taken[next] {
			taken[next] = true
			peers = append(peers, Peer{Node: n.Name, Key: next, Endpoint: n.WireGuard.Endpoint})
		}
	}
	return peers, unfit
}

// Fit gives the nodes that unfit does not name: nodes itself if it names none.
func Fit(nodes []model.Node, unfit map[string]model.PlainReason) []model.Node {
	if len(unfit) == 0 {
		return nodes
	}
	return slices.DeleteFunc(slices.Clone(nodes), func(n model.Node) bool { return unfit[n.Name] != "" })
}

// Changing reports whether one of peers is about to take another key.
func Changing(peers []Peer) bool {
	return slices.ContainsFunc(peers, func(p Peer) bool { return !p.Inner.IsValid() })
}

// InUse gives peers with the address of each node at that of its keys by which it shook hands last:
// nobody but the node itself can, so this is told by no store, which may be away just then. A node
// that goes back to its old key is followed in the same way. Handshakes that are later than now are
// of a clock that was set back, and say nothing.
func InUse(peers []Peer, handshake func(model.PublicKey) time.Time, now time.Time) []Peer {
	at := func(key model.PublicKey) time.Time {
		if t := handshake(key); !t.After(now) {
			return t
		}
		return time.Time{}
	}
	peers = slices.Clone(peers)
	for i := range peers {
		if peers[i].Inner.IsValid() {
			continue
		}
		j := slices.IndexFunc(peers, func(p Peer) bool { return p.Node == peers[i].Node && p.Inner.IsValid() })
		if j >= 0 && at(peers[i].Key).After(at(peers[j].Key)) {
			peers[i].Inner, peers[j].Inner = peers[j].Inner, netip.Addr{}
		}
	}
	return peers
}
