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

func init() {
	attacks = append(attacks,
		attack{"send into the overlay from outside", model.ProtectOverlay, "n2", strangerSends},
		attack{"pass for a container of another node", model.ProtectOverlay, "n2", nodeSpoofs},
		attack{"hide behind two VLAN tags", model.ProtectFrames, "n1", hideInVLAN},
		attack{"fill the node's neighbour table", model.ProtectFrames, "n1", floodNeighbours},
	)
}

// cameOrDropped waits until a datagram came or a node counted a reason, and gives what came.
func cameOrDropped(t *testing.T, server *lab.Peer, node, reason string, send func()) (came string) {
	before := lab.Counters(t, node)[reason]
	send()
	testutil.Eventually(t, "the datagram to come, or "+reason+" to rise", func() (bool, string) {
		came = strings.Trim(server.Must(`came()`), `"`)
		after := lab.Counters(t, node)
		return came != "" || after[reason] > before, fmt.Sprint(after)
	})
	return came
}

// strangerSends sends VXLAN from a host that is no node.
func strangerSends(t *testing.T) string {
	server, port := lab.WaitForDatagrams(t)
	stranger, n2, target := lab.Forger(t, lab.StartOutside(t)), lab.Address(t, "host", "n2/c1"), lab.Address(t, "overlay", "n2/c1")
	own := netip.MustParseAddr(lab.Address(t, "host", "n1/c1")).As4()
	own[3] = 250
	return cameOrDropped(t, server, "n2", "drop_overlay_stranger", func() {
		stranger.Must(`forge(udp(%q, 40000, %q, 4789, vxlan(%d, %q, udp(%q, 5, %q, %d, b"forged"))), %q)`, netip.AddrFrom4(own).String(), n2,
			lab.Numbers(t).VNI, n2, lab.Address(t, "overlay", "n1/c1"), target, port, n2)
	})
}

// nodeSpoofs sends VXLAN from a node, with a source of the other node's inside.
func nodeSpoofs(t *testing.T) string {
	server, port := lab.WaitForDatagrams(t)
	host, n1, n2 := lab.Forger(t, lab.StartPeer(t, "host", "n1/c1")), lab.Address(t, "host", "n1/c1"), lab.Address(t, "host", "n2/c1")
	return cameOrDropped(t, server, "n2", "drop_overlay_source", func() {
		host.Must(`forge(udp(%q, 40000, %q, 4789, vxlan(%d, %q, udp("192.0.2.77", 5, %q, %d, b"forged"))), %q)`, n1, n2,
			lab.Numbers(t).VNI, n2, lab.Address(t, "overlay", "n2/c1"), port, n2)
	})
}

// hideInVLAN sends as another container of its node, behind two tags of VLAN 0.
func hideInVLAN(t *testing.T) string {
	server, port := lab.WaitForDatagrams(t)
	p := lab.Forger(t, lab.StartPeer(t, "overlay", "n1/c1"))
	return cameOrDropped(t, server, "n1", "drop_not_ip", func() {
		p.Must(`forge_raw(b"\0\0\x81\0\0\0\x08\0" + udp(%q, 5, %q, %d, b"forged"), "eth0", %q, 0x88a8)`,
			lab.Address(t, "overlay", "n1/c2"), lab.Address(t, "overlay", "n2/c1"), port, gatewayMAC(t, p))
	})
}

// floodNeighbours asks for the gateway as somebody whom the node does not know.
func floodNeighbours(t *testing.T) (gained string) {
	p := lab.Forger(t, lab.StartPeer(t, "overlay", "n1/c1"))
	own := netip.MustParseAddr(lab.Address(t, "overlay", "n1/c1")).As4()
	own[3] = 199
	nobody := netip.AddrFrom4(own).String()
	before := lab.Counters(t, "n1")["drop_spoofed_source"]
	p.Must(`forge_raw(arp_request(%q, %q), "eth0", %q, 0x0806)`, nobody, lab.GatewayOf("n1/c1")(t), gatewayMAC(t, p))
	testutil.Eventually(t, "the node to drop it, or to know the neighbour", func() (bool, string) {
		table := lab.Shell(t, lab.Name+"-n1", "ip neigh show")
		if strings.Contains(table, nobody+" ") {
			gained = "an entry for " + nobody
		}
		return gained != "" || lab.Counters(t, "n1")["drop_spoofed_source"] > before, table
	})
	return gained
}

// gatewayMAC is the hardware address of the node as a container's neighbour table has it.
func gatewayMAC(t testing.TB, p *lab.Peer) string {
	t.Helper()
	out := p.Must(`subprocess.run(["ip", "neigh", "show", "dev", "eth0", "nud", "permanent"], capture_output=True, text=True).stdout`)
	_, rest, ok := strings.Cut(out, "lladdr ")
	if !ok {
		t.Fatalf("no hardware address of the node in %s", out)
	}
	return rest[:17]
}

// TestForgedOverlay sends what the overlay and a container's device must not carry. Each packet is
// dropped under its reason, and none reaches the listener it is for.
func TestForgedOverlay(t *testing.T) {
	server := lab.StartPeer(t, "overlay", "n2/c1")
	port := lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	server.Must(`l.setblocking(False)`)
	server.Must(`import socket as u`)
	server.Must(`d = u.socket(u.AF_INET, u.SOCK_DGRAM); d.bind(("0.0.0.0", %d)); d.setblocking(False)`, port)
	vni := lab.Numbers(t).VNI
	c1, victim := lab.Address(t, "heddle", "n1/c1"), lab.Address(t, "heddle", "n2/c1")
	other := lab.Address(t, "heddle", "n2/c2")
	n1, n2 := lab.Address(t, "host", "n1/c1"), lab.Address(t, "host", "n2/c1")
	unknown := func() string { a := netip.MustParseAddr(n1).As4(); a[3] = 250; return netip.AddrFrom4(a).String() }()
	direct := int(model.DefaultDirectPorts.First) + 5
	inside := func(src string) string { return fmt.Sprintf("udp(%q, 5, %q, %d, b'forged' * 30)", src, victim, port) }
	over := func(src string, vni int, packet string) string {
		return fmt.Sprintf("udp(%q, 40000, %q, 4789, vxlan(%d, %q, %s))", src, n2, vni, n2, packet)
	}
	send := func(packet string) string { return fmt.Sprintf("forge(%s, %q)", packet, n2) }
	cut := func(packet string, size int) string {
		return fmt.Sprintf("[forge(f, %q) for f in fragments(%s, %d)]", n2, packet, size)
	}
	plain := lab.Forger(t, lab.StartPeer(t, "overlay", "n1/c1"))
	host, stranger := lab.Forger(t, lab.StartPeer(t, "host", "n1/c1")), lab.Forger(t, lab.StartOutside(t))
	mac := gatewayMAC(t, plain)
	const strangers, sources, hidden, notIP, spoofed = "drop_overlay_stranger", "drop_overlay_source", "drop_hidden_tcp", "drop_not_ip", "drop_spoofed_source"
	for _, c := range []struct {
		name, line string
		by         *lab.Peer
		node       string
		reason     string
	}{
		{"VXLAN of a stranger", send(over(unknown, vni, inside(c1))), stranger, "n2", strangers},
		{"VXLAN of a stranger, in fragments", cut(over(unknown, vni, inside(c1)), 72), stranger, "n2", strangers},
		{"VXLAN of a stranger, in small fragments", cut(over(unknown, vni, inside(c1)), 24), stranger, "n2", sources},
		{"VXLAN of a node, from another node's container", send(over(n1, vni, inside(other))), host, "n2", sources},
		{"VXLAN of a node, from outside", send(over(n1, vni, inside("192.0.2.1"))), host, "n2", sources},
		{"ARP in VXLAN", send(fmt.Sprintf(`udp(%q, 40000, %q, 4789, vxlan(%d, %q, arp_request(%q, %q), 0x0806))`, n1, n2, vni, n2, c1, victim)), host, "n2", sources},
		{"SYN to a direct port, cut up", cut(fmt.Sprintf(`syn(%q, 33333, %q, %d)`, c1, n2, direct), 8), plain, "n1", hidden},
		{"behind two VLAN tags", fmt.Sprintf(`forge_raw(b"\0\0\x81\0\0\0\x08\0" + %s, "eth0", %q, 0x88a8)`, inside(other), mac), plain, "n1", notIP},
		{"behind one VLAN tag", fmt.Sprintf(`forge_raw(b"\0\0\x08\0" + %s, "eth0", %q, 0x8100)`, inside(other), mac), plain, "n1", notIP},
		{"ARP for the gateway's address", fmt.Sprintf(`forge_raw(arp_request(%q, %q), "eth0", %q, 0x0806)`, lab.GatewayOf("n1/c1")(t), c1, mac), plain, "n1", spoofed},
		{"ARP for an address of nobody's", fmt.Sprintf(`forge_raw(arp_request("10.99.0.1", %q), "eth0", %q, 0x0806)`, lab.GatewayOf("n1/c1")(t), mac), plain, "n1", spoofed},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := lab.Counters(t, c.node)[c.reason]
			c.by.In(t).Must("%s", c.line)
			testutil.Eventually(t, c.reason+" of "+c.node+" to rise", func() (bool, string) {
				after := lab.Counters(t, c.node)
				return after[c.reason] > before, fmt.Sprint(after)
			})
			server.In(t).Expect(`"EAGAIN"`, `error_of(l.accept)`)
			server.In(t).Expect(`"EAGAIN"`, `error_of(d.recv, 1000)`)
		})
	}
	t.Run("a node may", func(t *testing.T) { // the socket is not deaf, and the packets are well made
		host.In(t).Must("%s", send(over(n1, vni, inside(c1))))
		server.In(t).Must(`d.setblocking(True)`)
		server.In(t).Must(`d.recv(1000)`)
		host.In(t).Must("%s", cut(over(n1, vni, inside(c1)), 72))
		server.In(t).Must(`d.recv(1000)`)
	})
	t.Run("SYN option in the overlay", func(t *testing.T) {
		// Steering is for the underlay's device: here nothing listens at the direct port.
		before := lab.Counters(t, "n2")
		option := fmt.Sprintf("heddle_option(%d, %q, %q, %d)", lab.Numbers(t).ID, c1, victim, port)
		host.In(t).Must("%s", send(over(n1, vni, fmt.Sprintf("syn(%q, 33333, %q, %d, %s)", c1, n2, direct, option))))
		host.In(t).Must("%s", send(over(n1, vni, inside(c1))))
		server.In(t).Must(`d.recv(1000)`) // what came behind it has come
		after := lab.Counters(t, "n2")
		for _, reason := range []string{"relay_opened", "accept_direct", "accept_local"} {
			if after[reason] != before[reason] {
				t.Errorf("%s rose", reason)
			}
		}
		server.In(t).Must(`l.setblocking(False)`)
		server.In(t).Expect(`"EAGAIN"`, `error_of(l.accept)`)
	})
	t.Run("a container may ask for its gateway", func(t *testing.T) {
		plain.In(t).Must(`forge_raw(arp_request(%q, %q), "eth0", %q, 0x0806)`, c1, lab.GatewayOf("n1/c1")(t), mac)
		lab.MustRun(t, "overlay", "n1/c1", "ping", "-c1", "-W5", victim)
	})
}

// TestStrangersOnOtherDevices: what the program of the underlay device does not see, the packet
// filter does.
func TestStrangersOnOtherDevices(t *testing.T) {
	n2, vni := lab.Address(t, "host", "n2/c1"), lab.Numbers(t).VNI
	host := lab.Forger(t, lab.StartPeer(t, "host", "n2/c1"))
	before := lab.Counters(t, "n2")["drop_overlay_stranger"]
	// By lo, and from the node's own address, which no other node has.
	host.Must(`forge(udp(%q, 40000, %q, 4789, vxlan(%d, %q, udp("10.9.9.9", 5, %q, 6, b"x"))), %[2]q)`, n2, n2, vni, n2, lab.Address(t, "heddle", "n2/c1"))
	testutil.Eventually(t, "drop_overlay_stranger to rise", func() (bool, string) {
		after := lab.Counters(t, "n2")
		return after["drop_overlay_stranger"] > before, fmt.Sprint(after)
	})
}
