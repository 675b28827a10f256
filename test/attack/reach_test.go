package attack

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
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
	stranger := lab.Forger(t, lab.StartOutside(t))
	node, victim := lab.Address(t, "host", "n2/c1"), lab.Address(t, "heddle", "n2/c1")
	a := netip.MustParseAddr(lab.Address(t, "host", "n1/c1")).As4()
	a[3] = 250
	counts := func() (dropped, taken uint64) {
		c := lab.Counters(t, "n2")
		return c["drop_unknown_node"], c["relay_opened"]
	}
	dropped, taken := counts()
	stranger.Must(`forge(syn(%q, %d, %q, %d, heddle_option(%d, %q, %q, %d)), %q)`, netip.AddrFrom4(a), lab.FreePort(), node,
		model.DefaultDirectPorts.First+7, lab.Numbers(t).ID, lab.Address(t, "heddle", "n1/c1"), victim, lab.FreePort(), node)
	var got string
	testutil.Eventually(t, "the SYN to be dropped or taken", func() (bool, string) {
		d, n := counts()
		got = fmt.Sprintf("dropped %d, taken %d", d-dropped, n-taken)
		return d+n > dropped+taken, got
	})
	return gained(t, "the SYN was", got, "dropped 1, taken 0", "dropped 0, taken 1")
}

// connects reports what comes of a connect from a container to addr:port, where a process of the
// node accepts.
func connects(t *testing.T, addr string, port int) string {
	attacker := lab.StartPeer(t, "heddle", "n1/c1")
	return gained(t, "connect to "+addr, attacker.Do(`error_of(connect, 4, %q, %d)`, addr, port), `"ECONNREFUSED"`, `"ok"`)
}

// reachWildcard connects to a port of another container where only a process of its node listens,
// on all addresses.
func reachWildcard(t *testing.T) string {
	node, port := lab.StartPeer(t, "host", "n2/c1"), lab.FreePort()
	node.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	return connects(t, lab.Address(t, "heddle", "n2/c1"), port)
}

// reachByLoopback connects to the container's own loopback, which on the node is an address like
// any other.
func reachByLoopback(t *testing.T) string {
	node, port := lab.StartPeer(t, "host", "n1/c1"), lab.FreePort()
	node.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	return connects(t, "127.0.0.1", port)
}

// reachNodeLoopback sends a datagram to a process of the node that is bound to 127.0.0.1.
func reachNodeLoopback(t *testing.T) string {
	node, attacker, port := lab.StartPeer(t, "host", "n1/c1"), lab.Forger(t, lab.StartPeer(t, "heddle", "n1/c1")), lab.FreePort()
	own := lab.Address(t, "heddle", "n1/c1")
	route, err := exec.Command("ip", "netns", "exec", lab.Name+"-n1", "sh", "-c", "cat /sys/class/net/$(ip -o route get "+own+" | sed 's/.* dev \\([^ ]*\\).*/\\1/')/address").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, route)
	}
	node.Must(`u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)`)
	node.Must(`u.bind(("127.0.0.1", %d))`, port)
	before := lab.Counters(t, "n1")["drop_forged_loopback"]
	attacker.Must(`forge_frame(udp(%q, 5, "127.0.0.1", %d, b"forged"), "eth0", %q)`, own, port, strings.TrimSpace(string(route)))
	node.Must(`u.setblocking(False)`)
	var got string
	testutil.Eventually(t, "the datagram to be dropped or to arrive", func() (bool, string) {
		came := node.Do(`u.recv(100).decode()`)
		dropped := lab.Counters(t, "n1")["drop_forged_loopback"] - before
		got = fmt.Sprintf("%s, dropped %d", came, dropped)
		return came == `"forged"` || dropped > 0, got
	})
	return gained(t, "the node's process read", got, `{"error": "EAGAIN"}, dropped 1`, `"forged", dropped 0`)
}

// joinGroup listens beside root's listener as another user, to get some of its connections.
func joinGroup(t *testing.T) string {
	p, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	p.Must(`l = listen(4, "0.0.0.0", %d, None, True)`, port)
	got := p.Must(`forked(as_user, 65534, error_of, listen, 4, "0.0.0.0", %d, None, True)`, port)
	return gained(t, "another user's listen", got, `"EADDRINUSE"`, `"ok"`)
}

// reachDeferred connects to the own loopback while the container listens there, by a connect whose
// SYN is put off (TCP_FASTOPEN_CONNECT), closes the listener, and sends when a process of the node
// listens on the wildcard.
func reachDeferred(t *testing.T) string {
	lab.SetSysctl(t, "n1", "ipv4/tcp_fastopen", "3")
	t.Cleanup(func() { lab.InNode(t, "n1", "ip", "tcp_metrics", "flush") }) // the cookie: later connects would send data in their SYN
	attacker, node, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "host", "n1/c1"), lab.FreePort()
	attacker.Must(`l = tcp(4)`)
	attacker.Must(`l.setsockopt(6, 23, 5)`) // TCP_FASTOPEN
	attacker.Must(`l.bind(("127.0.0.1", %d))`, port)
	attacker.Must(`l.listen(5)`)
	attacker.Must(`c = tcp(4)`)
	attacker.Must(`c.sendto(b"for the cookie", 0x20000000, ("127.0.0.1", %d))`, port) // MSG_FASTOPEN
	attacker.Must(`a = l.accept()[0]`)
	attacker.Must(`s = tcp(4)`)
	attacker.Must(`s.setsockopt(6, 30, 1)`) // TCP_FASTOPEN_CONNECT
	attacker.Must(`s.connect(("127.0.0.1", %d))`, port)
	attacker.Must(`[x.close() for x in (l, a, c)] and None`)
	node.Must(`l = bound(4, "0.0.0.0", %d, reuseaddr=True)`, port)
	node.Must(`l.setsockopt(6, 23, 5)`)
	node.Must(`l.listen(5)`)
	node.Must(`l.settimeout(3)`)
	attacker.Do(`error_of(s.send, b"deferred")`)
	return gained(t, "a process of the node read", node.Do(`l.accept()[0].recv(100).decode()`), `{"error": "timed out"}`, `"deferred"`)
}
