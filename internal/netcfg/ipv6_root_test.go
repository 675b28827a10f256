package netcfg

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// The addresses of topology_test.go, in IPv6.
var (
	testPrefix6 = netip.MustParsePrefix("fd99::/96")
	ext6, out6  = netip.MustParseAddr("2001:db8:50::2"), netip.MustParseAddr("2001:db8:50::1")
)

func six(a netip.Addr) netip.Addr { return model.Overlay6(testPrefix6, a) }

// dualStack is a topology whose nodes have both families. The outside has, too, and n1 has its
// default route there.
func dualStack(t *testing.T) *topology {
	t.Helper()
	top := newTopology(t)
	run(t, top.node[0], "ip addr add 2001:db8:50::1/64 dev out0 nodad\nip route add default via 2001:db8:50::2 dev out0")
	run(t, top.ext, "ip addr add 2001:db8:50::2/64 dev out0 nodad")
	in(t, top.node[0], func() error { return awaitAddr6("out0", out6) })
	in(t, top.ext, func() error { return awaitAddr6("out0", ext6) })
	return top
}

// awaitAddr6 waits until an address that `ip` added to device is in use: the kernel takes its time.
func awaitAddr6(device string, a netip.Addr) error {
	l, err := rtnl.GetLink(device)
	if err != nil {
		return err
	}
	return awaitAddrs6(l, []netip.Addr{a})
}

func dualConfig(i int) NodeConfig {
	c := nodeConfig(i)
	c.Prefixes, c.Pool = model.WithOverlay6(testPrefix6, c.Prefixes), append([]netip.Prefix{testPrefix6}, c.Pool...)
	return c
}

// setup6 is setup in both families.
func (top *topology) setup6(t *testing.T, i int) {
	t.Helper()
	nodes := top.nodes()
	for i := range nodes {
		nodes[i].Prefixes = model.WithOverlay6(testPrefix6, nodes[i].Prefixes)
	}
	in(t, top.node[i], func() (err error) {
		if err := CheckIPv6(underlay[i]); err != nil {
			return err
		}
		if top.devs[i], err = SetupNode(dualConfig(i)); err != nil {
			return err
		}
		return setPeers(top.devs[i], fmt.Sprintf("n%d", i+1), nodes)
	})
}

// endpoint6 is endpoint in both families.
func (top *topology) endpoint6(t *testing.T, i int, id model.EndpointID, addr netip.Addr) EndpointConfig {
	t.Helper()
	cfg := top.endpoint(t, i, id, addr)
	cfg.Addrs, cfg.Gateways = model.OverlayAddrs(testPrefix6, addr), gateways(dualConfig(i).Prefixes)
	return cfg
}

// TestTraffic6 is TestTraffic over IPv6: what arrives, and under which address.
func TestTraffic6(t *testing.T) {
	top := dualStack(t)
	top.setup6(t, 0)
	top.setup6(t, 1)
	cfgs := []EndpointConfig{top.endpoint6(t, 0, 1, c1), top.endpoint6(t, 0, 2, c2), top.endpoint6(t, 1, 1, c3)}
	for i, node := range []int{0, 0, 1} {
		top.add(t, node, cfgs[i])
	}
	gw := gateways(prefixes)
	ns := map[string]string{
		"c1": cfgs[0].NetnsPath, "c2": cfgs[1].NetnsPath, "c3": cfgs[2].NetnsPath, "n1": top.node[0], "n2": top.node[1], "ext": top.ext,
	}
	addr := map[string]netip.Addr{"c1": six(c1), "c2": six(c2), "c3": six(c3), "n1": six(gw[0]), "n2": six(gw[1]), "ext": ext6}
	for _, c := range []struct {
		from, to string
		seen     netip.Addr
	}{
		{"c1", "c3", six(c1)}, {"c3", "c1", six(c3)},
		{"c1", "c2", six(c1)}, {"c2", "c1", six(c2)},
		{"n1", "c1", six(gw[0])}, {"c1", "n1", six(c1)},
		{"n1", "c3", six(gw[0])}, {"c3", "n1", six(c3)},
		{"c1", "ext", out6}, // translated
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
	unassigned := netip.AddrPortFrom(six(netip.MustParseAddr("10.99.1.77")), 80)
	// The container hears of it by the ICMPv6 message that a reject route causes: "no route".
	for from, want := range map[string]error{"c1": unix.ENETUNREACH, "n1": unix.EHOSTUNREACH} {
		if _, err := dialFrom(ns[from], "tcp", unassigned, nil, nil); !errors.Is(err, want) {
			t.Errorf("unassigned, from %s: %v, want %v", from, err, want)
		}
	}
}

// TestNodeStaysAHost: the node forwards for containers and yet is no router to its own networks.
func TestNodeStaysAHost(t *testing.T) {
	top := dualStack(t)
	top.setup6(t, 0)
	dev := top.add(t, 0, top.endpoint6(t, 0, 1, c1))
	for _, c := range []struct{ key, want string }{
		{"all.forwarding", "0"}, {"default.forwarding", "0"}, {"all.force_forwarding", "0"}, {"default.force_forwarding", "0"},
		{"under0.forwarding", "0"}, {"under0.accept_ra", "1"}, {"out0.forwarding", "0"}, {"out0.accept_ra", "1"},
		{"under0.force_forwarding", "1"}, {"out0.force_forwarding", "1"},
		{netdev.Overlay + ".force_forwarding", "1"}, {dev.Name + ".force_forwarding", "1"},
		{netdev.Overlay + ".accept_ra", "0"}, {dev.Name + ".accept_ra", "0"}, {netdev.Divert + ".force_forwarding", "0"},
	} {
		if got := strings.TrimSpace(run(t, top.node[0], "sysctl -n net.ipv6.conf."+c.key)); got != c.want {
			t.Errorf("net.ipv6.conf.%s = %s, want %s", c.key, got, c.want)
		}
	}
}

// TestRouterStaysARouter: where the machine forwards anyway, nothing is to be set for single
// devices.
func TestRouterStaysARouter(t *testing.T) {
	top := dualStack(t)
	run(t, top.node[0], "sysctl -qw net.ipv6.conf.all.forwarding=1")
	top.setup6(t, 0)
	cfg := top.endpoint6(t, 0, 1, c1)
	top.add(t, 0, cfg)
	if got := strings.TrimSpace(run(t, top.node[0], "sysctl -n net.ipv6.conf.under0.force_forwarding")); got != "0" {
		t.Errorf("force_forwarding of the underlay device = %s, want 0", got)
	}
	if err := ping(cfg.NetnsPath, ext6); err != nil {
		t.Errorf("to the outside: %v", err)
	}
}

// TestRepeatAndTeardown6 repeats every call, which must change nothing, and takes all away.
func TestRepeatAndTeardown6(t *testing.T) {
	top := dualStack(t)
	run(t, top.node[0], "sysctl -qw net.ipv4.ip_forward=1")
	before := dumpState(t, top.node[0])
	top.setup6(t, 0)
	cfg := top.endpoint6(t, 0, 0x2a, c1)
	cfg.Intercepted = true
	container := dumpState(t, cfg.NetnsPath)
	dev := top.add(t, 0, cfg)
	after, inside := dumpState(t, top.node[0]), dumpState(t, cfg.NetnsPath)
	for range 2 {
		top.setup6(t, 0)
		want := dev
		want.Made = false
		if again := top.add(t, 0, cfg); again != want {
			t.Errorf("AddEndpoint gives %+v, then %+v", dev, again)
		}
	}
	sameState(t, top.node[0], "repeat", after)
	sameState(t, cfg.NetnsPath, "repeat, container", inside)
	for _, want := range []string{
		"local fd99::a63:102 dev lo table 51 proto 72", "fd99::a63:200/120 via fd99::a63:201 dev heddle-vx0 proto 72 src fd99::a63:101",
		"unreachable fd99::a63:100/120 dev lo proto 72", "fd99::a63:102 dev hd2a proto 72 src fd99::a63:101", "advmss 65476",
		"fd99::a63:201 dev heddle-vx0 lladdr 02:48:c0:a8:32:02 PERMANENT", "ip6 daddr fd99::a63:100/120 goto claimed",
	} {
		if !strings.Contains(after, want) {
			t.Errorf("no %q in:\n%s", want, after)
		}
	}
	if rules := run(t, top.node[0], "ip -6 rule show"); !strings.Contains(rules, "from all fwmark 0x51 lookup 51 proto 72") {
		t.Errorf("rules:\n%s", rules)
	}
	for _, state := range []string{after, inside} {
		if strings.Contains(state, "fe80:") || strings.Contains(state, "tentative") {
			t.Errorf("link-local or tentative addresses:\n%s", state)
		}
	}
	in(t, top.node[0], func() error { return DelEndpoint(cfg.ID, cfg.Addrs, cfg.Table) })
	if left := dumpState(t, top.node[0]); strings.Contains(left, "fd99::a63:102") {
		t.Errorf("after DelEndpoint:\n%s", left)
	}
	sameState(t, cfg.NetnsPath, "DelEndpoint, container", container)
	top.add(t, 0, cfg)
	in(t, top.node[0], teardown)
	sameState(t, top.node[0], "Teardown", before)
}

// TestHalfDone6 removes one thing at a time, as a kill half-way or a careless operator would leave
// it.
func TestHalfDone6(t *testing.T) {
	top := dualStack(t)
	top.setup6(t, 0)
	cfg := top.endpoint6(t, 0, 1, c1)
	cfg.Intercepted = true
	top.add(t, 0, cfg)
	sysctls := func(ns string) string {
		return dumpState(t, ns) + run(t, ns, "sysctl -ar net.ipv6.conf.*.(force_forwarding|addr_gen_mode|accept_ra|autoconf|disable_ipv6)$")
	}
	want, inside := sysctls(top.node[0]), sysctls(cfg.NetnsPath)
	for _, damage := range []string{
		"ip -6 rule del pref 51", "ip route del fd99::a63:200/120", "ip route del unreachable fd99::a63:100/120",
		"ip neigh del fd99::a63:201 dev heddle-vx0", "ip route del fd99::a63:102 dev hd1", "ip -6 route del local fd99::a63:102 table 51",
		"ip neigh del fd99::a63:102 dev hd1", "ip addr add fd00::77/64 dev heddle-vx0", "ip addr del fd99::a63:101/128 dev heddle-hd0",
		"ip -6 rule add fwmark 0x99 lookup 51 pref 60 proto 72", "ip route add fd99::a63:900/120 dev heddle-vx0 proto 72",
		"ip link set heddle-vx0 mtu 1000", "ip link set hd1 down", "ip link set heddle-vx0 down",
		"sysctl -qw net.ipv6.conf.heddle-vx0.force_forwarding=0", "sysctl -qw net.ipv6.conf.hd1.force_forwarding=0",
		"sysctl -qw net.ipv6.conf.under0.force_forwarding=0", "sysctl -qw net.ipv6.conf.hd1.disable_ipv6=1",
		"sysctl -qw net.ipv6.conf.heddle-vx0.accept_ra=1",
	} {
		run(t, top.node[0], damage)
		if sysctls(top.node[0]) == want {
			t.Errorf("%s: no damage", damage)
		}
		top.setup6(t, 0)
		top.add(t, 0, cfg)
		sameLines(t, damage, want, sysctls(top.node[0]))
	}
	for _, damage := range []string{
		"ip -6 route del default", "ip -6 addr flush dev eth0", "ip addr add fd00::77/64 dev eth0", "ip addr add fe80::7/64 dev eth0",
		"ip neigh del fd99::a63:101 dev eth0", "ip link set eth0 down", "ip link set eth0 mtu 1000",
		"sysctl -qw net.ipv6.conf.eth0.disable_ipv6=1",
	} {
		run(t, cfg.NetnsPath, damage)
		if sysctls(cfg.NetnsPath) == inside {
			t.Fatalf("container: %s: no damage", damage)
		}
		top.add(t, 0, cfg)
		sameLines(t, damage, inside, sysctls(cfg.NetnsPath))
	}
}

// TestFamilyTakenAway: a node that loses IPv6 between two agents keeps nothing of it, and gets it
// back.
func TestFamilyTakenAway(t *testing.T) {
	top := dualStack(t)
	top.setup6(t, 0)
	both := top.endpoint6(t, 0, 1, c1)
	both.Intercepted = true
	top.add(t, 0, both)
	node, container := dumpState(t, top.node[0]), dumpState(t, both.NetnsPath)
	only4 := both
	only4.Addrs, only4.Gateways = both.Addrs[:1], both.Gateways[:1]
	top.setup(t, 0)
	top.add(t, 0, only4)
	for _, ns := range []string{top.node[0], both.NetnsPath} {
		if state := dumpState(t, ns); strings.Contains(state, "fd99::") {
			t.Errorf("IPv6 is left:\n%s", state)
		}
	}
	if rules := run(t, top.node[0], "ip -6 rule show"); strings.Contains(rules, "fwmark") {
		t.Errorf("rules:\n%s", rules)
	}
	top.setup6(t, 0)
	top.add(t, 0, both)
	sameState(t, top.node[0], "back", node)
	sameState(t, both.NetnsPath, "back, container", container)
}

// TestNamespaceWithoutIPv6: what a node says of new devices is not for Heddle's; and container
// runtimes switch IPv6 off in namespaces for which they have no address.
func TestNamespaceWithoutIPv6(t *testing.T) {
	top := dualStack(t)
	run(t, top.node[0], "sysctl -qw net.ipv6.conf.default.disable_ipv6=1")
	top.setup6(t, 0)
	top.setup6(t, 1)
	cfg, peer := top.endpoint6(t, 0, 1, c1), top.endpoint6(t, 1, 1, c3)
	run(t, cfg.NetnsPath, "sysctl -qw net.ipv6.conf.all.disable_ipv6=1")
	top.add(t, 0, cfg)
	top.add(t, 1, peer)
	for _, to := range []netip.Addr{six(c3), six(c1), netip.IPv6Loopback()} {
		if err := ping(cfg.NetnsPath, to); err != nil {
			t.Errorf("to %s: %v", to, err)
		}
	}
}

func TestCheckIPv6(t *testing.T) {
	top := dualStack(t)
	node := top.node[0]
	check := func() error { return CheckIPv6(underlay[0]) }
	in(t, node, check)
	for _, c := range []struct{ damage, undo, check, says string }{
		{"sysctl -qw net.ipv6.conf.all.disable_ipv6=1", "sysctl -qw net.ipv6.conf.all.disable_ipv6=0", "ipv6_enabled", "all.disable_ipv6 = 1"},
		{"sysctl -qw net.ipv6.conf.lo.disable_ipv6=1", "sysctl -qw net.ipv6.conf.lo.disable_ipv6=0", "ipv6_enabled", "lo.disable_ipv6 = 1"},
		{"ip link set under0 mtu 1329", "ip link set under0 mtu 1330", "ipv6_mtu", "1279 bytes fit"},
	} {
		run(t, node, c.damage)
		mustFail(t, node, func() error {
			err := check()
			var lacking *IPv6Error
			if err != nil && (!errors.As(err, &lacking) || lacking.Check != c.check) {
				t.Errorf("%s: %v, want an IPv6Error of %s", c.damage, err, c.check)
			}
			return err
		}, c.says)
		run(t, node, c.undo)
		in(t, node, check)
	}
}

// TestNodeSocketHoldsOverlayAddress6 is TestNodeSocketHoldsOverlayAddress over IPv6.
func TestNodeSocketHoldsOverlayAddress6(t *testing.T) {
	top := dualStack(t)
	node := top.node[0]
	top.setup6(t, 0)
	top.setup6(t, 1)
	c1cfg, c2cfg, c3cfg := top.endpoint6(t, 0, 1, c1), top.endpoint6(t, 0, 2, c2), top.endpoint6(t, 1, 1, c3)
	c1cfg.Intercepted = true
	dev := top.add(t, 0, c1cfg)
	top.add(t, 0, c2cfg)
	top.add(t, 1, c3cfg)
	capture := loadTC(t, insn(bpfMovImm, 1, 0, int32(top.devs[0].DivertIfindex)), insn(bpfMovImm, 2, 0, redirectIngress),
		insn(bpfCall, 0, 0, helperRedirect), insn(bpfExit, 0, 0, 0))
	run(t, node, fmt.Sprintf("ip neigh replace %v lladdr %s dev %s nud permanent", six(c1), netdev.DivertMAC, dev.Name))
	in(t, node, func() error {
		return AttachTC(dev.Ifindex, Filter{Direction: Egress, Program: capture, Name: "capture"})
	})

	tcp, _ := serve(t, node, six(c1), transparent)
	held := &net.TCPAddr{IP: six(c1).AsSlice()}
	for what, c := range map[string]struct {
		ns    string
		local net.Addr
		want  netip.Addr
	}{
		"plain container of another node": {c3cfg.NetnsPath, nil, six(c3)},
		"plain container of this node":    {c2cfg.NetnsPath, nil, six(c2)},
		"over lo":                         {node, held, six(c1)},
		"process of the node":             {node, nil, gateways(top.devs[0].Prefixes)[1]},
	} {
		control := transparent
		if c.local == nil {
			control = nil
		}
		if got, err := seenAs(c.ns, "tcp", tcp, c.local, control); err != nil || got != c.want.String() {
			t.Errorf("%s: seen as %q, want %s: %v", what, got, c.want, err)
		}
	}
	for what, to := range map[string]struct {
		ns       string
		at, seen netip.Addr
	}{
		"outside":                         {top.ext, ext6, out6},
		"plain container of another node": {c3cfg.NetnsPath, six(c3), six(c1)},
		"plain container of this node":    {c2cfg.NetnsPath, six(c2), six(c1)},
		"own node's address":              {node, out6, six(c1)},
	} {
		server, _ := serve(t, to.ns, to.at, nil)
		if got, err := seenAs(node, "tcp", server, held, transparent); err != nil || got != to.seen.String() {
			t.Errorf("to %s: seen as %q, want %s: %v", what, got, to.seen, err)
		}
	}
}
