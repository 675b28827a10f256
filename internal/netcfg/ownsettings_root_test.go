package netcfg

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/netcfg/sysctl"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

func rmemOf(t *testing.T, ns string) (value string) {
	in(t, ns, func() (err error) {
		value, err = sysctl.Get("ipv4/tcp_rmem")
		return err
	})
	return strings.Join(strings.Fields(value), " ")
}

// TestFollowOwnStack: a container's stack has what it is given and then what a new one has, routes
// that it gets later have it when it is looked at again, and what somebody set stays his.
func TestFollowOwnStack(t *testing.T) {
	testutil.NeedRoot(t, "it makes network namespaces")
	ns := newNetns(t)
	follow := func(had, want map[string]string) Kept {
		t.Helper()
		kept, err := FollowOwnStack(ns, "eth0", had, want)
		testutil.NoError(t, err)
		return kept
	}
	rmem := func() string { return rmemOf(t, ns) }
	setRmem := func(value string) { in(t, ns, func() error { return sysctl.Set("ipv4/tcp_rmem", value) }) }
	routes := func() string { return run(t, ns, "ip route") + run(t, ns, "ip -6 route") }
	usual := rmem()
	first := map[string]string{"ipv4/tcp_rmem": "4096 9000 9000", RouteCongestion: "reno", RouteWindow: "33"}
	if kept := follow(nil, first); len(kept) != 0 || rmem() != "4096 9000 9000" {
		t.Errorf("kept %v, tcp_rmem %s", kept, rmem())
	}
	run(t, ns, `ip link add eth0 type veth peer name other0
ip link set other0 up
ip link set eth0 up
ip addr add 10.9.0.1/24 dev eth0
ip -6 addr add fd00:9::1/64 dev eth0 nodad
ip route add default via 10.9.0.2
ip route add 10.8.0.0/16 via 10.9.0.2 congctl cubic initcwnd 7`)
	kept := follow(first, first)
	if want := (Kept{RouteCongestion: "cubic", RouteWindow: "7"}); !maps.Equal(kept, want) {
		t.Errorf("kept %v, want %v", kept, want)
	}
	if n := strings.Count(routes(), "initcwnd 33 congctl reno"); n < 3 {
		t.Errorf("%d routes of at least 3 have it:\n%s", n, routes())
	}
	second := map[string]string{"ipv4/tcp_rmem": "4096 9002 9002", RouteCongestion: "cubic"}
	follow(first, second)
	if out := routes(); strings.Contains(out, "reno") || strings.Contains(out, "initcwnd 33") || !strings.Contains(out, "initcwnd 7 congctl cubic") || rmem() != "4096 9002 9002" {
		t.Errorf("tcp_rmem %s\n%s", rmem(), out)
	}
	// Its root changes it: that is his, until he takes it back.
	setRmem("4096 8000 8000")
	if kept := follow(second, first); kept["ipv4/tcp_rmem"] != "4096 8000 8000" || rmem() != "4096 8000 8000" {
		t.Errorf("kept %v, tcp_rmem %s", kept, rmem())
	}
	if follow(first, nil); rmem() != "4096 8000 8000" {
		t.Errorf("without a profile tcp_rmem is %s", rmem())
	}
	setRmem(usual)
	follow(nil, second)
	if follow(second, nil); rmem() != usual || strings.Contains(routes(), "initcwnd 33") {
		t.Errorf("tcp_rmem %s, before %s\n%s", rmem(), usual, routes())
	}
	// A container may have more routes than anybody should go through.
	for i := range 70 {
		run(t, ns, fmt.Sprintf("ip route add 10.20.%d.0/24 via 10.9.0.2", i))
	}
	if _, err := FollowOwnStack(ns, "eth0", nil, second); err == nil || !strings.Contains(err.Error(), "more than 64") || strings.Contains(run(t, ns, "ip route"), "10.20.1.0/24 via 10.9.0.2 congctl") {
		t.Errorf("with 70 routes more: %v", err)
	}
	if _, err := FollowOwnStack(netns.Path("none"), "eth0", nil, second); !errors.Is(err, ErrNoContainer) {
		t.Errorf("a container that is gone: %v", err)
	}
}
