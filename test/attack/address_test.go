package attack

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"bind an address of the node", model.ProtectBind, "n1", bindForeign(func(t *testing.T) string { return lab.Address(t, "host", "n1/c1") })},
		attack{"bind the gateway", model.ProtectBind, "n1", bindForeign(func(t *testing.T) string { return lab.GatewayOf("n1/c1")(t) })},
		attack{"bind another container's address", model.ProtectBind, "n1", bindForeign(func(t *testing.T) string { return lab.Address(t, "heddle", "n1/c2") })},
		attack{"bind an address of another node's container", model.ProtectBind, "n1", bindForeign(func(t *testing.T) string { return lab.Address(t, "heddle", "n2/c1") })},
		attack{"send with another container's address", model.ProtectSource, "n1", spoofSource},
		attack{"speak for another container by a forged SYN", model.ProtectDirectPorts, "n1", forgeSYN},
		attack{"pass for the node", model.ProtectNodeAddress, "n1", passForNode(4, "198.51.100.77")},
		attack{"pass for the node by IPv6", model.ProtectNodeAddress, "n1", passForNode(6, "2001:db8:77::77")},
		attack{"pass for the node, bound to its wildcard", model.ProtectNodeAddress, "n1", passForNodeUnbound},
		attack{"keep a port from others by the node's wildcard", model.ProtectBind, "n1", takeWildcard},
		attack{"set the node's mark", model.ProtectSocketOptions, "n1", setMark},
		attack{"join another container's SO_REUSEPORT group", model.ProtectBind, "n1", joinAnothers},
	)
}

// bindForeign tries to bind an address that is not the container's, by each kind of socket.
func bindForeign(target func(*testing.T) string) func(*testing.T) string {
	return func(t *testing.T) string {
		p, addr := lab.StartPeer(t, "heddle", "n1/c1"), target(t)
		v4 := p.Do(`error_of(tcp(4).bind, (%q, 0))`, addr)
		mapped := p.Do(`error_of(tcp(6).bind, ("::ffff:%s", 0))`, addr)
		return gained(t, "bind to "+addr, v4+mapped, `"EADDRNOTAVAIL""EADDRNOTAVAIL"`, `"ok""ok"`)
	}
}

// spoofSource sends a datagram to a container of the other node as another container, and sees what
// comes.
func spoofSource(t *testing.T) string {
	server, attacker := lab.StartPeer(t, "heddle", "n2/c1"), lab.Forger(t, lab.StartPeer(t, "heddle", "n1/c1"))
	port := lab.FreePort()
	server.Must(`u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
	server.Must(`u.bind(("0.0.0.0", %d))`, port)
	victim, target := lab.Address(t, "heddle", "n1/c2"), lab.Address(t, "heddle", "n2/c1")
	attacker.Must(`forge(udp(%q, 5, %q, %d, b"forged"), %q)`, victim, target, port, target)
	// Behind it, one that arrives in any case.
	attacker.Must(`socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"honest", (%q, %d))`, target, port)
	server.Must(`u.settimeout(%d)`, int(testutil.WaitTimeout.Seconds()))
	return gained(t, "a datagram came", server.Must(`u.recvfrom(100)[0].decode()`), `"honest"`, `"forged"`)
}

// forgeSYN sends a SYN with an option from a raw socket, and sees whether it comes to the other
// node.
func forgeSYN(t *testing.T) string {
	attacker := lab.Forger(t, lab.StartPeer(t, "heddle", "n1/c1"))
	own, other, target := lab.Address(t, "heddle", "n1/c1"), lab.Address(t, "heddle", "n1/c2"), lab.Address(t, "host", "n2/c1")
	counts := func() (dropped, arrived uint64) {
		n2 := lab.Counters(t, "n2")
		// Masqueraded it is taken for the node's. Where both nodes have the same direct ports it
		// comes as it is.
		return lab.Counters(t, "n1")["drop_forged_direct"], n2["relay_opened"] + n2["drop_unknown_node"]
	}
	dropped, arrived := counts()
	attacker.Must(`forge(syn(%q, %d, %q, %d, heddle_option(%d, %q, %q, %d)), %q)`, own, lab.FreePort(), target,
		model.DefaultDirectPorts.First+3, lab.Numbers(t).ID, other, lab.Address(t, "heddle", "n2/c1"), lab.FreePort(), target)
	var got string
	testutil.Eventually(t, "the forged SYN to be dropped, or to arrive", func() (bool, string) {
		d, a := counts()
		got = fmt.Sprintf("dropped %d, arrived %d", d-dropped, a-arrived)
		return d+a > dropped+arrived, got
	})
	return gained(t, "the SYN was", got, "dropped 1, arrived 0", "dropped 0, arrived 1")
}

// setMark sets a mark that only the node may set.
func setMark(t *testing.T) string {
	p, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	p.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	p.Must(`s = tcp(4)`)
	p.Must(`s.setsockopt(socket.SOL_SOCKET, 36, 0x1234)`)
	p.Must(`s.setblocking(False)`) // without Heddle's mark the connect does not come to an end
	p.Must(`s.connect_ex((%q, %d))`, lab.Address(t, "heddle", "n1/c1"), port)
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
	out, err := exec.Command("nsenter", "--net=/run/netns/"+lab.Name+"-"+node, "ss", "-taneH", "dport", "=", fmt.Sprint(port)).CombinedOutput()
	if err != nil {
		t.Fatalf("ss: %v\n%s", err, out)
	}
	return string(out)
}

// addAddress gives a node an address until remove is called. Both wait until the agent has told the
// programs.
func addAddress(t *testing.T, node, addr string) (remove func()) {
	t.Helper()
	ip := func(verb string) error {
		out, err := exec.Command("nsenter", "--net=/run/netns/"+lab.Name+"-"+node, "ip", "addr", verb, addr, "dev", "lo").CombinedOutput()
		if err != nil {
			return fmt.Errorf("ip addr %s %s: %w\n%s", verb, addr, err, out)
		}
		return nil
	}
	testutil.NoError(t, ip("add"))
	knows := func() bool {
		routes, err := ebpf.LoadPinnedMap("/run/heddle/lab/"+lab.Name+"/"+node+"/bpf/heddle/route_by_prefix", nil)
		testutil.NoError(t, err)
		defer routes.Close()
		a := netip.MustParseAddr(addr).As16()
		found, err := routes.LookupBytes(append([]byte{128, 0, 0, 0}, a[:]...))
		testutil.NoError(t, err)
		return found != nil
	}
	t.Cleanup(func() { _ = ip("del") }) // if the test ends before it removes it
	testutil.Eventually(t, "the agent to know "+addr, func() (bool, string) { return knows(), "" })
	return func() {
		if err := ip("del"); err != nil {
			t.Error(err)
		}
		testutil.Eventually(t, "the agent to forget "+addr, func() (bool, string) { return !knows(), "" })
	}
}

// passForNode connects to an address that the node was given while the agent runs, and sees who the
// node's process takes the container for.
func passForNode(family int, addr string) func(*testing.T) string {
	return func(t *testing.T) string {
		defer addAddress(t, "n1", addr)()
		node, attacker, port := lab.StartPeer(t, "host", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
		node.Must(`l = listen(%d, %q, %d)`, family, map[int]string{4: "0.0.0.0", 6: "::"}[family], port)
		attacker.Must(`s = connect(%d, %q, %d)`, family, addr, port)
		own := map[int]func() string{4: func() string { return lab.Address(t, "heddle", "n1/c1") }, 6: func() string { return lab.Overlay6(t, "n1/c1") }}[family]()
		return gained(t, "the node's process saw", node.Must(`l.accept()[1][0]`), fmt.Sprintf("%q", own), fmt.Sprintf("%q", addr))
	}
}

func passForNodeUnbound(t *testing.T) string {
	const addr = "198.51.100.77"
	defer addAddress(t, "n1", addr)()
	node, attacker, port := lab.StartPeer(t, "host", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	node.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	attacker.Must(lab.BoundToNothing)
	attacker.Must(`(s := unbound_address()).connect((%q, %d))`, addr, port)
	// Its FIN would find nobody when the address is gone, and a bound port is counted until then.
	defer attacker.Must(`(s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ONE_LINGER), s.close())`)
	return gained(t, "the node's process saw", node.Must(`l.accept()[1][0]`), fmt.Sprintf("%q", lab.Address(t, "heddle", "n1/c1")), fmt.Sprintf("%q", addr))
}

// takeWildcard binds a port at all addresses of the node, which no other container could then bind
// at its own.
func takeWildcard(t *testing.T) string {
	victim, attacker, port := lab.StartPeer(t, "heddle", "n1/c2"), lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	attacker.Must(lab.BoundToNothing)
	attacker.Do(`s = unbound_address(%d)`, port)
	return gained(t, "another container's bind", victim.Must(`error_of(tcp(4).bind, ("0.0.0.0", %d))`, port), `"ok"`, `"EADDRINUSE"`)
}

// joinAnothers listens at another container's address and port, to get some of its connections.
func joinAnothers(t *testing.T) string {
	victim, p, port := lab.StartPeer(t, "heddle", "n1/c2"), lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	victim.Must(`l = listen(4, "0.0.0.0", %d, None, True)`, port)
	got := p.Must(`error_of(listen, 4, %q, %d, None, True)`, lab.Address(t, "heddle", "n1/c2"), port)
	return gained(t, "a listener in its group", got, `"EADDRNOTAVAIL"`, `"ok"`)
}
