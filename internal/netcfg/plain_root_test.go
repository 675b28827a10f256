package netcfg

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

// TestNothingPlain: what has an inner address neither comes nor leaves by another device than the
// underlay's, whatever routes say, and the pool has no way out by the default route. A veth stands
// for WireGuard's device, which this kernel may not have.
func TestNothingPlain(t *testing.T) {
	testutil.NeedRoot(t, "it makes network namespaces")
	top := newTopology(t)
	node, peer := top.node[0], top.node[1]
	inner := netip.MustParseAddr("100.72.0.1")
	run(t, node, `ip link add heddle-wg0 type veth peer name other0
ip link set other0 up
ip link set heddle-wg0 mtu 1420 up
ip addr add 100.72.0.1/16 dev heddle-wg0
ip route add default via 192.168.50.2`)
	run(t, peer, "ip route add 100.72.0.0/16 via 192.168.50.1")
	cfg := nodeConfig(0)
	plain := cfg
	cfg.Outer, cfg.Underlay, cfg.Inner = cfg.Underlay, inner, netip.MustParsePrefix("100.72.0.0/16")
	var devs NodeDevices
	in(t, node, func() (err error) {
		devs, err = SetupNode(cfg)
		if err == nil && (!devs.Encrypted() || devs.OverlayMTU != 1370 || devs.VTEPMAC != VTEPMAC(cfg.Outer)) {
			t.Errorf("devices %+v", devs)
		}
		return err
	})
	dropped := func() (n uint64) {
		in(t, node, func() error {
			counts, err := devs.Firewall.GuardCounts()
			n = counts["drop_plain"]
			return err
		})
		return n
	}
	send := func(ns, to string) (err error) {
		in(t, ns, func() error {
			c, dialErr := net.Dial("udp", to)
			if dialErr != nil {
				err = dialErr
				return nil
			}
			_, err = c.Write([]byte("plain"))
			return c.Close()
		})
		return err
	}
	// In: from the network between the nodes.
	before := dropped()
	if err := send(peer, "100.72.0.1:4789"); err != nil {
		t.Fatal(err)
	}
	testutil.Eventually(t, "what comes in the clear to be dropped", func() (bool, string) { return dropped() == before+1, "" })
	// By the device, and within the node, packets pass.
	before = dropped()
	if err := errors.Join(send(node, "100.72.0.9:9"), send(node, "192.168.50.2:9")); err != nil {
		t.Error(err)
	}
	_ = send(node, "100.72.0.1:9") // nobody listens
	if now := dropped(); now != before {
		t.Errorf("%d packets are dropped that may pass", now-before)
	}
	// What is for a node that is not reached, and for the nodes of a device that is gone.
	if err := send(node, "10.99.2.2:9"); !errors.Is(err, unix.EHOSTUNREACH) {
		t.Errorf("to an address of the pool that no node has: %v, want EHOSTUNREACH", err)
	}
	run(t, node, "ip link set heddle-wg0 down")
	if err := send(node, "100.72.0.9:9"); !errors.Is(err, unix.EPERM) {
		t.Errorf("without the device: %v, want EPERM", err)
	}
	if now := dropped(); now != before+1 {
		t.Errorf("%d packets are dropped that would leave in the clear, want 1", now-before)
	}
	// Without encryption there is none of it.
	in(t, node, func() error { _, err := SetupNode(plain); return err })
	if rules := run(t, node, "nft list table inet heddle"); strings.Contains(rules, "plain-out") || strings.Contains(rules, "100.72.0.1") {
		t.Errorf("rules of encryption are left:\n%s", rules)
	}
	if routes := run(t, node, "ip route"); strings.Contains(routes, "unreachable 10.99.0.0/16") {
		t.Errorf("the pool is unreachable:\n%s", routes)
	}
}

// TestNoWireGuard: a kernel without it is said to have none, with what to do, and nothing is left of
// the question.
func TestNoWireGuard(t *testing.T) {
	testutil.NeedRoot(t, "it makes network namespaces")
	if err := noWireGuard(rtnl.Errno("add wireguard", unix.EOPNOTSUPP)); !strings.Contains(err.Error(), "modprobe wireguard") {
		t.Errorf("%v", err)
	}
	ns := newNetns(t)
	before := dumpState(t, ns)
	err := netns.Do(ns, CheckWireGuard)
	if err != nil && !strings.Contains(err.Error(), "this kernel has no WireGuard") {
		t.Errorf("%v", err)
	}
	sameState(t, ns, "a question", before)
	run(t, ns, "ip link add heddle-wg0 type veth peer name other0\nip addr add 192.0.2.1/24 dev heddle-wg0\nip link set heddle-wg0 up")
	w := WireGuard{Outer: netip.MustParseAddr("192.0.2.1"), Port: 1, Inner: netip.MustParseAddr("100.72.0.1"), Prefix: netip.MustParsePrefix("100.72.0.0/16")}
	mustFail(t, ns, func() error { return SetWireGuard(w) }, "heddle-wg0", "taken by a device of kind veth")
	in(t, ns, RemoveWireGuard)
	if links := run(t, ns, "ip link"); !strings.Contains(links, "heddle-wg0") {
		t.Errorf("somebody else's device was removed:\n%s", links)
	}
}
