package netcfg

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// setPeers brings the overlay of a node to others, whatever it was.
func setPeers(devs NodeDevices, self string, nodes []model.Node) error {
	return NewOverlay(devs, self).Set(nodes)
}

// TestOverlayChange: whatever sequence of changes led to a set of nodes, the kernel has what Set
// would have made of it.
func TestOverlayChange(t *testing.T) {
	top := newTopology(t)
	top.setup(t, 0)
	r := rand.New(rand.NewPCG(1, 1))
	overlay := NewOverlay(top.devs[0], "n1")
	nodes := top.nodes()
	in(t, top.node[0], func() error { return overlay.Set(nodes) })
	for step := range 40 {
		last := nodes
		nodes = slices.Clone(nodes)
		for range 1 + r.IntN(3) {
			nodes = changeNodes(r, nodes)
		}
		var before, now []model.Node
		for _, c := range model.ChangedNodes(last, nodes) {
			if c.Before != nil {
				before = append(before, *c.Before)
			}
			if c.After != nil {
				now = append(now, *c.After)
			}
		}
		in(t, top.node[0], func() error { return overlay.Change(before, now) })
		changed := dumpState(t, top.node[0])
		in(t, top.node[0], func() error { return setPeers(top.devs[0], "n1", nodes) })
		sameState(t, top.node[0], fmt.Sprintf("step %d, from %v to %v", step, last, nodes), changed)
	}
	// What contradicts a node that has not changed is refused.
	twin := nodes[len(nodes)-1]
	twin.Name, twin.Underlay, twin.Prefixes = "z", netip.MustParseAddr("192.168.50.220"), []netip.Prefix{netip.MustParsePrefix("10.99.77.0/24")}
	mustFail(t, top.node[0], func() error { return overlay.Change(nil, []model.Node{twin}) }, `"z"`, "has it too")
}

// changeNodes has a node come, go or change: n1, which is this one, and n2, a prefix of which has
// routes to moved addresses, stay. What one gives up another may take.
func changeNodes(r *rand.Rand, nodes []model.Node) []model.Node {
	i := byte(r.IntN(4))
	name := fmt.Sprintf("x%d", i)
	if r.IntN(4) == 0 { // an address of n2 moves, or goes home
		a := netip.AddrFrom4([4]byte{10, 99, 2, byte(7 + r.IntN(2))})
		for at := range nodes {
			nodes[at].Moved = slices.DeleteFunc(slices.Clone(nodes[at].Moved), func(m netip.Addr) bool { return m == a })
		}
		if to := r.IntN(len(nodes)); nodes[to].Name != "n2" {
			nodes[to].Moved = append(nodes[to].Moved, a)
		}
		return nodes
	}
	nodes = slices.DeleteFunc(nodes, func(n model.Node) bool { return n.Name == name })
	n := model.Node{Name: name}
	at, mac := byte(r.IntN(5)), byte(r.IntN(5))
	n.Underlay, n.VTEPMAC = netip.AddrFrom4([4]byte{192, 168, 50, 100 + at}), fmt.Sprintf("02:48:00:00:01:%02x", mac)
	for range 1 + r.IntN(2) {
		n.Prefixes = append(n.Prefixes, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 99, byte(3 + r.IntN(5)), 0}), 24))
	}
	contradicts := slices.ContainsFunc(nodes, func(o model.Node) bool {
		return o.Underlay == n.Underlay || o.VTEPMAC == n.VTEPMAC ||
			slices.ContainsFunc(o.Prefixes, func(p netip.Prefix) bool { return slices.Contains(n.Prefixes, p) })
	})
	if !contradicts && r.IntN(4) > 0 {
		n.Prefixes = slices.Compact(n.Prefixes)
		nodes = append(nodes, n)
	}
	slices.SortFunc(nodes, func(a, b model.Node) int { return cmp.Compare(a.Name, b.Name) })
	return nodes
}
