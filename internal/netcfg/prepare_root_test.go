package netcfg

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netns"
)

// TestPrepareEndpoint does what an engine does between PrepareEndpoint and AddEndpoint, step by
// step.
func TestPrepareEndpoint(t *testing.T) {
	top := newTopology(t)
	top.setup(t, 0)
	node := top.node[0]
	cfg := top.endpoint(t, 0, 0x2a, c1)
	bare, fresh := dumpState(t, node), dumpState(t, cfg.NetnsPath)
	ready := func(cfg EndpointConfig) (ok bool) {
		t.Helper()
		in(t, node, func() (err error) {
			ok, err = EngineDone(cfg)
			return err
		})
		return ok
	}
	container := cfg.NetnsPath
	early := cfg
	early.NetnsPath = "/run/netns/not-there"
	in(t, node, func() error {
		w, err := PrepareEndpoint(early)
		if err == nil && (w.Device != "hc2a" || w.MTU == 0 || w.Ifindex == 0) {
			t.Errorf("waiting %+v", w)
		}
		return err
	})
	mustFail(t, node, func() error { _, err := PrepareEndpoint(early); return err }, "hd2a", "already")
	if ready(early) {
		t.Error("ready in a namespace that is not there")
	}
	gw := gateways(prefixes[:1])[0].String()
	for _, step := range []struct{ ns, commands string }{
		{node, "ip link set hc2a netns " + strings.TrimPrefix(container, "/run/netns/")},
		{container, "ip link set hc2a name eth0"},
		{container, "ip addr add " + c1.String() + "/32 dev eth0\nip link set eth0 up"},
		{container, "ip route add " + gw + " dev eth0 scope link"},
		{container, "ip route add default via " + gw + " dev eth0"},
	} {
		if ready(cfg) {
			t.Errorf("ready before %q", step.commands)
		}
		run(t, step.ns, step.commands)
	}
	if !ready(cfg) {
		t.Fatal("not ready when the engine has done all")
	}
	// The container is reached, as one that is not intercepted, before the rest is done.
	if err := ping(container, gateways(prefixes[:1])[0]); err != nil {
		t.Errorf("ping the gateway: %v", err)
	}
	mustFail(t, node, func() error { _, err := AddEndpoint(cfg); return err }, "not Heddle's")
	cfg.Adopt = true
	top.add(t, 0, cfg)
	adoptedOutside, adopted := dumpState(t, node), dumpState(t, container)
	cfg.Adopt = false // its routes are Heddle's now
	top.add(t, 0, cfg)
	sameState(t, node, "repeat", adoptedOutside)
	sameState(t, container, "repeat, container", adopted)
	in(t, node, func() error { return DelEndpoint(cfg.ID, cfg.Addrs, cfg.Table) })
	sameState(t, node, "gone", bare)
	sameState(t, container, "gone, container", fresh)
}

// TestPrepareTakenBack: an endpoint whose container never comes leaves nothing.
func TestPrepareTakenBack(t *testing.T) {
	top := newTopology(t)
	top.setup(t, 0)
	cfg := top.endpoint(t, 0, 0x2a, c1)
	before := dumpState(t, top.node[0])
	in(t, top.node[0], func() error { _, err := PrepareEndpoint(cfg); return err })
	in(t, top.node[0], func() error { return DelEndpoint(cfg.ID, cfg.Addrs, cfg.Table) })
	sameState(t, top.node[0], "taken back", before)
}

func TestResolverPort(t *testing.T) {
	container := newNetns(t)
	listen := func(at string) (port uint16) {
		in(t, container, func() error {
			l, err := net.Listen("tcp", at)
			if err != nil {
				return err
			}
			t.Cleanup(func() { l.Close() })
			port = netip.MustParseAddrPort(l.Addr().String()).Port()
			return nil
		})
		return port
	}
	expect := func(want uint16) {
		t.Helper()
		if got, err := ResolverPort(container); got != want || err != nil {
			t.Errorf("ResolverPort = %d, %v; want %d", got, err, want)
		}
	}
	listen("127.0.0.1:0")
	expect(0)
	expect(listen("127.0.0.11:0"))
	listen("127.0.0.11:0") // which of two is the resolver cannot be told
	expect(0)
	if _, err := ResolverPort("/run/netns/not-there"); err == nil {
		t.Error("no error for a namespace that is not there")
	}
}

// TestGuardComesFirst: what guards an endpoint is attached while its container cannot send, so that
// an agent killed at any moment leaves no device unguarded; and no device is left if it cannot be
// attached.
func TestGuardComesFirst(t *testing.T) {
	top := newTopology(t)
	top.setup(t, 0)
	node := top.node[0]
	cfg := top.endpoint(t, 0, 1, c1)
	before := dumpState(t, node)
	guarded := 0
	cfg.Guard = func(ifindex int) error {
		guarded++
		if host, err := net.InterfaceByIndex(ifindex); err != nil || host.Name != netdev.EndpointName(cfg.ID) {
			t.Errorf("guard of device %d, %v: %v; want %s", ifindex, host, err, netdev.EndpointName(cfg.ID))
		}
		return netns.Do(cfg.NetnsPath, func() error {
			inside, err := net.InterfaceByName(model.DefaultDevice)
			if err == nil && guarded == 1 && inside.Flags&net.FlagUp != 0 {
				t.Error("the container's device is up before its guard")
			}
			return err
		})
	}
	top.add(t, 0, cfg)
	top.add(t, 0, cfg)
	if guarded != 2 {
		t.Errorf("guarded %d times; want at each of two calls: the programs may be new", guarded)
	}
	in(t, node, func() error { return DelEndpoint(cfg.ID, cfg.Addrs, cfg.Table) })
	cfg.Guard = func(int) error { return errors.New("no programs") }
	mustFail(t, node, func() error { _, err := AddEndpoint(cfg); return err }, "guard", "no programs")
	sameState(t, node, "guard that failed", before)
}
