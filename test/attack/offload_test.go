package attack

import (
	"fmt"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"have a checksum make VXLAN of a datagram", model.ProtectChecksum, "n1", func(t *testing.T) string {
			return checksumMakesVXLAN(t, func(p *lab.Peer, mac string) {
				p.Must(`forge_unfinished(ethernet(bad, %q), flags=1, start=34, offset=2)`, mac)
			})
		}},
		attack{"have a checksum make VXLAN of a datagram, by AF_XDP", model.ProtectChecksum, "n1", func(t *testing.T) string {
			program := lab.CompileC(t, "testdata/xdp.c")
			return checksumMakesVXLAN(t, func(p *lab.Peer, mac string) {
				p.Expect(`"sent\n"`, `subprocess.check_output([%q, "eth0", "34", "2", ethernet(bad, %q).hex()], text=True)`, program, mac)
			})
		}},
		attack{"send into the overlay from a container", model.ProtectOverlayPort, "n1", containerSendsVXLAN},
		attack{"take what the overlay brings for an answer", model.ProtectOverlayPort, "n1", takeOverlay},
	)
}

// setOffloads switches the checksums and segments that a node's underlay device leaves to others: a
// device of a plain kind has none.
const setOffloads = `
import array, fcntl, socket, struct
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for request in (0x17, 0x1f, 0x24): # ETHTOOL_STXCSUM, _STSO, _SGSO
    value = array.array("B", struct.pack("II", request, %d))
    fcntl.ioctl(s, 0x8946, struct.pack("16sQ16x", b"eth0", value.buffer_info()[0])) # SIOCETHTOOL
`

// withoutOffloads has a node write checksums and cut segments itself, until the test ends.
func withoutOffloads(t testing.TB, node string) {
	t.Helper()
	set := func(on int) { lab.Shell(t, lab.Name+"-"+node, lab.Python+" -c '"+fmt.Sprintf(setOffloads, on)+"'") }
	set(0)
	t.Cleanup(func() { set(1) })
}

// vxlanInName is Python for a VXLAN packet's payload, and what it is to bring to n2/c1: a datagram
// in the name of n1/c2.
func vxlanInName(t *testing.T, port int) string {
	return fmt.Sprintf(`vxlan(%d, %q, udp(%q, 5, %q, %d, b"forged"))`, lab.Numbers(t).VNI, lab.Address(t, "host", "n2/c1"), lab.Address(t, "overlay", "n1/c2"),
		lab.Address(t, "overlay", "n2/c1"), port)
}

// checksumMakesVXLAN sends a datagram to a port of no interest whose checksum is the overlay's
// port, and belongs where the port is.
func checksumMakesVXLAN(t *testing.T, send func(p *lab.Peer, mac string)) string {
	withoutOffloads(t, "n1")
	server, port := lab.WaitForDatagrams(t)
	p := lab.Forger(t, lab.StartPeer(t, "overlay", "n1/c1"))
	mac := gatewayMAC(t, p)
	p.Must(`bad = adding_up(udp(%q, 40000, %q, 5000, %s + bytes(2)), 20, 4789)`, lab.Address(t, "overlay", "n1/c1"), lab.Address(t, "host", "n2/c1"), vxlanInName(t, port))
	return cameOrDropped(t, server, "n1", "drop_forged_checksum", func() { send(p, mac) })
}

// containerSendsVXLAN does by itself what the overlay's device does.
func containerSendsVXLAN(t *testing.T) string {
	server, port := lab.WaitForDatagrams(t)
	p, own, n2 := lab.Forger(t, lab.StartPeer(t, "overlay", "n1/c1")), lab.Address(t, "overlay", "n1/c1"), lab.Address(t, "host", "n2/c1")
	return cameOrDropped(t, server, "n1", "drop_forged_overlay", func() {
		p.Must(`forge(udp(%q, 40000, %q, 4789, %s), %[2]q)`, own, n2, vxlanInName(t, port))
	})
}

// takeOverlay sends a datagram from the overlay's port to each port of the other node that its
// overlay may send from: masqueraded, they have what comes from there for an answer. Then another
// container's neighbour has something sent, in segments: what comes in one piece is taken before
// anything is looked for (decision 0105).
func takeOverlay(t *testing.T) string {
	thief, victim, sender := lab.StartPeer(t, "overlay", "n1/c1"), lab.StartPeer(t, "overlay", "n1/c2"), lab.StartPeer(t, "overlay", "n2/c1")
	port := lab.FreePort()
	sender.Must(`d = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
	sender.Must(`d.setsockopt(socket.IPPROTO_UDP, 103, 6)`) // UDP_SEGMENT
	thief.Must(`s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
	thief.Must(`s.bind(("0.0.0.0", 4789))`)
	thief.Must(`def spray(node):
    for port in range(32768, 65536):
        try: s.sendto(b"x", (node, port))
        except OSError: pass # refused: an earlier one, as its ICMP error says`)
	thief.Must(`def taken():
    while True:
        try:
            if b"secret" in s.recv(2000, socket.MSG_DONTWAIT): return "taken"
        except BlockingIOError: return ""
        except OSError: pass`)
	thief.Must(`spray(%q)`, lab.Address(t, "host", "n2/c1"))
	victim.Must(`d = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
	victim.Must(`d.bind(("0.0.0.0", %d))`, port)
	victim.Must(`d.setblocking(False)`)
	got := ""
	testutil.Eventually(t, "what is sent to arrive, or to be taken", func() (bool, string) {
		sender.Must(`d.sendto(b"secretsecret", (%q, %d))`, lab.Address(t, "overlay", "n1/c2"), port)
		got = strings.Trim(thief.Must(`taken()`), `"`)
		arrived := victim.Must(`error_of(d.recv, 100)`)
		return got != "" || arrived == `"ok"`, arrived
	})
	thief.Must(`s.close()`) // for another try
	return got
}

// judged is Python for what is judged of a frame: protocol, addresses and ports.
const judged = `
def judged(f):
    if f[12:14] == b"\x08\0":
        return [f[23], f[26:34].hex(), f[14 + (f[14] & 15) * 4:][:4].hex()]
    return [f[20], f[22:54].hex(), f[54:58].hex()]
`

// unfinished are the frames of TestUnfinishedFrames, in Python, of OWN and FAR.
const unfinished = judged + `
def six(protocol, payload):
    head = struct.pack("!IHBB", 6 << 28, len(payload), protocol, 64)
    return ethernet(head + socket.inet_pton(socket.AF_INET6, OWN6) + socket.inet_pton(socket.AF_INET6, FAR6) + payload, MAC, 0x86dd)

ack = struct.pack("!HHIIBBHHH", 40000, 9, 1, 1, 0x50, 0x10, 1000, 0, 0) + bytes(1000)
datagram = struct.pack("!HHHH", 40000, 9, 1008, 0) + bytes(1000)
ping = b"\x08\0\0\0" + bytes(1000)
udp4, tcp4, icmp4 = (ethernet(ip_packet(OWN, FAR, *p), MAC) for p in ((17, datagram), (6, ack), (1, ping)))
ipip4, gre4 = (ethernet(ip_packet(OWN, FAR, *p), MAC) for p in ((4, ip_packet(OWN, FAR, 6, ack)), (47, b"\0\0\x08\0" + ip_packet(OWN, FAR, 6, ack))))
first, later = (ethernet(p, MAC) for p in fragments(udp(OWN, 40000, FAR, 9, bytes(1000)), 800))
udp6, tcp6, icmp6, piece6 = six(17, datagram), six(6, ack), six(58, b"\x80" + ping[1:]), six(44, b"\x11\0\0\1" + bytes(4) + datagram)
arp = ethernet(arp_request(OWN, FAR) + bytes(100), MAC, 0x0806)
`

// TestUnfinishedFrames: whatever a program says of a frame that the kernel is to complete, the
// kernel refuses it, it is dropped under its reason, or what arrives is what was judged.
func TestUnfinishedFrames(t *testing.T) {
	withoutOffloads(t, "n1")
	sender, receiver := lab.Forger(t, lab.StartPeer(t, "overlay", "n1/c1")), lab.StartPeer(t, "overlay", "n2/c1")
	own, far := lab.Address(t, "overlay", "n1/c1"), lab.Address(t, "overlay", "n2/c1")
	sender.Must(`OWN, FAR, OWN6, FAR6, MAC = %q, %q, %q, %q, %q`, own, far, lab.Overlay6(t, "n1/c1"), lab.Overlay6(t, "n2/c1"), gatewayMAC(t, sender))
	sender.Must("%s", unfinished)
	receiver.Must("%s", judged)
	receiver.Must(`def arrived():
    out = []
    try:
        while True: out.append(judged(s.recv(2000)))
    except BlockingIOError: return out`)
	const passes, dropped, invalid, unfit = "passes", "dropped", "EINVAL", "ENOMEM"
	const tcp4, ufo, tcp6, udpL4, ecn = 1, 3, 4, 5, 0x80 // VIRTIO_NET_HDR_GSO_*
	segments := func(frame string, gso int, rest string) string {
		return fmt.Sprintf("%s, gso=%d, headers=54, size=400%s", frame, gso, rest)
	}
	const tcpSum, udpSum = ", flags=1, start=34, offset=16", ", flags=1, start=34, offset=6"
	for _, c := range []struct{ frame, want string }{
		{"udp4", passes}, // nothing is to be completed
		// A checksum: in its place, also in that of a packet within this one, and in others.
		{"udp4, flags=1, start=34, offset=6", passes},
		{"tcp4, flags=1, start=34, offset=16", passes},
		{"udp6, flags=1, start=54, offset=6", passes},
		{"tcp6, flags=1, start=54, offset=16", passes},
		{"udp4, flags=1, start=42, offset=16", passes},
		{"ipip4, flags=1, start=54, offset=16", passes},
		{"gre4, flags=1, start=58, offset=16", passes},
		{"udp4, flags=1, start=34, offset=2", dropped},
		{"udp4, flags=1, start=34, offset=2, bypass=1", dropped},
		{"udp4, flags=1, start=36, offset=0", dropped},
		{"udp4, flags=1, start=41, offset=0", dropped},
		{"udp4, flags=1, start=34, offset=8", dropped},
		{"udp4, flags=1, start=22, offset=6", dropped},
		{"tcp4, flags=1, start=34, offset=2", dropped},
		{"tcp4, flags=1, start=34, offset=24", dropped},
		{"tcp4, flags=1, start=60, offset=16", dropped},
		{"icmp4, flags=1, start=34, offset=2", dropped},
		{"icmp4, flags=1, start=62, offset=16", dropped},
		{"ipip4, flags=1, start=30, offset=0", dropped},
		{"first, flags=1, start=34, offset=6", dropped},
		{"later, flags=1, start=34, offset=6", dropped},
		{"udp6, flags=1, start=54, offset=2", dropped},
		{"udp6, flags=1, start=38, offset=0", dropped},
		{"tcp6, flags=1, start=54, offset=6", dropped},
		{"icmp6, flags=1, start=54, offset=2", dropped},
		{"piece6, flags=1, start=62, offset=6", dropped},
		{"arp, flags=1, start=40, offset=2", dropped},
		{"udp4, flags=1, start=8, offset=4", invalid},
		{"udp4, flags=1, start=1030, offset=60", invalid},
		{"udp4, headers=5000", invalid},
		// Segments. The kernel tries to cut what a program makes, and lets none pass that does not
		// fit the packet.
		{segments("tcp4", tcp4, ""), passes},
		{segments("tcp4", tcp4, tcpSum), passes},
		{segments("tcp4", tcp4|ecn, tcpSum), passes},
		{segments("tcp6", tcp6, ", flags=1, start=54, offset=16"), passes},
		{segments("udp4", udpL4, udpSum), passes},
		{segments("udp4", ufo, ""), passes},
		{segments("tcp4", tcp4, ", flags=1, start=50, offset=16"), unfit},
		{segments("udp4", udpL4, ", flags=1, start=50, offset=6"), unfit},
		{segments("udp4", tcp4, ", flags=1, start=42, offset=16"), unfit},
		{segments("icmp4", tcp4, tcpSum), unfit},
		{segments("ipip4", tcp4, ", flags=1, start=54, offset=16"), unfit},
		{segments("gre4", tcp4, ", flags=1, start=58, offset=16"), unfit},
		{segments("tcp4", udpL4, udpSum), unfit},
		{segments("tcp4", ufo, tcpSum), unfit},
		{segments("first", tcp4, tcpSum), unfit},
		{segments("tcp4", tcp6, tcpSum), invalid},
		{segments("udp4", udpL4, ", flags=1, start=34, offset=2"), invalid},
		{segments("udp4", udpL4, ""), invalid},
		{segments("udp4", udpL4|ecn, udpSum), invalid},
		{segments("udp4", tcp4, ""), invalid},
		{segments("udp4", 7, ""), invalid},
		{"udp4, gso=3, headers=42, size=0", invalid},
		{"udp4, gso=3, headers=42, size=65535", invalid},
	} {
		t.Run(c.frame, func(t *testing.T) {
			receiver, sender := receiver.In(t), sender.In(t)
			receiver.Must(`s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))`)
			receiver.Must(`s.setblocking(False)`)
			want := sender.Must(`judged(%s)`, strings.Split(c.frame, ",")[0])
			before := lab.Counters(t, "n1")["drop_forged_checksum"]
			if c.want == invalid || c.want == unfit {
				sender.Expect(`"`+c.want+`"`, `error_of(lambda: forge_unfinished(%s))`, c.frame)
				return
			}
			sender.Must(`forge_unfinished(%s)`, c.frame)
			got, came := "", ""
			testutil.Eventually(t, "the frame to be dropped, or to arrive", func() (bool, string) {
				came = receiver.Must(`arrived()`)
				if lab.Counters(t, "n1")["drop_forged_checksum"] > before {
					got = dropped
				} else if strings.Contains(came, want) {
					got = passes
				}
				return got != "", came
			})
			if got != c.want {
				t.Errorf("%s, want that it %s", got, c.want)
			}
		})
	}
}

// TestUnfinishedFramesOfPrograms: what programs and the kernel leave unfinished by themselves
// passes, and arrives: checksums and segments of TCP, of UDP, and of both in a tunnel of the
// container's own.
func TestUnfinishedFramesOfPrograms(t *testing.T) {
	const client, server = "n1/c1", "n2/c1"
	far := map[string]string{"IPv4": lab.Address(t, "overlay", server), "IPv6": lab.Overlay6(t, server)}
	for name, kind := range map[string]string{"tunnel": "noudpcsum", "tunnel with checksums": "udpcsum"} {
		far[name] = tunnel(t, len(far), client, server, kind)
	}
	for _, offloads := range []bool{true, false} {
		for name, target := range far {
			t.Run(fmt.Sprintf("%s, offloads %v", name, offloads), func(t *testing.T) {
				if !offloads {
					withoutOffloads(t, "n1")
					withoutOffloads(t, "n2")
				}
				before := lab.Counters(t, "n1")["drop_forged_checksum"] + lab.Counters(t, "n2")["drop_forged_checksum"]
				sendStreamAndDatagrams(t, client, server, target)
				if after := lab.Counters(t, "n1")["drop_forged_checksum"] + lab.Counters(t, "n2")["drop_forged_checksum"]; after != before {
					t.Errorf("drop_forged_checksum rose by %d", after-before)
				}
			})
		}
	}
}

// tunnel makes a VXLAN device in two containers, which their programs cannot, and gives the address
// of the second one's.
func tunnel(t *testing.T, id int, one, other, checksums string) string {
	t.Helper()
	addr := func(host int) string { return fmt.Sprintf("192.168.%d.%d", id, host) }
	for i, container := range []string{one, other} {
		own, peer := lab.Address(t, "overlay", container), lab.Address(t, "overlay", []string{other, one}[i])
		ns, device := lab.Name+"-"+strings.ReplaceAll(container, "/", "-"), fmt.Sprint("tunnel", id)
		lab.Shell(t, ns, fmt.Sprintf("ip link add %s type vxlan id %d local %s remote %s dstport 8472 %s && ip addr add %s/24 dev %[1]s && ip link set %[1]s up",
			device, id, own, peer, checksums, addr(i+1)))
		t.Cleanup(func() { lab.Shell(t, ns, "ip link del "+device) })
	}
	return addr(2)
}

// sendStreamAndDatagrams has the second of two containers' own stacks take a stream, and datagrams
// that the first one's kernel cuts from one.
func sendStreamAndDatagrams(t *testing.T, client, server, target string) {
	c, s, port, family := lab.StartPeer(t, "overlay", client), lab.StartPeer(t, "overlay", server), lab.FreePort(), 4
	if strings.Contains(target, ":") {
		family = 6
	}
	s.Must(`def take(l):
    c, h = l.accept()[0], hashlib.sha256()
    while b := c.recv(1 << 16): h.update(b)
    c.sendall(h.digest())
    c.close()`)
	s.Must(`l = listen(%d, %q, %d)`, family, target, port)
	s.Must(`threading.Thread(target=take, args=(l,), daemon=True).start()`)
	s.Must(`d = socket.socket(AF[%d], socket.SOCK_DGRAM)`, family)
	s.Must(`d.settimeout(%d)`, int(testutil.WaitTimeout.Seconds()))
	s.Must(`d.bind((%q, %d))`, target, port)
	c.Must(`data = os.urandom(4 << 20)`)
	c.Must(`s = connect(%d, %q, %d)`, family, target, port)
	c.Must(`s.settimeout(%d)`, int(testutil.WaitTimeout.Seconds()))
	c.Must(`s.sendall(data)`)
	c.Must(`s.shutdown(socket.SHUT_WR)`)
	c.Expect("true", `s.recv(32) == hashlib.sha256(data).digest()`)
	c.Must(`d = socket.socket(AF[%d], socket.SOCK_DGRAM)`, family)
	c.Must(`d.setsockopt(socket.IPPROTO_UDP, 103, 1000)`) // UDP_SEGMENT
	c.Must(`d.sendto(bytes(9500), (%q, %d))`, target, port)
	s.Expect("[1000, 1000, 1000, 1000, 1000, 1000, 1000, 1000, 1000, 500]", `[len(d.recv(9500)) for _ in range(10)]`)
}
