package netcfg

import (
	"net/netip"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// TestDualStack gives nodes and endpoints an address of each family on the IPv4 underlay.
func TestDualStack(t *testing.T) {
	top := newTopology(t)
	pools := []netip.Prefix{pool, netip.MustParsePrefix("fd99::/48")}
	both := [2][]netip.Prefix{
		{prefixes[0], netip.MustParsePrefix("fd99:0:0:1::/64")},
		{prefixes[1], netip.MustParsePrefix("fd99:0:0:2::/64")},
	}
	addrs := [2][]netip.Addr{
		{c1, netip.MustParseAddr("fd99:0:0:1::2")},
		{c3, netip.MustParseAddr("fd99:0:0:2::2")},
	}
	nodes := top.nodes()
	nodes[0].Prefixes, nodes[1].Prefixes = both[0], both[1]
	var cfgs [2]EndpointConfig
	set := func() {
		for i, node := range top.node {
			in(t, node, func() error {
				c := nodeConfig(i)
				c.Prefixes, c.Pool = both[i], pools
				devs, err := SetupNode(c)
				if err != nil {
					return err
				}
				if err := SetPeers(devs, nodes[i].Name, nodes); err != nil {
					return err
				}
				_, err = AddEndpoint(cfgs[i])
				return err
			})
		}
	}
	for i := range cfgs {
		cfgs[i] = top.endpoint(t, i, model.EndpointID(i+1), addrs[i][0])
		cfgs[i].Addrs, cfgs[i].Gateways, cfgs[i].Intercepted = addrs[i], gateways(both[i]), true
	}
	// Forwarding stays on after Teardown, and with it the all-routers group on every device.
	run(t, top.node[0], "sysctl -qw net.ipv6.conf.all.forwarding=1")
	before := dumpState(t, top.node[0])
	set()
	node, container := dumpState(t, top.node[0]), dumpState(t, cfgs[0].NetnsPath)
	set()
	sameState(t, top.node[0], "repeat", node)
	sameState(t, cfgs[0].NetnsPath, "repeat, container", container)
	for _, to := range addrs[1] {
		tcp, udp := serve(t, cfgs[1].NetnsPath, to, nil)
		for network, at := range map[string]netip.AddrPort{"tcp": tcp, "udp": udp} {
			want := sameFamily(to, addrs[0])
			if got, err := seenAs(cfgs[0].NetnsPath, network, at, nil, nil); err != nil || got != want.String() {
				t.Errorf("%s to %v: seen as %q, want %v: %v", network, to, got, want, err)
			}
			want = sameFamily(to, gateways(both[0]))
			if got, err := seenAs(top.node[0], network, at, nil, nil); err != nil || got != want.String() {
				t.Errorf("%s from the node to %v: seen as %q, want %v: %v", network, to, got, want, err)
			}
		}
	}
	in(t, top.node[0], Teardown)
	sameState(t, top.node[0], "Teardown", before)
}
