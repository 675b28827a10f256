package underlays_test

import (
	"fmt"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/lab/fabric"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestNarrow has an underlay of 1280 bytes, the least that IPv6 allows: the overlay has no room for
// IPv6 then, which status says, and IPv4 goes direct.
func TestNarrow(t *testing.T) {
	set := func(mtu int) {
		for _, node := range nodes {
			inFabric(t, "ip link set %s mtu %d", node, mtu)
			inNode(t, node, "ip link set %s mtu %d", fabric.Device, mtu)
		}
	}
	t.Cleanup(func() { set(1500) })
	set(1280)
	if out := lab.Heddle(t, "status", "--node", "n1"); !strings.Contains(out, "MTU 1280, SMALLER THAN IT WAS: the overlay has 1450; restart the agent") {
		t.Errorf("status before the agents start anew:\n%s", out)
	}
	ended := endAgents(t)
	t.Cleanup(func() {
		ended()
		set(1500)
	})
	startAgents(t)
	expectDirect(t, 4)
	expectMTU(t, 1280)
	if out := lab.Heddle(t, "status", "--node", "n1"); !strings.Contains(out, "ipv6_mtu") {
		t.Errorf("status does not say that IPv6 is off for want of room:\n%s", out)
	}
}

// TestAddresses has a node with more addresses than the one that others know: on the same device,
// before that one, so that it is not what the kernel would take; and on another device, by which the
// other node is reached.
func TestAddresses(t *testing.T) {
	// Two devices in one subnet: docs/howto/underlays.md.
	lab.SetSysctl(t, "n1", "ipv4/conf/all/arp_ignore", "1")
	lab.SetSysctl(t, "n1", "ipv4/conf/all/arp_announce", "2")
	own, other := lab.Address(t, "host", "n1/c1"), lab.Address(t, "host", "n2/c1")
	at := own[:strings.LastIndex(own, ".")]
	for _, c := range []struct{ name, make, undo string }{
		{"a second one on the device", fmt.Sprintf(`ip addr del %s/24 dev eth0; ip addr add %s.77/24 dev eth0; ip addr add %[1]s/24 dev eth0; ip route replace default via %[2]s.250`, own, at),
			fmt.Sprintf(`ip addr del %s/24 dev eth0; ip addr del %s.77/24 dev eth0; ip addr add %[1]s/24 dev eth0; ip route replace default via %[2]s.250`, own, at)},
		{"another device, which routes lead to", fmt.Sprintf(`ip addr add %s.77/24 dev port1 noprefixroute; ip route add %s/32 dev port1`, at, other),
			fmt.Sprintf(`ip route del %s/32 dev port1; ip addr flush dev port1`, other)},
	} {
		t.Run(c.name, func(t *testing.T) {
			inFabric(t, "ip link add n1b type veth peer name port1 netns %s-n1 && ip link set n1b master fabric up && ip -n %[1]s-n1 link set port1 up", lab.Name)
			t.Cleanup(func() { inFabric(t, "ip link del n1b") })
			inNode(t, "n1", "%s", c.make)
			t.Cleanup(func() { inNode(t, "n1", "%s", c.undo) })
			if out := inNode(t, "n1", "ip route get %s", other); !strings.Contains(out, "src "+at+".77") {
				t.Fatalf("the kernel would take the node's own address all the same: %s", out)
			}
			reprobe(t, "n1")
			for _, node := range nodes {
				lab.AwaitPath(t, node, model.PeerProven)
			}
			expectDirect(t, 4, 6)
		})
	}
}

// reprobe waits until a node has probed the other one anew.
func reprobe(t *testing.T, node string) {
	t.Helper()
	before := lab.DirectPaths(t, node).Probes
	client := lab.StartPeer(t, "heddle", node+"/c1")
	other := map[string]string{"n1": "n2/c1", "n2": "n1/c1"}[node]
	client.Do(`error_of(connect, 4, %q, %d)`, lab.Address(t, "heddle", other), lab.FreePort()) // is refused, and so asks for a probe
	testutil.Eventually(t, node+" to probe the other node", func() (bool, string) {
		now := lab.DirectPaths(t, node).Probes
		sum := func(m map[string]uint64) uint64 { return m["answered"] + m["refused"] + m["silent"] }
		return sum(now) >= sum(before)+4, fmt.Sprint(now)
	})
}

// middleboxes are what stands between the nodes, and what becomes of connections from n1.
var middleboxes = []struct {
	name, rules string
	state       model.PeerState
}{
	{"options that it does not know stripped, both ways", "tcp flags & syn == syn reset tcp option 253", model.PeerStripped},
	{"SYNs with options that it does not know dropped", "tcp option 253 exists drop", model.PeerBlocked},
	{"TCP to ports that nobody has asked for dropped", "tcp flags & (syn | ack) == syn tcp dport != { 2379, 2380, 17472 } drop", model.PeerBlocked},
}

// TestMiddleboxes: what spoils the direct path has connections go over the overlay, with the reason,
// and with all bytes; without it they are direct again.
func TestMiddleboxes(t *testing.T) {
	for _, box := range middleboxes {
		t.Run(box.name, func(t *testing.T) {
			repair := lab.Spoil(t, "fabric", "bridge", "chain c { type filter hook forward priority 0\n "+box.rules+"\n}")
			expectOverlay(t, box.state)
			repair()
			lab.AwaitPath(t, "n1", model.PeerProven)
			expectDirect(t, 4)
		})
	}
}

// expectOverlay checks that connections from n1 go over the overlay for a reason that status gives.
func expectOverlay(t *testing.T, state model.PeerState) {
	t.Helper()
	reprobe(t, "n1")
	lab.AwaitPath(t, "n1", state)
	reason := "fallback_" + state.String()
	for _, family := range []int{4, 6} {
		p := connect(t, "heddle", family)
		p.talk(1_000_000)
		if p.path != names.PathOverlay || p.reason != reason {
			t.Errorf("IPv%d: path %s (%s), want the overlay (%s)", family, p.path, p.reason, reason)
		}
	}
	if out := lab.Heddle(t, "status", "--node", "n1"); !strings.Contains(out, "by the overlay ("+reason+")") {
		t.Errorf("status:\n%s", out)
	}
}
