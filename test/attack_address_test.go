package test

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func init() {
	attacks = append(attacks,
		attack{"bind an address of the node", model.ProtectBind, "n1", bindForeign(func(t *testing.T) string { return address(t, "host", "n1/c1") })},
		attack{"bind the gateway", model.ProtectBind, "n1", bindForeign(func(t *testing.T) string { return gatewayOf("n1/c1")(t) })},
		attack{"bind another container's address", model.ProtectBind, "n1", bindForeign(func(t *testing.T) string { return address(t, "heddle", "n1/c2") })},
		attack{"bind an address of another node's container", model.ProtectBind, "n1", bindForeign(func(t *testing.T) string { return address(t, "heddle", "n2/c1") })},
		attack{"send with another container's address", model.ProtectSource, "n1", spoofSource},
		attack{"speak for another container by a forged SYN", model.ProtectDirectPorts, "n1", forgeSYN},
		attack{"set the node's mark", model.ProtectSocketOptions, "n1", setMark},
	)
}

// bindForeign tries to bind an address that is not the container's, by each kind of socket.
func bindForeign(target func(*testing.T) string) func(*testing.T) string {
	return func(t *testing.T) string {
		p, addr := startPeer(t, "heddle", "n1/c1"), target(t)
		v4 := p.do(`error_of(tcp(4).bind, (%q, 0))`, addr)
		mapped := p.do(`error_of(tcp(6).bind, ("::ffff:%s", 0))`, addr)
		return gained(t, "bind to "+addr, v4+mapped, `"EADDRNOTAVAIL""EADDRNOTAVAIL"`, `"ok""ok"`)
	}
}

// spoofSource sends a datagram to a container of the other node as another container, and sees what comes.
func spoofSource(t *testing.T) string {
	server, attacker := startPeer(t, "heddle", "n2/c1"), forger(t, startPeer(t, "heddle", "n1/c1"))
	port := freePort()
	server.must(`u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
	server.must(`u.bind(("0.0.0.0", %d))`, port)
	victim, target := address(t, "heddle", "n1/c2"), address(t, "heddle", "n2/c1")
	attacker.must(`forge(udp(%q, 5, %q, %d, b"forged"), %q)`, victim, target, port, target)
	// Behind it, one that arrives in any case.
	attacker.must(`socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"honest", (%q, %d))`, target, port)
	server.must(`u.settimeout(%d)`, int(patience.Seconds()))
	return gained(t, "a datagram came", server.must(`u.recvfrom(100)[0].decode()`), `"honest"`, `"forged"`)
}

// forgeSYN sends a SYN with an option from a raw socket, and sees whether it comes to the other node.
func forgeSYN(t *testing.T) string {
	attacker := forger(t, startPeer(t, "heddle", "n1/c1"))
	own, other, target := address(t, "heddle", "n1/c1"), address(t, "heddle", "n1/c2"), address(t, "host", "n2/c1")
	counts := func() (dropped, arrived uint64) {
		n2 := counters(t, "n2")
		// Masqueraded it is taken for the node's. Where both nodes have the same direct ports it comes as it is.
		return counters(t, "n1")["drop_forged_direct"], n2["relay_opened"] + n2["drop_unknown_node"]
	}
	dropped, arrived := counts()
	attacker.must(`forge(syn(%q, %d, %q, %d, heddle_option(%d, %q, %q, %d)), %q)`, own, freePort(), target,
		model.DefaultDirectPorts.First+3, networkID(t), other, address(t, "heddle", "n2/c1"), freePort(), target)
	var got string
	eventually(t, "the forged SYN to be dropped, or to arrive", func() (bool, string) {
		d, a := counts()
		got = fmt.Sprintf("dropped %d, arrived %d", d-dropped, a-arrived)
		return d+a > dropped+arrived, got
	})
	return gained(t, "the SYN was", got, "dropped 1, arrived 0", "dropped 0, arrived 1")
}

// setMark sets a mark that only the node may set.
func setMark(t *testing.T) string {
	p, port := startPeer(t, "heddle", "n1/c1"), freePort()
	p.must(`l = listen(4, "0.0.0.0", %d)`, port)
	p.must(`s = tcp(4)`)
	p.must(`s.setsockopt(socket.SOL_SOCKET, 36, 0x1234)`)
	p.must(`s.setblocking(False)`) // without Heddle's mark the connect does not come to an end
	p.must(`s.connect_ex((%q, %d))`, address(t, "heddle", "n1/c1"), port)
	sockets := nodeSockets(t, "n1", port)
	marked := strings.Contains(sockets, "fwmark:0x1234")
	if marked == strings.Contains(sockets, "fwmark:0x4864") {
		t.Errorf("the node's socket:\n%s", sockets)
	}
	return gained(t, "a socket of the node has the container's mark", fmt.Sprint(marked), "false", "true")
}

// nodeSockets is what ss says of the sockets of a node that are connected to port, or want to be.
func nodeSockets(t *testing.T, node string, port int) string {
	t.Helper()
	out, err := exec.Command("nsenter", "--net=/run/netns/"+labName+"-"+node, "ss", "-taneH", "dport", "=", fmt.Sprint(port)).CombinedOutput()
	if err != nil {
		t.Fatalf("ss: %v\n%s", err, out)
	}
	return string(out)
}
