package netcfg

import (
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/sysctl"
)

// TestOwnStack joins a container's own stack to its node, twice, and parts them again.
func TestOwnStack(t *testing.T) {
	top := newTopology(t)
	top.setup(t, 0)
	node := top.node[0]
	cfg := top.endpoint(t, 0, 0x2a, c1)
	cfg.Intercepted = true
	bare, fresh := dumpState(t, node), dumpState(t, cfg.NetnsPath)
	dev := top.add(t, 0, cfg)
	program := verdict(t, actOK)
	ports := model.PortRange{First: 57469, Last: 65535}
	join := func() error {
		return JoinOwnStack(OwnStackConfig{ID: cfg.ID, NetnsPath: cfg.NetnsPath, Device: dev, Addr: c1, Table: testTable, Ports: ports, OnLoopback: program, IntoLoopback: program})
	}
	chosen := func(when, want string) {
		t.Helper()
		if got := run(t, cfg.NetnsPath, "sysctl -n net.ipv4.ip_local_port_range"); strings.Join(strings.Fields(got), " ") != want {
			t.Errorf("%s: ports %s, want %s", when, got, want)
		}
	}
	sysctls := func() string {
		return run(t, cfg.NetnsPath, "sysctl -n net.ipv4.conf.lo.accept_local net.ipv4.conf.lo.route_localnet")
	}
	in(t, node, join)
	chosen("joined", "57469 65535")
	joinedOutside, joinedInside := dumpState(t, node), dumpState(t, cfg.NetnsPath)
	for device, want := range map[string]string{
		"lo egress":    "handle 0x1 flowid :2a heddle:on_loopback direct-action",
		"eth0 ingress": "handle 0x1 flowid :2a heddle:into_loopback direct-action",
	} {
		if got := run(t, cfg.NetnsPath, "tc filter show dev "+device); strings.Count(got, want) != 1 {
			t.Errorf("%s: want %q once in\n%s", device, want, got)
		}
	}
	if got := strings.Fields(sysctls()); strings.Join(got, " ") != "1 1" {
		t.Errorf("sysctls of lo: %v", got)
	}
	if got := run(t, node, "sysctl -n net.ipv4.conf.hd2a.route_localnet"); strings.TrimSpace(got) != "1" {
		t.Errorf("route_localnet of hd2a: %s", got)
	}
	if got := run(t, node, "ip route show "+model.MirrorPrefix(cfg.ID).String()); !strings.Contains(got, "via 10.99.1.2 dev hd2a proto 72 onlink") {
		t.Errorf("route: %s", got)
	}
	for dst, want := range map[netip.Prefix]string{model.MirrorPrefix(cfg.ID): "src 10.99.1.2 onlink", model.CrossingPrefix(cfg.ID): "src 10.99.1.2 onlink advmss 1390"} {
		got := run(t, node, "ip route show table "+strconv.Itoa(testTable)+" "+dst.String())
		if strings.Join(strings.Fields(got), " ") != dst.String()+" via 10.99.1.2 dev hd2a proto 72 "+want {
			t.Errorf("route of sockets without address: %s", got)
		}
	}
	// What an agent that starts again does.
	top.add(t, 0, cfg)
	in(t, node, join)
	sameState(t, node, "repeat", joinedOutside)
	sameState(t, cfg.NetnsPath, "repeat, container", joinedInside)

	// Another endpoint was in a namespace that had the path before.
	if err := LeaveOwnStack(cfg.NetnsPath, cfg.ID+1, ports); err != nil {
		t.Fatal(err)
	}
	sameState(t, cfg.NetnsPath, "another endpoint leaves", joinedInside)
	if got := strings.Fields(sysctls()); strings.Join(got, " ") != "1 1" {
		t.Errorf("sysctls of lo, after another endpoint left: %v", got)
	}
	if err := LeaveOwnStack(cfg.NetnsPath, cfg.ID, ports); err != nil {
		t.Fatal(err)
	}
	if got := strings.Fields(sysctls()); strings.Join(got, " ") != "0 0" {
		t.Errorf("sysctls of lo, after: %v", got)
	}
	chosen("left", "32768 60999")
	// A container's own choice stays.
	if err := InContainer(cfg.NetnsPath, func() error { return sysctl.Set("ipv4/ip_local_port_range", "20000\t30000") }); err != nil {
		t.Fatal(err)
	}
	in(t, node, join)
	chosen("joined with a range of its own", "20000 30000")
	if err := LeaveOwnStack(cfg.NetnsPath, cfg.ID, ports); err != nil {
		t.Fatal(err)
	}
	chosen("left with a range of its own", "20000 30000")
	in(t, node, func() error { return DelEndpoint(cfg.ID, cfg.Addrs, cfg.Table) })
	sameState(t, cfg.NetnsPath, "gone, container", fresh)
	sameState(t, node, "gone", bare)
	if err := LeaveOwnStack("/run/netns/not-there", cfg.ID, ports); err != nil {
		t.Errorf("a namespace that is gone: %v", err)
	}
}

// TestNetnsIDs: the ids of an endpoint's two namespaces stay, and lead to the other one.
func TestNetnsIDs(t *testing.T) {
	top := newTopology(t)
	top.setup(t, 0)
	cfg := top.endpoint(t, 0, 0x2a, c1)
	made, again := top.add(t, 0, cfg).IDs, top.add(t, 0, cfg).IDs
	if made != again || made.Container < 0 || made.Node < 0 {
		t.Errorf("ids %+v, then %+v", made, again)
	}
	for at, want := range map[string]struct {
		other string
		id    int
	}{cfg.NetnsPath: {top.node[0], made.Node}, top.node[0]: {cfg.NetnsPath, made.Container}} {
		in(t, at, func() error {
			f, err := os.Open(want.other)
			if err != nil {
				return err
			}
			defer f.Close()
			if id, err := netnsID(f); err != nil || id != want.id {
				t.Errorf("%s calls %s %d, want %d: %v", at, want.other, id, want.id, err)
			}
			return nil
		})
	}
}
