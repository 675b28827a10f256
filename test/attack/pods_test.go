package attack

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// mirrorOf gives the mirror addresses of a container, which its node routes to its device: those of
// 127.0.0.0/24.
func mirrorOf(t testing.TB, container string) func(slot int) string {
	t.Helper()
	node, _, _ := strings.Cut(container, "/")
	via := " via " + lab.Address(t, "overlay", container) + " "
	for line := range strings.Lines(lab.MustRun(t, "host", node+"/c1", "ip", "route")) {
		if strings.Contains(line, via) && strings.HasPrefix(line, "250.") {
			base := netip.MustParsePrefix(strings.Fields(line)[0]).Addr().As4()
			return func(slot int) string {
				return netip.AddrFrom4([4]byte{base[0], base[1], base[2] + byte(slot>>8), byte(slot)}).String()
			}
		}
	}
	t.Fatalf("%s has no route to mirror addresses of %s", node, container)
	return nil
}

// aliasOf gives the node's address for 127.0.0.1 of the container with these mirror addresses.
func aliasOf(t testing.TB, mirror func(int) string) string {
	t.Helper()
	for id := range model.EndpointID(64) {
		if model.MirrorPrefix(id).Contains(netip.MustParseAddr(mirror(1))) {
			return model.LoopbackAlias(id, netip.MustParseAddr("127.0.0.1")).String()
		}
	}
	t.Fatal("no endpoint has mirror address " + mirror(1))
	return ""
}

// TestForgedLoopback sends to one container's loopback, and as one, from everywhere else: other
// containers, the overlay, the underlay and the node. Nothing may reach a listener.
func TestForgedLoopback(t *testing.T) {
	intercepted, plain := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "overlay", "n1/c1")
	port, plainPort := lab.FreePort(), lab.FreePort()
	intercepted.Must(`l = listen(6, "::", %d)`, port)
	plain.Must(`l = listen(6, "::", %d)`, plainPort)
	node := lab.Forger(t, lab.StartPeer(t, "host", "n1/c1"))
	node.Must(`l = listen(4, "127.0.0.1", %d)`, lab.FreePort())
	nodePort := node.PortOf("l")
	listeners := []*lab.Peer{intercepted, plain, node}
	for _, p := range listeners {
		p.Must(`l.setblocking(False)`)
	}
	mirror, otherMirror := mirrorOf(t, "n1/c1"), mirrorOf(t, "n1/c2")
	alias, own, other := aliasOf(t, mirror), lab.Address(t, "overlay", "n1/c1"), lab.Address(t, "overlay", "n1/c2")
	self, neighbour := lab.Forger(t, plain), lab.Forger(t, lab.StartPeer(t, "overlay", "n1/c2"))
	remote := lab.Forger(t, lab.StartPeer(t, "host", "n2/c1"))
	frame := func(src, dst string, port int, device, mac string) string {
		return fmt.Sprintf(`forge_frame(syn(%q, 40000, %q, %d), %q, %q)`, src, dst, port, device, mac)
	}
	hardware := strings.Trim(node.Must(`hardware_address("eth0").hex()`), `"`)
	device := func(p *lab.Peer) string { // of the node, as the container's neighbour table has it
		fields := strings.Fields(strings.Trim(p.Must(`subprocess.run(["ip", "neigh", "show", "dev", "eth0", "nud", "permanent"], capture_output=True, text=True).stdout`), `"`))
		for i, f := range fields {
			if f == "lladdr" {
				return fields[i+1][:17]
			}
		}
		t.Fatalf("no hardware address of the node in %v", fields)
		return ""
	}
	const forged, spoofed = "drop_forged_loopback", "drop_spoofed_source"
	for _, c := range []struct {
		name, line string
		by         *lab.Peer
		reason     string // "" if the packet is dropped by a rule that does not count
	}{
		{"the node's loopback, from a container", frame(own, "127.0.0.1", int(nodePort), "eth0", device(self)), self, forged},
		{"the node's loopback, as a mirror address", frame(mirror(1), "127.0.0.1", int(nodePort), "eth0", device(self)), self, forged},
		{"an alias, from the own address", frame(own, alias, port, "eth0", device(self)), self, forged},
		{"a neighbour's alias", frame(other, alias, port, "eth0", device(neighbour)), neighbour, forged},
		{"a neighbour's alias, as a mirror address", frame(otherMirror(1), alias, port, "eth0", device(neighbour)), neighbour, forged},
		{"a neighbour's address, as its mirror address", frame(mirror(1), own, port, "eth0", device(neighbour)), neighbour, forged},
		{"a neighbour's alias, as its mirror address", frame(mirror(1), alias, port, "eth0", device(neighbour)), neighbour, forged},
		{"a neighbour's address, as one's own mirror address", frame(otherMirror(1), own, port, "eth0", device(neighbour)), neighbour, forged},
		{"a neighbour's mirror address", frame(other, mirror(1), plainPort, "eth0", device(neighbour)), neighbour, forged},
		{"a neighbour's mirror address, as its alias", frame(alias, mirror(1), plainPort, "eth0", device(neighbour)), neighbour, forged},
		{"loopback as source", frame("127.0.0.1", own, port, "eth0", device(neighbour)), neighbour, spoofed},
		{"a crossing address", frame(own, mirror(256), port, "eth0", device(self)), self, forged},
		{"as a crossing address", frame(mirror(256), own, port, "eth0", device(self)), self, forged},
		{"over the overlay, as a mirror address", fmt.Sprintf(`forge(syn(%q, 40000, %q, %d), %[2]q)`, mirror(1), own, port), remote, "drop_overlay_source"},
		{"over the underlay, as a mirror address", frame(mirror(1), own, port, "eth0", hardware), remote, ""},
		{"over the underlay, a mirror address", frame(lab.Address(t, "host", "n2/c1"), mirror(1), plainPort, "eth0", hardware), remote, forged},
		{"a node process", fmt.Sprintf(`[globals().update(s=tcp(4)), s.setblocking(False), s.connect_ex((%q, %d))][2]`, mirror(1), plainPort), node, forged},
		{"a node process, to a crossing address", fmt.Sprintf(`[globals().update(s=tcp(4)), s.setblocking(False), s.connect_ex((%q, %d))][2]`, mirror(256), plainPort), node, forged},
		{"a node process, from an alias", fmt.Sprintf(`[globals().update(s=tcp(4)), s.bind((%q, 0)), s.setblocking(False), s.connect_ex((%q, %d))][3]`, alias, mirror(1), plainPort), node, forged},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := lab.Counters(t, "n1")[c.reason]
			c.by.In(t).Must("%s", c.line)
			if c.reason != "" {
				testutil.Eventually(t, c.reason+" to rise", func() (bool, string) {
					after := lab.Counters(t, "n1")
					return after[c.reason] > before, fmt.Sprint(after)
				})
			}
			for _, p := range listeners {
				p.In(t).Expect(`"EAGAIN"`, `error_of(l.accept)`)
			}
		})
	}
	t.Run("an intercepted neighbour", func(t *testing.T) {
		p := lab.StartPeer(t, "heddle", "n1/c2")
		for _, target := range []string{mirror(1), mirror(254), mirror(256), otherMirror(1), otherMirror(256)} {
			p.Expect(`{"error": "EHOSTUNREACH"}`, `connect(4, %q, %d)`, target, plainPort)
		}
	})
	t.Run("the container itself may", func(t *testing.T) {
		self.In(t).Must(`s = connect(4, "127.0.0.1", %d)`, port)
		intercepted.In(t).Must(`s = connect(4, "127.0.0.1", %d)`, plainPort)
		for _, p := range []*lab.Peer{intercepted, plain} {
			p.In(t).Must(`select.select([l], [], [], 5)[0] and l.accept()`)
		}
	})
}

// TestForgedLoopbackIPv6: a packet from the own address to the own address, which is how a node's
// socket reaches a listener on ::1, is believed of nobody else.
func TestForgedLoopbackIPv6(t *testing.T) {
	owner, remote, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.Forger(t, lab.StartPeer(t, "host", "n2/c1")), lab.FreePort()
	owner.Must(`l = listen(6, "::1", %d)`, port)
	own, before := lab.Overlay6(t, "n1/c1"), lab.Counters(t, "n1")["deliver_overlay"]
	const forged = 40
	remote.Must(`[forge6(syn6(%q, 40000 + i, %[1]q, %[2]d), %[1]q) for i in range(%[3]d)]`, own, port, forged)
	// What comes behind them on the same way has arrived, so they have.
	after := lab.FreePort()
	owner.Must(`m = listen(6, "::", %d)`, after)
	remote.Must(`s = connect(6, %q, %d)`, own, after)
	if n := lab.Counters(t, "n1")["deliver_overlay"] - before; n == 0 || n >= forged {
		t.Errorf("%d packets from the overlay were given to node sockets: want those of the one connection, not %d forged ones", n, forged)
	}
}
