package test

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func init() {
	attacks = append(attacks,
		attack{"send a SYN with an option from an unknown address", model.ProtectSYNSender, "n2", strangerSYN},
		attack{"connect to a process of the other node by a container's address", model.ProtectListener, "n2", reachWildcard},
		attack{"connect to a process of the node by the own loopback", model.ProtectWildcard, "n1", reachByLoopback},
		attack{"connect to a process of the node by the own loopback, late", model.ProtectWildcard, "n1", reachDeferred},
		attack{"send to the node's loopback", model.ProtectLoopback, "n1", reachNodeLoopback},
		attack{"join another user's SO_REUSEPORT group", model.ProtectUser, "n1", joinGroup},
	)
}

// strangerSYN sends a SYN with an option from a host of the underlay that is no node.
func strangerSYN(t *testing.T) string {
	stranger := forger(t, startOutside(t))
	node, victim := address(t, "host", "n2/c1"), address(t, "heddle", "n2/c1")
	a := netip.MustParseAddr(address(t, "host", "n1/c1")).As4()
	a[3] = 250
	counts := func() (dropped, taken uint64) {
		c := counters(t, "n2")
		return c["drop_unknown_node"], c["relay_opened"]
	}
	dropped, taken := counts()
	stranger.must(`forge(syn(%q, %d, %q, %d, heddle_option(%d, %q, %q, %d)), %q)`, netip.AddrFrom4(a), freePort(), node,
		model.DefaultDirectPorts.First+7, labNetwork(t).ID, address(t, "heddle", "n1/c1"), victim, freePort(), node)
	var got string
	eventually(t, "the SYN to be dropped or taken", func() (bool, string) {
		d, n := counts()
		got = fmt.Sprintf("dropped %d, taken %d", d-dropped, n-taken)
		return d+n > dropped+taken, got
	})
	return gained(t, "the SYN was", got, "dropped 1, taken 0", "dropped 0, taken 1")
}

// connects reports what comes of a connect from a container to addr:port, where a process of the node accepts.
func connects(t *testing.T, addr string, port int) string {
	attacker := startPeer(t, "heddle", "n1/c1")
	return gained(t, "connect to "+addr, attacker.do(`error_of(connect, 4, %q, %d)`, addr, port), `"ECONNREFUSED"`, `"ok"`)
}

// reachWildcard connects to a port of another container where only a process of its node listens, on all addresses.
func reachWildcard(t *testing.T) string {
	node, port := startPeer(t, "host", "n2/c1"), freePort()
	node.must(`l = listen(4, "0.0.0.0", %d)`, port)
	return connects(t, address(t, "heddle", "n2/c1"), port)
}

// reachByLoopback connects to the container's own loopback, which on the node is an address like any other.
func reachByLoopback(t *testing.T) string {
	node, port := startPeer(t, "host", "n1/c1"), freePort()
	node.must(`l = listen(4, "0.0.0.0", %d)`, port)
	return connects(t, "127.0.0.1", port)
}

// reachNodeLoopback sends a datagram to a process of the node that is bound to 127.0.0.1.
func reachNodeLoopback(t *testing.T) string {
	node, attacker, port := startPeer(t, "host", "n1/c1"), forger(t, startPeer(t, "heddle", "n1/c1")), freePort()
	own := address(t, "heddle", "n1/c1")
	route, err := exec.Command("ip", "netns", "exec", labName+"-n1", "sh", "-c", "cat /sys/class/net/$(ip -o route get "+own+" | sed 's/.* dev \\([^ ]*\\).*/\\1/')/address").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, route)
	}
	node.must(`u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
	node.must(`u.bind(("127.0.0.1", %d))`, port)
	before := counters(t, "n1")["drop_forged_loopback"]
	attacker.must(`forge_frame(udp(%q, 5, "127.0.0.1", %d, b"forged"), "eth0", %q)`, own, port, strings.TrimSpace(string(route)))
	node.must(`u.setblocking(False)`)
	var got string
	eventually(t, "the datagram to be dropped or to arrive", func() (bool, string) {
		came := node.do(`u.recv(100).decode()`)
		dropped := counters(t, "n1")["drop_forged_loopback"] - before
		got = fmt.Sprintf("%s, dropped %d", came, dropped)
		return came == `"forged"` || dropped > 0, got
	})
	return gained(t, "the node's process read", got, `{"error": "EAGAIN"}, dropped 1`, `"forged", dropped 0`)
}

// joinGroup listens beside root's listener as another user, to get some of its connections.
func joinGroup(t *testing.T) string {
	p, port := startPeer(t, "heddle", "n1/c1"), freePort()
	p.must(`l = listen(4, "0.0.0.0", %d, None, True)`, port)
	got := p.must(`forked(as_user, 65534, error_of, listen, 4, "0.0.0.0", %d, None, True)`, port)
	return gained(t, "another user's listen", got, `"EADDRINUSE"`, `"ok"`)
}

// reachDeferred connects to the own loopback while the container listens there, by a connect whose SYN is put off
// (TCP_FASTOPEN_CONNECT), closes the listener, and sends when a process of the node listens on the wildcard.
func reachDeferred(t *testing.T) string {
	setSysctl(t, "n1", "ipv4/tcp_fastopen", "3")
	t.Cleanup(func() { nodeExec(t, "n1", "ip", "tcp_metrics", "flush") }) // the cookie: later connects would send data in their SYN
	attacker, node, port := startPeer(t, "heddle", "n1/c1"), startPeer(t, "host", "n1/c1"), freePort()
	attacker.must(`l = tcp(4)`)
	attacker.must(`l.setsockopt(6, 23, 5)`) // TCP_FASTOPEN
	attacker.must(`l.bind(("127.0.0.1", %d))`, port)
	attacker.must(`l.listen(5)`)
	attacker.must(`c = tcp(4)`)
	attacker.must(`c.sendto(b"for the cookie", 0x20000000, ("127.0.0.1", %d))`, port) // MSG_FASTOPEN
	attacker.must(`a = l.accept()[0]`)
	attacker.must(`s = tcp(4)`)
	attacker.must(`s.setsockopt(6, 30, 1)`) // TCP_FASTOPEN_CONNECT
	attacker.must(`s.connect(("127.0.0.1", %d))`, port)
	attacker.must(`[x.close() for x in (l, a, c)] and None`)
	node.must(`l = bound(4, "0.0.0.0", %d, reuseaddr=True)`, port)
	node.must(`l.setsockopt(6, 23, 5)`)
	node.must(`l.listen(5)`)
	node.must(`l.settimeout(3)`)
	attacker.do(`error_of(s.send, b"deferred")`)
	return gained(t, "a process of the node read", node.do(`l.accept()[0].recv(100).decode()`), `{"error": "timed out"}`, `"deferred"`)
}
