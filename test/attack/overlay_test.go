package test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func init() {
	attacks = append(attacks,
		attack{"send into the overlay from outside", model.ProtectOverlay, "n2", strangerSends},
		attack{"pass for a container of another node", model.ProtectOverlay, "n2", nodeSpoofs},
		attack{"hide behind two VLAN tags", model.ProtectFrames, "n1", hideInVLAN},
		attack{"fill the node's neighbour table", model.ProtectFrames, "n1", floodNeighbours},
	)
}

// waitForDatagrams is a peer in n2/c1 that waits for datagrams at a port of its own stack.
func waitForDatagrams(t *testing.T) (p *peer, port int) {
	p, port = startPeer(t, "overlay", "n2/c1"), freePort()
	p.must(`d = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
	p.must(`d.bind(("0.0.0.0", %d))`, port)
	p.must(`d.setblocking(False)`)
	p.must(`def came():
    try: return d.recv(1000)[:6].decode()
    except OSError: return ""`)
	return p, port
}

// cameOrDropped waits until a datagram came or a node counted a reason, and gives what came.
func cameOrDropped(t *testing.T, server *peer, node, reason string, send func()) (came string) {
	before := counters(t, node)[reason]
	send()
	eventually(t, "the datagram to come, or "+reason+" to rise", func() (bool, string) {
		came = strings.Trim(server.must(`came()`), `"`)
		after := counters(t, node)
		return came != "" || after[reason] > before, fmt.Sprint(after)
	})
	return came
}

// strangerSends sends VXLAN from a host that is no node.
func strangerSends(t *testing.T) string {
	server, port := waitForDatagrams(t)
	stranger, n2, target := forger(t, startOutside(t)), address(t, "host", "n2/c1"), address(t, "overlay", "n2/c1")
	own := netip.MustParseAddr(address(t, "host", "n1/c1")).As4()
	own[3] = 250
	return cameOrDropped(t, server, "n2", "drop_overlay_stranger", func() {
		stranger.must(`forge(udp(%q, 40000, %q, 4789, vxlan(%d, %q, udp(%q, 5, %q, %d, b"forged"))), %q)`, netip.AddrFrom4(own).String(), n2,
			labNetwork(t).VNI, n2, address(t, "overlay", "n1/c1"), target, port, n2)
	})
}

// nodeSpoofs sends VXLAN from a node, with a source of the other node's inside.
func nodeSpoofs(t *testing.T) string {
	server, port := waitForDatagrams(t)
	host, n1, n2 := forger(t, startPeer(t, "host", "n1/c1")), address(t, "host", "n1/c1"), address(t, "host", "n2/c1")
	return cameOrDropped(t, server, "n2", "drop_overlay_source", func() {
		host.must(`forge(udp(%q, 40000, %q, 4789, vxlan(%d, %q, udp("192.0.2.77", 5, %q, %d, b"forged"))), %q)`, n1, n2,
			labNetwork(t).VNI, n2, address(t, "overlay", "n2/c1"), port, n2)
	})
}

// hideInVLAN sends as another container of its node, behind two tags of VLAN 0.
func hideInVLAN(t *testing.T) string {
	server, port := waitForDatagrams(t)
	p := forger(t, startPeer(t, "overlay", "n1/c1"))
	return cameOrDropped(t, server, "n1", "drop_not_ip", func() {
		p.must(`forge_raw(b"\0\0\x81\0\0\0\x08\0" + udp(%q, 5, %q, %d, b"forged"), "eth0", %q, 0x88a8)`,
			address(t, "overlay", "n1/c2"), address(t, "overlay", "n2/c1"), port, gatewayMAC(t, p))
	})
}

// floodNeighbours asks for the gateway as somebody whom the node does not know.
func floodNeighbours(t *testing.T) (gained string) {
	p := forger(t, startPeer(t, "overlay", "n1/c1"))
	own := netip.MustParseAddr(address(t, "overlay", "n1/c1")).As4()
	own[3] = 199
	nobody := netip.AddrFrom4(own).String()
	before := counters(t, "n1")["drop_spoofed_source"]
	p.must(`forge_raw(arp_request(%q, %q), "eth0", %q, 0x0806)`, nobody, gatewayOf("n1/c1")(t), gatewayMAC(t, p))
	eventually(t, "the node to drop it, or to know the neighbour", func() (bool, string) {
		table := sh(t, labName+"-n1", "ip neigh show")
		if strings.Contains(table, nobody+" ") {
			gained = "an entry for " + nobody
		}
		return gained != "" || counters(t, "n1")["drop_spoofed_source"] > before, table
	})
	return gained
}

// gatewayMAC is the hardware address of the node as a container's neighbour table has it.
func gatewayMAC(t testing.TB, p *peer) string {
	t.Helper()
	out := p.must(`subprocess.run(["ip", "neigh", "show", "dev", "eth0", "nud", "permanent"], capture_output=True, text=True).stdout`)
	_, rest, ok := strings.Cut(out, "lladdr ")
	if !ok {
		t.Fatalf("no hardware address of the node in %s", out)
	}
	return rest[:17]
}

// TestForgedOverlay sends what the overlay and a container's device must not carry. Each packet is dropped under its
// reason, and none reaches the listener it is for.
func TestForgedOverlay(t *testing.T) {
	server := startPeer(t, "overlay", "n2/c1")
	port := freePort()
	server.must(`l = listen(4, "0.0.0.0", %d)`, port)
	server.must(`l.setblocking(False)`)
	server.must(`import socket as u`)
	server.must(`d = u.socket(u.AF_INET, u.SOCK_DGRAM); d.bind(("0.0.0.0", %d)); d.setblocking(False)`, port)
	vni := labNetwork(t).VNI
	c1, victim := address(t, "heddle", "n1/c1"), address(t, "heddle", "n2/c1")
	other := address(t, "heddle", "n2/c2")
	n1, n2 := address(t, "host", "n1/c1"), address(t, "host", "n2/c1")
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
	plain := forger(t, startPeer(t, "overlay", "n1/c1"))
	host, stranger := forger(t, startPeer(t, "host", "n1/c1")), forger(t, startOutside(t))
	mac := gatewayMAC(t, plain)
	const strangers, sources, hidden, notIP, spoofed = "drop_overlay_stranger", "drop_overlay_source", "drop_hidden_tcp", "drop_not_ip", "drop_spoofed_source"
	for _, c := range []struct {
		name, line string
		by         *peer
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
		{"ARP for the gateway's address", fmt.Sprintf(`forge_raw(arp_request(%q, %q), "eth0", %q, 0x0806)`, gatewayOf("n1/c1")(t), c1, mac), plain, "n1", spoofed},
		{"ARP for an address of nobody's", fmt.Sprintf(`forge_raw(arp_request("10.99.0.1", %q), "eth0", %q, 0x0806)`, gatewayOf("n1/c1")(t), mac), plain, "n1", spoofed},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := counters(t, c.node)[c.reason]
			c.by.in(t).must("%s", c.line)
			eventually(t, c.reason+" of "+c.node+" to rise", func() (bool, string) {
				after := counters(t, c.node)
				return after[c.reason] > before, fmt.Sprint(after)
			})
			server.in(t).expect(`"EAGAIN"`, `error_of(l.accept)`)
			server.in(t).expect(`"EAGAIN"`, `error_of(d.recv, 1000)`)
		})
	}
	t.Run("a node may", func(t *testing.T) { // the socket is not deaf, and the packets are well made
		host.in(t).must("%s", send(over(n1, vni, inside(c1))))
		server.in(t).must(`d.setblocking(True)`)
		server.in(t).must(`d.recv(1000)`)
		host.in(t).must("%s", cut(over(n1, vni, inside(c1)), 72))
		server.in(t).must(`d.recv(1000)`)
	})
	t.Run("SYN option in the overlay", func(t *testing.T) {
		// Steering is for the underlay's device: here nothing listens at the direct port.
		before := counters(t, "n2")
		option := fmt.Sprintf("heddle_option(%d, %q, %q, %d)", labNetwork(t).ID, c1, victim, port)
		host.in(t).must("%s", send(over(n1, vni, fmt.Sprintf("syn(%q, 33333, %q, %d, %s)", c1, n2, direct, option))))
		host.in(t).must("%s", send(over(n1, vni, inside(c1))))
		server.in(t).must(`d.recv(1000)`) // what came behind it has come
		after := counters(t, "n2")
		for _, reason := range []string{"relay_opened", "accept_direct", "accept_local"} {
			if after[reason] != before[reason] {
				t.Errorf("%s rose", reason)
			}
		}
		server.in(t).must(`l.setblocking(False)`)
		server.in(t).expect(`"EAGAIN"`, `error_of(l.accept)`)
	})
	t.Run("a container may ask for its gateway", func(t *testing.T) {
		plain.in(t).must(`forge_raw(arp_request(%q, %q), "eth0", %q, 0x0806)`, c1, gatewayOf("n1/c1")(t), mac)
		mustRun(t, "overlay", "n1/c1", "ping", "-c1", "-W5", victim)
	})
}

// TestStrangersOnOtherDevices: what the program of the underlay device does not see, the packet filter does.
func TestStrangersOnOtherDevices(t *testing.T) {
	n2, vni := address(t, "host", "n2/c1"), labNetwork(t).VNI
	host := forger(t, startPeer(t, "host", "n2/c1"))
	before := counters(t, "n2")["drop_overlay_stranger"]
	// By lo, and from the node's own address, which no other node has.
	host.must(`forge(udp(%q, 40000, %q, 4789, vxlan(%d, %q, udp("10.9.9.9", 5, %q, 6, b"x"))), %[2]q)`, n2, n2, vni, n2, address(t, "heddle", "n2/c1"))
	eventually(t, "drop_overlay_stranger to rise", func() (bool, string) {
		after := counters(t, "n2")
		return after["drop_overlay_stranger"] > before, fmt.Sprint(after)
	})
}
