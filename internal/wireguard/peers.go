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

// SwitchAfter is how long after its publication a key is used at the earliest. It is longer than a
// node's name stays held without its agent (store.HoldTime): an agent that holds its name by then
// has heard of the key.
const SwitchAfter = 15 * time.Second

// Known is what a node knows of another that has to accept its next key.
type Known struct {
	Node string
	// Held says that its agent runs and follows the store, Answers that the node itself answers:
	// then it may have connections, which its agent must not lose by being away.
	Held, Answers bool
}

// Waits gives the nodes that keep this one from using a key published at that time: those whose
// agents are away while the nodes live. Before SwitchAfter has passed, ready is false in any case.
func Waits(published, now time.Time, others []Known) (waits []string, ready bool) {
	for _, o := range others {
		if !o.Held && o.Answers {
			waits = append(waits, o.Node)
		}
	}
	slices.Sort(waits)
	return waits, len(waits) == 0 && now.Sub(published) >= SwitchAfter
}
