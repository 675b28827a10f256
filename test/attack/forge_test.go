package attack

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"send into the overlay by another address of a node", model.ProtectOverlay, "n2", sendElsewhere},
		attack{"send as a container from the underlay", model.ProtectOverlay, "n2", strangerSpoofs},
		attack{"spoil the node's way to a host outside", model.ProtectErrors, "n1", forgeError},
		attack{"have a path given up by connects that fail", model.ProtectProbes, "n1", spoilPath},
	)
}

// sendElsewhere sends VXLAN from a node to an address that the other node has beside its underlay
// address, as a container does whose datagrams are masqueraded, if they get that far.
func sendElsewhere(t *testing.T) string {
	const second = "198.51.100.66"
	defer addAddress(t, "n2", second)()
	n2 := lab.Address(t, "host", "n2/c1")
	route := func(verb string) ([]byte, error) {
		return exec.Command("ip", "-n", lab.Name+"-n1", "route", verb, second, "via", n2).CombinedOutput()
	}
	if out, err := route("replace"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Cleanup(func() { _, _ = route("del") })
	server, port := lab.WaitForDatagrams(t)
	p, n1 := lab.Forger(t, lab.StartPeer(t, "host", "n1/c1")), lab.Address(t, "host", "n1/c1")
	return cameOrDropped(t, server, "n2", "drop_overlay_stranger", func() {
		p.Must(`forge(udp(%q, 40000, %q, 4789, %s), %[2]q)`, n1, second, vxlanInName(t, port))
	})
}

// strangerSpoofs sends a datagram from a host that is no node, past the overlay, as a container.
func strangerSpoofs(t *testing.T) string {
	server, port := lab.WaitForDatagrams(t)
	stranger, target := lab.Forger(t, lab.StartOutside(t)), lab.OutsideTargets(t, "n2/c1")[4]
	return cameOrDropped(t, server, "n2", "drop_spoofed_source", func() {
		stranger.Must(`forge(udp(%q, 5, %q, %d, b"forged"), %[2]q)`, lab.Address(t, "overlay", "n1/c1"), target, port)
	})
}

// fragmentationNeeded is Python that makes an ICMP error about an IPv4 packet.
const fragmentationNeeded = `
def fragmentation_needed(src, dst, mtu, about):
    icmp = struct.pack("!BBHHH", 3, 4, 0, 0, mtu) + about[:28]
    return ip_packet(src, dst, 1, icmp[:2] + struct.pack("!H", internet_sum(icmp)) + icmp[4:])
`

// forgeError tells the node that its packets to a host outside are too big: of UDP it believes
// whoever names the port of a socket, and sends all that is for that host in small packets from
// then on.
func forgeError(t *testing.T) string {
	node, p := lab.StartPeer(t, "host", "n1/c1"), lab.Forger(t, lab.StartPeer(t, "overlay", "n1/c1"))
	node.Must(`u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
	node.Must(`u.bind(("0.0.0.0", 0))`)
	p.Must("%s", fragmentationNeeded)
	n1, outside := lab.Address(t, "host", "n1/c1"), lab.OutsideTarget(t)
	t.Cleanup(func() { lab.Shell(t, lab.Name+"-n1", "echo 1 >/proc/sys/net/ipv4/route/flush") })
	before := lab.Counters(t, "n1")["drop_forged_error"]
	p.Must(`forge(fragmentation_needed(%q, %q, 600, udp(%[2]q, %d, %q, 9, b"")), %[2]q)`, lab.Address(t, "overlay", "n1/c1"), n1, node.PortOf("u"), outside)
	var route string
	testutil.Eventually(t, "the error to be dropped or believed", func() (bool, string) {
		route = lab.Shell(t, lab.Name+"-n1", "ip route get "+outside)
		return strings.Contains(route, "mtu 600") || lab.Counters(t, "n1")["drop_forged_error"] > before, route
	})
	if strings.Contains(route, "mtu 600") {
		return strings.TrimSpace(route)
	}
	return ""
}

// TestErrorsPass: what a container's own stack answers to what is sent to it passes, in both
// families.
func TestErrorsPass(t *testing.T) {
	client, port := lab.StartPeer(t, "overlay", "n2/c1"), lab.FreePort()
	before := lab.Counters(t, "n1")["drop_forged_error"]
	for family, target := range map[int]string{4: lab.Address(t, "overlay", "n1/c1"), 6: lab.Overlay6(t, "n1/c1")} {
		client.Must(`u = socket.socket(AF[%d], socket.SOCK_DGRAM)`, family)
		client.Must(`u.settimeout(%d)`, int(testutil.WaitTimeout.Seconds()))
		client.Must(`u.connect((%q, %d))`, target, port)
		client.Must(`u.send(b"x")`)
		client.Expect(`"ECONNREFUSED"`, `error_of(u.recv, 1)`)
	}
	if after := lab.Counters(t, "n1")["drop_forged_error"]; after != before {
		t.Errorf("drop_forged_error rose by %d", after-before)
	}
}

// spoilPath has connects between two containers of one tenant, whose server accepts none, look as
// if the path between their nodes failed, and sees by what way another container's connect goes.
func spoilPath(t *testing.T) string {
	server, client, victim := lab.StartPeer(t, "heddle", "n2/c1"), lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c2")
	port, other, target := lab.FreePort(), lab.FreePort(), lab.Address(t, "heddle", "n2/c1")
	lab.AwaitPath(t, "n1", model.PeerProven)
	server.Must(`l = listen(4, "0.0.0.0", %d, backlog=0)`, port)
	server.Must(`m = listen(4, "0.0.0.0", %d)`, other)
	client.Must(`held = [tcp(4) for _ in range(4)]`)
	client.Must(`[s.setblocking(False) for s in held]`)
	client.Must(`[s.connect_ex((%q, %d)) for s in held]`, target, port)
	testutil.Eventually(t, "a SYN to be sent again", func() (bool, string) {
		sent := client.Must(`max(s.getsockopt(6, 11, 8)[2] for s in held)`) // TCP_INFO
		return sent != "0", sent
	})
	probed := lab.DirectPaths(t, "n1").Probes["answered"]
	testutil.Eventually(t, "n1 to probe n2, or to give the path up", func() (bool, string) {
		d := lab.DirectPaths(t, "n1")
		return d.Probes["answered"] > probed || d.Peers[model.PeerBlocked] == 1, fmt.Sprintf("%+v", d)
	})
	before := lab.Counters(t, "n1")
	victim.Must(`s = connect(4, %q, %d)`, target, other)
	after := lab.Counters(t, "n1")
	direct, blocked := after["connect_direct"]-before["connect_direct"], after["fallback_blocked"]-before["fallback_blocked"]
	client.Must(`[s.close() for s in held]`)
	return gained(t, "the victim's connect", fmt.Sprint(direct, " direct, ", blocked, " not"), "1 direct, 0 not", "0 direct, 1 not")
}
