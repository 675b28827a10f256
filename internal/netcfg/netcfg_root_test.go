package netcfg

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
)

// whole is a topology with everything set up: c1 and c2 on n1, c3 on n2.
func whole(t *testing.T) (top *topology, cfgs [3]EndpointConfig) {
	t.Helper()
	top = newTopology(t)
	top.setup(t, 0)
	top.setup(t, 1)
	cfgs = [3]EndpointConfig{top.endpoint(t, 0, 1, c1), top.endpoint(t, 0, 2, c2), top.endpoint(t, 1, 1, c3)}
	top.add(t, 0, cfgs[0])
	top.add(t, 0, cfgs[1])
	top.add(t, 1, cfgs[2])
	return top, cfgs
}

// TestTraffic checks every pair of ends that the overlay joins: what arrives, and under which
// address.
func TestTraffic(t *testing.T) {
	top, cfgs := whole(t)
	ns := map[string]string{
		"c1": cfgs[0].NetnsPath, "c2": cfgs[1].NetnsPath, "c3": cfgs[2].NetnsPath,
		"n1": top.node[0], "n2": top.node[1], "ext": top.ext,
	}
	gw := gateways(prefixes)
	addr := map[string]netip.Addr{"c1": c1, "c2": c2, "c3": c3, "n1": gw[0], "n2": gw[1], "ext": ext}
	outside := netip.MustParseAddr("203.0.113.1")
	for _, c := range []struct {
		from, to string
		seen     netip.Addr
	}{
		{"c1", "c3", c1}, {"c3", "c1", c3}, // between nodes
		{"c1", "c2", c1}, {"c2", "c1", c2}, // on one node
		{"n1", "c1", gw[0]}, {"c1", "n1", c1}, // node process and its own container
		{"n1", "c3", gw[0]}, {"c3", "n1", c3}, // and a remote one
		{"c1", "ext", outside}, // translated
	} {
		t.Run(c.from+"-"+c.to, func(t *testing.T) {
			tcp, udp := serve(t, ns[c.to], addr[c.to], nil)
			for network, at := range map[string]netip.AddrPort{"tcp": tcp, "udp": udp} {
				if got, err := seenAs(ns[c.from], network, at, nil, nil); err != nil || got != c.seen.String() {
					t.Errorf("%s: seen as %q, want %v: %v", network, got, c.seen, err)
				}
			}
			if err := ping(ns[c.from], addr[c.to]); err != nil {
				t.Errorf("ping: %v", err)
			}
		})
	}
	t.Run("unassigned", func(t *testing.T) {
		for _, from := range []string{"c1", "n1"} {
			_, err := dialFrom(ns[from], "tcp", netip.MustParseAddrPort("10.99.1.77:80"), nil, nil)
			if !errors.Is(err, unix.EHOSTUNREACH) {
				t.Errorf("from %s: %v, want EHOSTUNREACH", from, err)
			}
		}
	})
	t.Run("mtu", func(t *testing.T) {
		if got := top.devs[0].OverlayMTU; got != 1450 {
			t.Errorf("overlay mtu %d, want 1450", got)
		}
		if out := run(t, cfgs[0].NetnsPath, "ip link show eth0"); !strings.Contains(out, "mtu 1450") {
			t.Errorf("container: %s", out)
		}
	})
}

// TestRepeatAndTeardown repeats every call, which must change nothing, and takes all away.
func TestRepeatAndTeardown(t *testing.T) {
	top := newTopology(t)
	// The forwarding switch stays on after Teardown.
	run(t, top.node[0], "sysctl -qw net.ipv4.ip_forward=1")
	before := dumpState(t, top.node[0])
	in(t, top.node[0], teardown) // nothing there yet
	sameState(t, top.node[0], "Teardown of nothing", before)

	top.setup(t, 0)
	cfg := top.endpoint(t, 0, 0x2a, c1)
	cfg.Intercepted = true
	container := dumpState(t, cfg.NetnsPath)
	dev := top.add(t, 0, cfg)
	after, inside := dumpState(t, top.node[0]), dumpState(t, cfg.NetnsPath)
	firstDevs := top.devs[0]
	for range 2 {
		top.setup(t, 0)
		want := dev
		want.Made = false
		if again := top.add(t, 0, cfg); again != want {
			t.Errorf("AddEndpoint gives %+v, then %+v", dev, again)
		}
	}
	if !slices.Equal(top.devs[0].Gateways, firstDevs.Gateways) || top.devs[0].OverlayIfindex != firstDevs.OverlayIfindex ||
		top.devs[0].DivertIfindex != firstDevs.DivertIfindex {
		t.Errorf("SetupNode gives %+v, then %+v", firstDevs, top.devs[0])
	}
	sameState(t, top.node[0], "repeat", after)
	sameState(t, cfg.NetnsPath, "repeat, container", inside)
	for _, want := range []string{
		"local 10.99.1.2 dev lo table 51 proto 72", "10.99.2.0/24 via 10.99.2.1 dev heddle-vx0 proto 72 src 10.99.1.1 onlink",
		"unreachable 10.99.1.0/24 proto 72", "10.99.1.2 dev hd2a proto 72 scope link src 10.99.1.1", "from all fwmark 0x51 lookup 51 proto 72",
		"10.99.2.1 dev heddle-vx0 lladdr 02:48:c0:a8:32:02 PERMANENT", "02:48:c0:a8:32:02 dev heddle-vx0 dst 192.168.50.2 self permanent",
		"masquerade", "alias n1/c42",
	} {
		if !strings.Contains(after, want) {
			t.Errorf("no %q in:\n%s", want, after)
		}
	}

	for range 2 {
		in(t, top.node[0], func() error { return DelEndpoint(cfg.ID, cfg.Addrs, cfg.Table) })
		if left := dumpState(t, top.node[0]); strings.Contains(left, "10.99.1.2") || strings.Contains(left, "hd2a") {
			t.Errorf("after DelEndpoint:\n%s", left)
		}
		sameState(t, cfg.NetnsPath, "DelEndpoint, container", container)
	}
	top.add(t, 0, cfg)
	for _, want := range []string{"device " + netdev.Overlay + ",device " + netdev.Divert, ""} { // the second time nothing is left
		in(t, top.node[0], func() error {
			removed, err := Teardown()
			if got := strings.Join(removed, ","); !strings.Contains(got, want) || (want == "") != (got == "") {
				t.Errorf("removed %q, want %q", got, want)
			}
			return err
		})
		sameState(t, top.node[0], "Teardown", before)
	}
}

// TestMakePair: nothing leads to a pair that is made ahead, AddEndpoint makes of it what it makes
// without, and DelEndpoint takes it away.
func TestMakePair(t *testing.T) {
	top := newTopology(t)
	top.setup(t, 0)
	before := dumpState(t, top.node[0])
	cfg := top.endpoint(t, 0, 0x2a, c1)
	cfg.Intercepted = true
	container := dumpState(t, cfg.NetnsPath)
	add := func(cfg EndpointConfig) (node, inside string) {
		top.add(t, 0, cfg)
		index := regexp.MustCompile(`(?m)^\d+: |@if\d+`)
		node, inside = index.ReplaceAllString(dumpState(t, top.node[0]), ""), index.ReplaceAllString(dumpState(t, cfg.NetnsPath), "")
		in(t, top.node[0], func() error { return DelEndpoint(cfg.ID, cfg.Addrs, cfg.Table) })
		return node, inside
	}
	wantNode, wantInside := add(cfg)
	guarded := 0
	cfg.Guard = func(int) error { guarded++; return nil }
	for _, drop := range []bool{true, false} {
		in(t, top.node[0], func() (err error) {
			cfg.Pair, err = MakePair(cfg)
			return err
		})
		for _, ns := range []string{top.node[0], cfg.NetnsPath} {
			if links := run(t, ns, "ip -o link show up"); strings.Contains(links, "hd2a") || strings.Contains(links, "eth0") {
				t.Errorf("an end of the pair is up:\n%s", links)
			}
			if state := dumpState(t, ns); strings.Contains(state, c1.String()) {
				t.Errorf("something leads to the address:\n%s", state)
			}
		}
		if !drop {
			break
		}
		in(t, top.node[0], func() error { return DelEndpoint(cfg.ID, nil, cfg.Table) })
		sameState(t, top.node[0], "pair made and dropped", before)
		sameState(t, cfg.NetnsPath, "pair made and dropped, container", container)
	}
	node, inside := add(cfg)
	sameLines(t, "with a pair made ahead", wantNode, node)
	sameLines(t, "with a pair made ahead, container", wantInside, inside)
	if guarded != 2 {
		t.Errorf("guarded %d times; want once for each pair", guarded)
	}
}

// TestHalfDone removes one thing at a time, as a kill half-way or a careless operator would leave
// it.
func TestHalfDone(t *testing.T) {
	top := newTopology(t)
	top.setup(t, 0)
	cfg := top.endpoint(t, 0, 1, c1)
	cfg.Intercepted = true
	top.add(t, 0, cfg)
	want, inside := dumpState(t, top.node[0]), dumpState(t, cfg.NetnsPath)
	for _, damage := range []string{
		"ip rule del pref 51", "ip route del 10.99.2.0/24", "ip route del unreachable 10.99.1.0/24", "nft delete table inet heddle",
		"ip neigh del 10.99.2.1 dev heddle-vx0", "bridge fdb del 02:48:c0:a8:32:02 dev heddle-vx0 dst 192.168.50.2 self",
		"ip route del 10.99.1.2 dev hd1", "ip route del local 10.99.1.2 table 51", "ip neigh del 10.99.1.2 dev hd1",
		"nft flush chain inet heddle outside", "ip addr add 10.1.1.1/32 dev heddle-vx0", "ip link set heddle-vx0 mtu 1000",
		"ip rule add fwmark 0x99 lookup 51 pref 60 proto 72", "ip route add 10.99.9.0/24 via 10.99.9.1 onlink dev heddle-vx0 proto 72",
		"ip neigh add 10.99.9.1 lladdr 02:00:00:00:00:09 dev heddle-vx0", "bridge fdb add 02:00:00:00:00:09 dev heddle-vx0 dst 192.168.50.9",
		"bridge fdb replace 02:48:c0:a8:32:02 dev heddle-vx0 dst 192.168.50.77", "ip route add local 10.99.1.2/32 dev lo table 52 proto 72",
	} {
		run(t, top.node[0], damage)
		if dumpState(t, top.node[0]) == want {
			t.Errorf("%s: no damage", damage)
		}
		top.setup(t, 0)
		top.add(t, 0, cfg)
		sameState(t, top.node[0], damage, want)
	}
	for _, damage := range []string{
		"ip route del default", "ip addr flush dev eth0 scope global", "ip addr add 10.3.3.3/24 dev eth0",
		"ip neigh del 10.99.1.1 dev eth0", "ip link set eth0 down", "ip link set eth0 mtu 1000",
	} {
		run(t, cfg.NetnsPath, damage)
		if dumpState(t, cfg.NetnsPath) == inside {
			t.Fatalf("container: %s: no damage", damage)
		}
		top.add(t, 0, cfg)
		sameState(t, cfg.NetnsPath, damage, inside)
	}
}

// TestChanges changes what SetupNode, SetPeers and AddEndpoint are asked for.
func TestChanges(t *testing.T) {
	top := newTopology(t)
	top.setup(t, 0)
	cfg := top.endpoint(t, 0, 1, c1)
	cfg.Intercepted = true
	first := top.add(t, 0, cfg)
	first.Made = false // from here on it is found

	cfg.Addrs = []netip.Addr{c2}
	if second := top.add(t, 0, cfg); second != first {
		t.Errorf("other address: device %+v, was %+v", second, first)
	}
	if state := dumpState(t, top.node[0]); strings.Contains(state, "10.99.1.2") || !strings.Contains(state, "local 10.99.1.3 dev lo table 51") {
		t.Errorf("other address:\n%s", state)
	}
	cfg.Intercepted = false
	top.add(t, 0, cfg)
	if state := dumpState(t, top.node[0]); strings.Contains(state, "local 10.99.1.3 ") {
		t.Errorf("not intercepted any more:\n%s", state)
	}
	cfg.NetnsPath = newNetns(t)
	moved := top.add(t, 0, cfg)
	if moved.Ifindex == first.Ifindex {
		t.Error("other namespace: the device is the old one")
	}
	if err := ping(cfg.NetnsPath, gateways(prefixes)[0]); err != nil {
		t.Errorf("other namespace: %v", err)
	}

	in(t, top.node[0], func() error { return setPeers(top.devs[0], "n1", top.nodes()[:1]) })
	if state := dumpState(t, top.node[0]); strings.Contains(state, "10.99.2.") || strings.Contains(state, "192.168.50.2 ") {
		t.Errorf("peer removed:\n%s", state)
	}
	in(t, top.node[0], func() (err error) {
		c := nodeConfig(0)
		c.VNI, c.VXLANPort, c.Prefixes, c.Mark, c.Table = 43, 4790, []netip.Prefix{netip.MustParsePrefix("10.99.7.0/24")}, 0x61, 61
		top.devs[0], err = SetupNode(c)
		return err
	})
	state := dumpState(t, top.node[0])
	for _, want := range []string{"vxlan id 43 ", "dstport 4790", "unreachable 10.99.7.0/24", "inet 10.99.7.1/32", "fwmark 0x61 lookup 61"} {
		if !strings.Contains(state, want) {
			t.Errorf("no %q in:\n%s", want, state)
		}
	}
	for _, stale := range []string{"unreachable 10.99.1.0/24", "inet 10.99.1.1/32", "fwmark 0x51", "vxlan id 42 "} {
		if strings.Contains(state, stale) {
			t.Errorf("%q still in:\n%s", stale, state)
		}
	}
}

// TestRoutesAreListedOnce: an agent that starts attaches all endpoints of the one before by one list
// of the node's routes, and what is not as it should be is mended.
func TestRoutesAreListedOnce(t *testing.T) {
	top, cfgs := whole(t)
	node := top.node[0]
	before := dumpState(t, node)
	gone := netip.PrefixFrom(cfgs[0].Addrs[0].Next().Next().Next(), 32)
	run(t, node, fmt.Sprintf("ip route add %s dev hd1 proto %d\nip route add local %s dev lo table %d proto %d\nip route del %s dev hd2\nip neigh flush dev hd1 nud permanent", gone, routeProtocol, gone, testTable, routeProtocol, cfgs[1].Addrs[0]))
	in(t, node, func() error {
		routes := ListOnce()
		// Known to the list alone: who lists again does not have it.
		sentinel := route{table: 1, dst: netip.MustParsePrefix("192.0.2.1/32")}
		const noDevice = 1 << 20
		for i, cfg := range cfgs[:2] { // those of this node
			cfg.Routes = routes
			if _, err := AddEndpoint(cfg); err != nil {
				return err
			}
			if i > 0 && (routes.have[sentinel.key()] != sentinel || routes.neigh[noDevice] == nil) {
				t.Error("the node's routes, or neighbours, are listed for each endpoint")
			}
			routes.have[sentinel.key()], routes.neigh[noDevice] = sentinel, map[netip.Addr]string{}
		}
		return nil
	})
	sameState(t, node, "attached again", before)
}

func TestEndpointsAndVanished(t *testing.T) {
	top, cfgs := whole(t)
	list := func() (out []EndpointLink) {
		in(t, top.node[0], func() (err error) {
			out, err = Endpoints()
			return err
		})
		return out
	}
	run(t, top.node[0], "ip link add hd9 type veth peer name hd8") // not ours: other hardware address
	got := list()
	if len(got) != 2 || got[0].ID != 1 || got[1].ID != 2 || got[0].Name != "hd1" || got[0].Ifindex == 0 {
		t.Errorf("Endpoints = %+v", got)
	}
	run(t, cfgs[0].NetnsPath, "ip link del eth0") // as if the namespace had gone
	if got := list(); len(got) != 1 || got[0].ID != 2 {
		t.Errorf("Endpoints = %+v", got)
	}
	in(t, top.node[0], func() error { return DelEndpoint(1, cfgs[0].Addrs, testTable) })
	in(t, top.node[0], func() error { return DelEndpoint(9, nil, testTable) })
	if state := dumpState(t, top.node[0]); !strings.Contains(state, "hd9@hd8") {
		t.Error("DelEndpoint deleted a device that is not Heddle's")
	}
	var addrs []netip.Addr
	in(t, top.node[0], func() (err error) {
		addrs, err = NodeAddrs()
		return err
	})
	for _, a := range []string{"127.0.0.1", "10.99.1.1", "192.168.50.1", "203.0.113.1", "::1"} {
		if !slices.Contains(addrs, netip.MustParseAddr(a)) {
			t.Errorf("NodeAddrs = %v: no %s", addrs, a)
		}
	}
	if len(addrs) != 5 {
		t.Errorf("NodeAddrs = %v", addrs)
	}
}

func TestSetupNodeErrors(t *testing.T) {
	top := newTopology(t)
	run(t, top.node[0], "sysctl -qw net.ipv4.ip_forward=1")
	node := top.node[0]
	before := dumpState(t, node)
	setup := func(change func(*NodeConfig)) func() error {
		return func() error {
			c := nodeConfig(0)
			change(&c)
			_, err := SetupNode(c)
			return err
		}
	}
	same := func(*NodeConfig) {}
	mustFail(t, node, setup(func(c *NodeConfig) { c.Underlay = netip.MustParseAddr("192.168.50.9") }),
		"underlay 192.168.50.9", "192.168.50.1, 203.0.113.1")
	mustFail(t, node, setup(func(c *NodeConfig) { c.Underlay = netip.MustParseAddr("127.0.0.1") }), "underlay 127.0.0.1", "loopback")
	sameState(t, node, "bad underlay", before)

	for _, c := range []struct {
		name, make, undo string
		want             []string
	}{
		{"vni clash", "ip link add other type vxlan id 42 dstport 4789 dev under0", "ip link del other", []string{"vni 42", "4789", "device other"}},
		{"overlay name", "ip link add heddle-vx0 type veth peer name x0", "ip link del heddle-vx0", []string{"heddle-vx0", "veth"}},
		{"underlay down", "ip link set under0 down", "ip link set under0 up", []string{"under0", "down"}},
	} {
		run(t, node, c.make)
		taken := dumpState(t, node)
		mustFail(t, node, setup(same), c.want...)
		sameState(t, node, c.name, taken)
		run(t, node, c.undo)
	}
	var holder *net.UDPConn
	in(t, node, func() (err error) {
		holder, err = net.ListenUDP("udp", &net.UDPAddr{Port: 4789})
		return err
	})
	mustFail(t, node, setup(same), "vxlan port 4789", "in use")
	holder.Close()
	sameState(t, node, "udp port in use", before)

	for _, name := range []string{netdev.Divert, netdev.DivertPeer} {
		run(t, node, "ip link add "+name+" type veth peer name x0")
		mustFail(t, node, setup(same), name, "not Heddle's")
		run(t, node, "ip link del "+name)
	}
	in(t, node, teardown)
	sameState(t, node, "after errors", before)
	run(t, node, "ip route add 10.99.1.0/24 via 192.168.50.2")
	mustFail(t, node, setup(same), "10.99.1.0/24", "not Heddle's")
	in(t, node, teardown)
	run(t, node, "ip route del 10.99.1.0/24 via 192.168.50.2") // it is still there
	in(t, node, setup(same))
}

func TestAddEndpointErrors(t *testing.T) {
	top := newTopology(t)
	good := top.endpoint(t, 0, 1, c1)
	good.Intercepted = true
	add := func(change func(*EndpointConfig)) func() error {
		return func() error {
			c := good
			change(&c)
			_, err := AddEndpoint(c)
			return err
		}
	}
	same := func(*EndpointConfig) {}
	node := top.node[0]
	mustFail(t, node, add(same), "heddle-vx0", "set the node up first")
	top.setup(t, 0)
	before, inside := dumpState(t, node), dumpState(t, good.NetnsPath)
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	mustFail(t, node, add(func(c *EndpointConfig) { c.NetnsPath += "-absent" }), "netns_path", "-absent", "no such file")
	mustFail(t, node, add(func(c *EndpointConfig) { c.NetnsPath = plain }), "netns_path", plain)
	mustFail(t, node, add(func(c *EndpointConfig) { c.NetnsPath = node }), "node's own")
	mustFail(t, node, add(func(c *EndpointConfig) { c.NetnsPath = "/proc/thread-self/ns/net" }), "node's own")
	mustFail(t, node, add(func(c *EndpointConfig) { c.Gateways = nil }), "gateway")
	sameState(t, node, "bad configuration", before)

	run(t, node, "ip link add hd1 type veth peer name x0")
	mustFail(t, node, add(same), "hd1", "not Heddle's")
	run(t, node, "ip link del hd1")

	run(t, good.NetnsPath, "ip link add eth0 type veth peer name x0")
	mustFail(t, node, add(same), good.NetnsPath, "eth0")
	run(t, good.NetnsPath, "ip link del eth0")

	// A failure after the pair was made: the undo must take everything away again.
	run(t, good.NetnsPath, "ip route add default dev lo")
	mustFail(t, node, add(same), "0.0.0.0/0", "not Heddle's")
	sameState(t, node, "undo", before)
	run(t, good.NetnsPath, "ip route del default")
	sameState(t, good.NetnsPath, "undo, container", inside)
	run(t, node, "ip route add 10.99.1.2/32 via 192.168.50.2")
	mustFail(t, node, add(same), "10.99.1.2/32", "not Heddle's")
	run(t, node, "ip route del 10.99.1.2/32")
	sameState(t, node, "undo late", before)
	sameState(t, good.NetnsPath, "undo late, container", inside)
	in(t, node, add(same))
}

func TestSetPeersKeepsGoodNodes(t *testing.T) {
	top := newTopology(t)
	top.setup(t, 0)
	want := dumpState(t, top.node[0])
	bad := []model.Node{
		{Name: "mac", Underlay: underlay[1], VTEPMAC: "nonsense", Prefixes: []netip.Prefix{netip.MustParsePrefix("10.99.3.0/24")}},
		{Name: "mine", Underlay: underlay[1], VTEPMAC: "02:48:00:00:00:01", Prefixes: []netip.Prefix{netip.MustParsePrefix("10.99.1.128/25")}},
		{Name: "half", Underlay: underlay[1], VTEPMAC: "02:48:00:00:00:02", Prefixes: []netip.Prefix{netip.MustParsePrefix("10.99.2.0/25")}},
		{Name: "lost", VTEPMAC: "02:48:00:00:00:03"},
		{Name: "twin", Underlay: underlay[1], VTEPMAC: vtepMAC(underlay[1]).String()},
	}
	set := func() error { return setPeers(top.devs[0], "n1", append(top.nodes(), bad...)) }
	mustFail(t, top.node[0], set, `"mac"`, "nonsense", `"mine"`, `"n1"`, `"half"`, `"n2"`, `"lost"`, "underlay", `"twin"`)
	sameState(t, top.node[0], "bad peers", want)
	run(t, top.node[0], "ip route add 10.99.4.0/24 via 192.168.50.2")
	foreign := append(top.nodes(), model.Node{Name: "n4", Underlay: netip.MustParseAddr("192.168.50.4"), VTEPMAC: "02:48:00:00:00:04",
		Prefixes: []netip.Prefix{netip.MustParsePrefix("10.99.4.0/24")}})
	mustFail(t, top.node[0], func() error { return setPeers(top.devs[0], "n1", foreign) }, "10.99.4.0/24", "not Heddle's")
}

func TestListenersIn(t *testing.T) {
	top := newTopology(t)
	top.setup(t, 0)
	var want []netip.AddrPort
	in(t, top.node[0], func() error {
		for _, at := range []string{"127.0.0.1:17440", "192.168.50.1:17455", "[::]:17442", "[::1]:17443", "127.0.0.1:17439", "127.0.0.1:17456"} {
			network := "tcp"
			if strings.HasPrefix(at, "[") {
				network = "tcp6"
			}
			l, err := net.Listen(network, at)
			if err != nil {
				return err
			}
			t.Cleanup(func() { l.Close() })
			if ap := netip.MustParseAddrPort(at); model.DefaultDirectPorts.Contains(ap.Port()) {
				want = append(want, ap)
			}
		}
		// What a container has without an address is tied to a device.
		tied := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
			var err error
			if e := c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), netdev.Divert) }); e != nil {
				return e
			}
			return err
		}}
		unreachable, err := tied.Listen(t.Context(), "tcp4", "0.0.0.0:17450")
		if err != nil {
			return err
		}
		t.Cleanup(func() { unreachable.Close() })
		c, err := net.Dial("tcp", "127.0.0.1:17440") // connected sockets do not count
		if err != nil {
			return err
		}
		t.Cleanup(func() { c.Close() })
		slices.SortFunc(want, netip.AddrPort.Compare)
		got, err := ListenersIn(model.DefaultDirectPorts)
		if err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("ListenersIn = %v, want %v", got, want)
		}
		return err
	})
	in(t, top.node[1], func() error {
		got, err := ListenersIn(model.PortRange{First: 1, Last: 65535})
		if err == nil && len(got) != 0 {
			err = fmt.Errorf("other namespace: %v", got)
		}
		return err
	})
}

// TestKeepLocal: what makes an endpoint's address local goes when nobody has the endpoint any more,
// also without its device.
func TestKeepLocal(t *testing.T) {
	top := newTopology(t)
	top.setup(t, 0)
	cfgs := []EndpointConfig{top.endpoint(t, 0, 1, c1), top.endpoint(t, 0, 2, c2)}
	for i := range cfgs {
		cfgs[i].Intercepted = true
		top.add(t, 0, cfgs[i])
	}
	keep := make(map[netip.Addr]bool)
	for _, a := range cfgs[0].Addrs {
		keep[a] = true
	}
	in(t, top.node[0], func() error { return KeepLocal(keep) })
	state := dumpState(t, top.node[0])
	for i, want := range []bool{true, false} {
		for _, a := range cfgs[i].Addrs {
			if got := strings.Contains(state, "local "+a.String()+" "); got != want {
				t.Errorf("%s is local: %v, want %v\n%s", a, got, want, state)
			}
		}
	}
}
