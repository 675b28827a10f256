package netcfg

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestMoved has an address of n2's prefix live on n1: it is reached there from both nodes, reaches
// the outside with n1's address, and leaves nothing behind when it goes.
func TestMoved(t *testing.T) {
	top, cfgs := whole(t)
	moved := netip.MustParseAddr("10.99.2.7")
	before := []string{dumpState(t, top.node[0]), dumpState(t, top.node[1])}
	setPeers := func(here ...netip.Addr) {
		for i := range top.node {
			nodes := top.nodes()
			nodes[0].Moved = here
			in(t, top.node[i], func() error { return setPeers(top.devs[i], nodes[i].Name, nodes) })
		}
	}
	setPeers(moved)
	for i, from := range []string{top.node[0], cfgs[0].NetnsPath, top.node[1], cfgs[2].NetnsPath} {
		if _, err := dialFrom(from, "tcp", netip.AddrPortFrom(moved, 80), nil, nil); !errors.Is(err, unix.EHOSTUNREACH) {
			t.Errorf("%d, before an endpoint has it: %v, want EHOSTUNREACH", i, err)
		}
	}
	cfg := top.endpoint(t, 0, 9, moved)
	top.add(t, 0, cfg)
	after := dumpState(t, top.node[0])
	setPeers(moved)
	sameState(t, top.node[0], "repeat", after)
	in(t, top.node[0], func() (err error) { // as the next agent does; its SetPeers comes later
		top.devs[0], err = SetupNode(nodeConfig(0))
		return err
	})
	sameState(t, top.node[0], "set up again", after)
	for _, want := range []string{"elements = { 10.99.2.7 }", "chain moved"} {
		if !strings.Contains(after, want) {
			t.Errorf("no %q in:\n%s", want, after)
		}
	}
	for _, from := range []string{top.node[0], cfgs[0].NetnsPath, top.node[1], cfgs[2].NetnsPath} {
		if err := ping(from, moved); err != nil {
			t.Errorf("from %s: %v", from, err)
		}
	}
	for at, seen := range map[netip.Addr]string{c3: moved.String(), c1: moved.String(), ext: "203.0.113.1"} {
		ns := map[netip.Addr]string{c3: cfgs[2].NetnsPath, c1: cfgs[0].NetnsPath, ext: top.ext}[at]
		tcp, _ := serve(t, ns, at, nil)
		if got, err := seenAs(cfg.NetnsPath, "tcp", tcp, nil, nil); err != nil || got != seen {
			t.Errorf("to %s: seen as %q, want %s: %v", at, got, seen, err)
		}
	}
	in(t, top.node[0], func() error { return DelEndpoint(cfg.ID, cfg.Addrs, cfg.Table) })
	setPeers()
	for i, want := range before {
		sameState(t, top.node[i], "moved back", want)
	}
}
