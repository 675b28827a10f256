package underlays_test

import (
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// route puts a router between the nodes, which answers in either one's place for the other's
// addresses, until the end of the test, and gives what has it translate what a rule matches.
func route(t *testing.T) (translate func(match string) (undo func())) {
	t.Helper()
	n1, n2 := lab.Address(t, "host", "n1/c1"), lab.Address(t, "host", "n2/c1")
	router := n2[:strings.LastIndex(n2, ".")] + ".200"
	forget := func() {
		for _, node := range nodes {
			inNode(t, node, "ip neigh flush all")
		}
	}
	t.Cleanup(func() {
		inFabric(t, "ip addr flush dev n2; ip addr flush dev fabric; ip route flush table main; ip link set n2 master fabric")
		forget()
	})
	inFabric(t, `set -e
ip link set n2 nomaster
ip addr add %s/32 dev n2
ip route add %s/32 dev n2
ip route add %s/32 dev fabric
for s in n2/proxy_arp fabric/proxy_arp all/forwarding; do echo 1 >/proc/sys/net/ipv4/conf/$s; done
for s in n2 fabric all; do echo 0 >/proc/sys/net/ipv4/conf/$s/rp_filter; done`, router, n2, n1)
	forget()
	return func(match string) func() {
		return lab.Spoil(t, "fabric", "ip", "chain c { type nat hook postrouting priority srcnat\n oifname n2 ip saddr "+n1+" "+match+" masquerade\n}")
	}
}

// TestNAT has a router between the nodes that translates what one of them sends. Of TCP alone:
// connections from there go over the overlay, those of the other node direct. Of everything: the
// other node takes neither, because both say by their address which node they are from; and both
// ends name it.
func TestNAT(t *testing.T) {
	translate := route(t)
	reprobe(t, "n1")
	lab.AwaitPath(t, "n1", model.PeerProven)
	expectDirect(t, 4)

	undo := translate("meta l4proto tcp")
	before := lab.Counters(t, "n2")["drop_unknown_node"]
	expectOverlay(t, model.PeerBlocked)
	if now := lab.Counters(t, "n2")["drop_unknown_node"]; now == before {
		t.Error("n2 does not count drop_unknown_node")
	}
	if d := lab.DirectPaths(t, "n2"); d.Peers[model.PeerProven] != 1 {
		t.Errorf("the other direction is %+v", d)
	}
	undo()
	lab.AwaitPath(t, "n1", model.PeerProven)

	undo = translate("")
	before = lab.Counters(t, "n2")["drop_overlay_stranger"]
	client := lab.StartPeer(t, "heddle", "n1/c1")
	client.Must(`s = tcp(4)`)
	client.Expect(`{"error": "EINPROGRESS"}`, `s.connect((%q, %d))`, lab.Address(t, "heddle", "n2/c1"), lab.FreePort())
	testutil.Eventually(t, "both ends to name it", func() (bool, string) {
		out := lab.Heddle(t, "status", "--node", "n1")
		return strings.Contains(out, "SILENT for ") && lab.Counters(t, "n2")["drop_overlay_stranger"] > before, out
	})
	undo()
	testutil.Eventually(t, "n2 not to be silent any more", func() (bool, string) {
		d := lab.DirectPaths(t, "n1")
		return len(d.Silent) == 0, lab.Heddle(t, "status", "--node", "n1")
	})
	lab.AwaitPath(t, "n1", model.PeerProven)
	expectDirect(t, 4)
}
