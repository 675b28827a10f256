package netcfg

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/firewall"
)

// TestPublished has a port of a node lead to a container: from outside, from another node and from
// the node, which see it at the address that was named only; set up again it stays, and it leaves
// nothing behind.
func TestPublished(t *testing.T) {
	top, cfgs := whole(t)
	before := dumpState(t, top.node[0])
	underlay := nodeConfig(0).Underlay
	server, _ := serve(t, cfgs[0].NetnsPath, c1, nil)
	at := netip.AddrPortFrom(underlay, 8080)
	ports := []firewall.Published{{PublishedPort: model.PublishedPort{HostPort: 8080, Port: server.Port(), Protocol: model.PortTCP}, To: cfgs[0].Addrs}}
	set := func(ports []firewall.Published) {
		t.Helper()
		in(t, top.node[0], func() error { return top.devs[0].Firewall.SetPublished(ports) })
	}
	reached := func(at netip.AddrPort, want error) {
		t.Helper()
		for _, from := range []string{top.node[1], top.node[0]} {
			_, err := dialFrom(from, "tcp", at, nil, nil)
			if (want == nil) != (err == nil) || want != nil && !errors.Is(err, want) {
				t.Errorf("%s from %s: %v, want %v", at, from, err, want)
			}
		}
	}
	reached(at, unix.ECONNREFUSED)
	set(ports)
	after := dumpState(t, top.node[0])
	for _, want := range []string{"chain published-in", "0.0.0.0 . tcp . 8080 : " + c1.String()} {
		if !strings.Contains(after, want) {
			t.Errorf("no %q in:\n%s", want, after)
		}
	}
	reached(at, nil)
	elsewhere := netip.MustParseAddrPort("203.0.113.1:8080") // another address of the node's
	if got, err := seenAs(top.ext, "tcp", elsewhere, nil, nil); err != nil || got != ext.String() {
		t.Errorf("from outside: seen as %q, want %s: %v", got, ext, err)
	}
	set(ports)
	sameState(t, top.node[0], "repeat", after)
	cfg := nodeConfig(0)
	cfg.Published = ports // as the next agent knows them
	in(t, top.node[0], func() (err error) {
		top.devs[0], err = SetupNode(cfg)
		return err
	})
	sameState(t, top.node[0], "set up again", after)
	reached(at, nil)

	ports[0].HostAddr = netip.MustParseAddr("127.0.0.1")
	set(ports)
	reached(at, unix.ECONNREFUSED)
	ports[0].HostAddr = underlay
	set(ports)
	reached(at, nil)
	set(nil)
	reached(at, unix.ECONNREFUSED)
	sameState(t, top.node[0], "withdrawn", before)
}

// TestCheckPort: a port of a process of the node is taken, one of a container is not.
func TestCheckPort(t *testing.T) {
	top, _ := whole(t)
	underlay := nodeConfig(0).Underlay
	taken, _ := serve(t, top.node[0], underlay, nil)
	for _, c := range []struct {
		addr       string
		port       uint16
		protocol   string
		containers string // prefix
		want       error
	}{
		{"", taken.Port(), model.PortTCP, "192.0.2.0/24", ErrPortTaken},
		{"0.0.0.0", taken.Port(), model.PortTCP, "192.0.2.0/24", ErrPortTaken},
		{underlay.String(), taken.Port(), model.PortTCP, "192.0.2.0/24", ErrPortTaken},
		{"::", taken.Port(), model.PortTCP, "192.0.2.0/24", nil},
		{"127.0.0.1", taken.Port(), model.PortTCP, "192.0.2.0/24", nil},
		{"", taken.Port(), model.PortTCP, underlay.String() + "/32", nil}, // as a container's
		{"", 9, model.PortUDP, "192.0.2.0/24", nil},
		{"", DefaultVXLANPort, model.PortUDP, "192.0.2.0/24", ErrPortTaken}, // the kernel's own
		{"192.0.2.77", 9, model.PortTCP, "192.0.2.0/24", ErrNotLocal},
	} {
		p := model.PublishedPort{HostPort: c.port, Port: 80, Protocol: c.protocol}
		if c.addr != "" {
			p.HostAddr = netip.MustParseAddr(c.addr)
		}
		in(t, top.node[0], func() error {
			if err := CheckPort(p, []netip.Prefix{netip.MustParsePrefix(c.containers)}); !errors.Is(err, c.want) {
				t.Errorf("%s, containers at %s: %v, want %v", p, c.containers, err, c.want)
			}
			return nil
		})
	}
}
