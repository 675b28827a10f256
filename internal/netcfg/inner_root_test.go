package netcfg

import (
	"net/netip"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/testutil"
)

// TestInner: the device of inner addresses has what translation needs, is left alone when it is as
// it should be, refuses what is somebody else's, and goes.
func TestInner(t *testing.T) {
	testutil.NeedRoot(t, "it makes network namespaces")
	top := newTopology(t)
	node := top.node[0]
	want := Inner{Outer: netip.MustParseAddr("fd00::1"), Addr: netip.MustParseAddr("100.73.0.1"), Prefix: netip.MustParsePrefix("100.73.0.0/16")}
	set := func() error { return SetInner(want) }
	mustFail(t, node, set, "underlay fd00::1", "no device here has this address")
	dev := strings.Fields(run(t, node, "ip -o -4 addr show to 192.168.50.1"))[1]
	run(t, node, "ip addr add fd00::1/64 dev "+dev+" nodad\nip link add heddle-in0 type veth peer name x0")
	mustFail(t, node, set, "heddle-in0", "not Heddle's")
	run(t, node, "ip link del heddle-in0\nip link add x0 type veth peer name x1\nip addr add 100.73.9.9/24 dev x0")
	mustFail(t, node, set, "100.73.9.9/24", "--inner-prefix")
	run(t, node, "ip link del x0")
	in(t, node, set)
	before := run(t, node, "ip -o link show heddle-in0\nip -o -4 addr show heddle-in0\nip route show 100.73.0.0/16")
	for _, part := range []string{"NOARP", "mtu 1480", netdev.InnerMAC, "100.73.0.1/16", "dev heddle-in0", "unreachable 100.73.0.0/16"} {
		if !strings.Contains(before, part) {
			t.Errorf("no %q in:\n%s", part, before)
		}
	}
	in(t, node, set)
	if after := run(t, node, "ip -o link show heddle-in0\nip -o -4 addr show heddle-in0\nip route show 100.73.0.0/16"); after != before {
		t.Errorf("another call changed\n%s\nto\n%s", before, after)
	}
	in(t, node, RemoveInner)
	if left := run(t, node, "ip link"); strings.Contains(left, "heddle-in") {
		t.Errorf("left:\n%s", left)
	}
}
