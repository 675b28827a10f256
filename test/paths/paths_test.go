package test

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
)

// lastPort is the last port that freePort gave.
var lastPort atomic.Int32

func init() { lastPort.Store(20000) }

// freePort gives a port that no test used before: below the ephemeral ports, outside the direct ones.
func freePort() int {
	return int(lastPort.Add(1))
}

// place is where the two ends of a connection are.
type place struct {
	name           string
	client, server string // containers; "outside" for the host outside the overlay
	// target is what the client dials: a function, because addresses are known once the lab is up.
	target func(testing.TB) string
	// modes are the modes of client and server; the first pair is what the others must equal.
	modes [][2]string
	// ipv6 says that target is IPv6, and so is what the nodes must show of both ends.
	ipv6 bool
}

func overlayOf(container string) func(testing.TB) string {
	return func(t testing.TB) string { return address(t, "overlay", container) }
}

func underlayOf(container string) func(testing.TB) string {
	return func(t testing.TB) string { return address(t, "host", container) }
}

// gatewayOf is the overlay address of a container's node.
func gatewayOf(container string) func(testing.TB) string {
	return func(t testing.TB) string {
		p, err := netip.MustParseAddr(address(t, "overlay", container)).Prefix(24)
		if err != nil {
			t.Fatal(err)
		}
		return model.Gateway(p).String()
	}
}

func outsideTarget(t testing.TB) string {
	// 172.31.N.x is the fabric of the lab whose outside host is 198.18.N.1.
	n := netip.MustParseAddr(address(t, "host", "n1/c1")).As4()[2]
	return netip.AddrFrom4([4]byte{198, 18, n, 1}).String()
}

var (
	containers = [][2]string{{"overlay", "overlay"}, {"heddle", "heddle"}, {"heddle", "overlay"}, {"overlay", "heddle"}}
	alone      = [][2]string{{"overlay", "overlay"}, {"heddle", "heddle"}}
	fromHost   = [][2]string{{"host", "overlay"}, {"host", "heddle"}}
	toHost     = [][2]string{{"overlay", "host"}, {"heddle", "host"}}
)

var places = []place{
	{"other node", "n1/c1", "n2/c1", overlayOf("n2/c1"), containers, false},
	{"same node", "n1/c1", "n1/c2", overlayOf("n1/c2"), containers, false},
	{"own address", "n1/c1", "n1/c1", overlayOf("n1/c1"), alone, false},
	{"loopback", "n1/c1", "n1/c1", func(testing.TB) string { return "127.0.0.1" }, alone, false},
	{"from own node", "n1/c2", "n1/c1", overlayOf("n1/c1"), fromHost, false},
	{"from other node", "n2/c1", "n1/c1", overlayOf("n1/c1"), fromHost, false},
	{"own node underlay", "n1/c1", "n1/c2", underlayOf("n1/c1"), toHost, false},
	{"own node gateway", "n1/c1", "n1/c2", gatewayOf("n1/c1"), toHost, false},
	{"other node underlay", "n1/c1", "n2/c1", underlayOf("n2/c1"), toHost, false},
	{"other node gateway", "n1/c1", "n2/c1", gatewayOf("n2/c1"), toHost, false},
	{"outside", "n1/c1", "outside", outsideTarget, toHost, false},
}

// exchange is what a connection c-s does once it is there.
const exchange = `
server: who
client: names(s)
server: names(c)
client: send(s, 300000)
server: receive(c, 300000)
client: drained()
server: send(c, 70001)
client: receive(s, 70001)
server: drained()
look
client: s.shutdown(socket.SHUT_WR)
server: c.recv(1)
server: c.close()
client: s.recv(1)
client: s.close()
`

// script is what client and server do, a line each. Every answer is part of the trace.
type script struct {
	name  string
	text  string
	bound bool     // the client is bound before it connects
	fails bool     // errors are expected
	skip  []string // places it makes no sense at
}

var scripts = []script{
	{name: "ipv4", text: `
server: l = listen(4, "0.0.0.0", $port)
server: l.getsockname()
client: s = connect(4, "$target", $port)
server: c, who = l.accept()` + exchange},
	{name: "ipv4 to a given address", text: `
server: l = listen(4, "$target", $port)
server: l.getsockname()
client: s = connect(4, "$target", $port)
server: c, who = l.accept()` + exchange},
	{name: "v4-mapped client", text: `
server: l = listen(4, "0.0.0.0", $port)
client: s = connect(6, "::ffff:$target", $port)
server: c, who = l.accept()` + exchange},
	{name: "dual-stack listener, ipv4 client", text: `
server: l = listen(6, "::", $port)
server: l.getsockname()
client: s = connect(4, "$target", $port)
server: c, who = l.accept()` + exchange},
	{name: "dual-stack listener, v4-mapped client", text: `
server: l = listen(6, "::", $port)
client: s = connect(6, "::ffff:$target", $port)
server: c, who = l.accept()` + exchange},
	{name: "V6ONLY beside an ipv4 wildcard", text: `
server: l6 = listen(6, "::", $port, v6only=1)
server: l6.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
server: l = listen(4, "0.0.0.0", $port)
client: s = connect(4, "$target", $port)
server: c, who = l.accept()` + exchange + `
server: l6.close()`},
	// At loopback it has a test of its own, TestBoundLoopback.
	{name: "bound to a wildcard port", bound: true, skip: []string{"loopback"}, text: `
server: l = listen(4, "0.0.0.0", $port)
client: s = connect(4, "$target", $port, ("0.0.0.0", $source))
server: c, who = l.accept()` + exchange},
	{name: "bound to its own address", bound: true, skip: []string{"loopback", "from own node", "from other node"}, text: `
server: l = listen(4, "0.0.0.0", $port)
client: s = connect(4, "$target", $port, ("$client", 0))
server: c, who = l.accept()` + exchange},
	{name: "non-blocking", text: `
server: l = listen(4, "0.0.0.0", $port)
client: r, s = connect_polled(4, "$target", $port)
client: r
server: c, who = l.accept()` + exchange},
	{name: "refused", fails: true, text: `
client: connect(4, "$target", $port)
client: connect(6, "::ffff:$target", $port)
client: r, s = connect_polled(4, "$target", $port)
client: r
client: error_of(s.getpeername)
client: s.close()
client: s = tcp(4)
client: error_of(s.connect, ("$target", $port))
server: l = listen(4, "0.0.0.0", $port)
client: error_of(s.connect, ("$target", $port))
server: c, who = l.accept()
server: who[0]
client: send(s, 5000)
server: receive(c, 5000)`},
	{name: "reset", fails: true, text: `
server: l = listen(4, "0.0.0.0", $port)
client: s = connect(4, "$target", $port)
server: c, who = l.accept()
server: c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ONE_LINGER)
server: c.close()
client: s.recv(1)
client: error_of(s.send, b"x")`},
}

// TestPaths runs every script at every place, in every pair of modes, and compares what the programs saw;
// while a connection is open the nodes must name its path, addresses and bytes.
func TestPaths(t *testing.T) {
	for _, pl := range places {
		t.Run(pl.name, func(t *testing.T) {
			target := pl.target(t)
			peers := startPeers(t, pl)
			for _, sc := range scripts {
				if !slices.Contains(sc.skip, pl.name) {
					t.Run(sc.name, func(t *testing.T) { comparePath(t, pl, sc, target, peers) })
				}
			}
		})
	}
}

// startPeers starts the peers of a place, by container and mode.
func startPeers(t testing.TB, pl place) map[string]*peer {
	t.Helper()
	peers := map[string]*peer{}
	for _, m := range pl.modes {
		for i, container := range []string{pl.client, pl.server} {
			if key := container + m[i]; peers[key] == nil {
				peers[key] = startPeerAt(t, m[i], container)
			}
		}
	}
	return peers
}

// startPeerAt is startPeer that knows the host outside as well.
func startPeerAt(t testing.TB, mode, container string) *peer {
	t.Helper()
	if container == "outside" {
		return startOutside(t)
	}
	return startPeer(t, mode, container)
}

func comparePath(t *testing.T, pl place, sc script, target string, peers map[string]*peer) {
	var baseline string
	for _, m := range pl.modes {
		r := pathRun{
			place: pl, script: sc, clientMode: m[0], serverMode: m[1], target: target, port: freePort(), source: freePort(),
			client: peers[pl.client+m[0]].in(t), server: peers[pl.server+m[1]].in(t),
		}
		trace := r.run(t)
		if baseline == "" {
			baseline = trace
			if !sc.fails && strings.Contains(trace, `"error"`) {
				t.Errorf("%s -> %s fails itself:\n%s", m[0], m[1], trace)
			}
		} else if trace != baseline {
			t.Errorf("%s -> %s differs from %s -> %s.\nGot:\n%s\nwant:\n%s", m[0], m[1], pl.modes[0][0], pl.modes[0][1], trace, baseline)
		}
	}
}

// pathRun is one script at one place in one pair of modes.
type pathRun struct {
	place                  place
	script                 script
	clientMode, serverMode string
	target                 string
	port, source           int
	client, server         *peer
}

// run gives the trace, with ports by name.
func (r pathRun) run(t *testing.T) string {
	t.Helper()
	own := ""
	if r.clientMode != "host" {
		own = address(t, "overlay", r.place.client)
		if r.place.ipv6 {
			own = own6(t, r.place.client)
		}
	}
	fill := strings.NewReplacer("$target", r.target, "$port", fmt.Sprint(r.port), "$source", fmt.Sprint(r.source), "$client", own)
	for _, p := range []*peer{r.client, r.server} {
		p.do(`[globals().pop(v, None) for v in ("l", "l6", "c", "s", "who", "r", "sender")] and None`)
	}
	var trace []string
	for line := range strings.Lines(r.script.text) {
		line = strings.TrimSpace(line)
		who, code, _ := strings.Cut(line, ": ")
		switch who {
		case "":
		case "look":
			r.look(t)
		case "client":
			trace = append(trace, line+" => "+r.client.do("%s", fill.Replace(code)))
		case "server":
			trace = append(trace, line+" => "+r.server.do("%s", fill.Replace(code)))
		default:
			t.Fatalf("script %s: %q", r.script.name, line)
		}
		if t.Failed() {
			t.Logf("trace of %s -> %s:\n%s", r.clientMode, r.serverMode, strings.Join(trace, "\n"))
			t.FailNow()
		}
	}
	text := namePort(normalise(trace), r.port, "PORT")
	return namePort(text, r.source, "SOURCE")
}

// namePort puts a name in a port's place: where it stands by itself, not among the digits of a digest.
func namePort(text string, port int, name string) string {
	return regexp.MustCompile(fmt.Sprintf(`\b%d\b`, port)).ReplaceAllString(text, name)
}

// seen is one line of `heddle connections`.
type seen struct {
	Node string
	model.Connection
}

// connections lists a node's connections of one endpoint.
func connections(t testing.TB, container string, args ...string) []seen {
	t.Helper()
	node, _, _ := strings.Cut(container, "/")
	raw := heddle(t, append([]string{"connections", "--lab", labName, "--node", node, "--endpoint", container, "--output", "json"}, args...)...)
	var all []seen
	if err := json.Unmarshal([]byte(raw), &all); err != nil {
		t.Fatalf("connections: %v\n%s", err, raw)
	}
	return all
}

// acked is how long the last acknowledgement of a connection may take.
const acked = 3 * time.Second

// awaitConnection waits until a node lists the connection with these ports and byte counts.
func awaitConnection(t testing.TB, container string, local, remote uint16, sent, received uint64) seen {
	t.Helper()
	deadline := time.Now().Add(acked)
	for {
		all := connections(t, container)
		for _, c := range all {
			if c.Local.Port() == local && c.Remote.Port() == remote && c.BytesSent == sent && c.BytesReceived == received {
				return c
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("no connection of %s from port %d to %d with %d bytes sent, %d received, in %+v", container, local, remote, sent, received, all)
		}
	}
}

// look checks what the nodes say of the open connection.
func (r pathRun) look(t *testing.T) {
	t.Helper()
	sport := r.client.portOf("s")
	if r.place.inPod() {
		r.lookPod(t, sport)
		return
	}
	if r.place.ipv6 {
		r.lookIPv6(t, sport)
		return
	}
	if r.clientMode == "heddle" {
		c := awaitConnection(t, r.place.client, sport, uint16(r.port), 300000, 70001)
		r.checkClient(t, c)
	}
	if r.serverMode == "heddle" {
		c := awaitConnection(t, r.place.server, uint16(r.port), sport, 70001, 300000)
		r.checkServer(t, c)
	}
}

func (r pathRun) checkClient(t *testing.T, c seen) {
	t.Helper()
	own, underlay := r.client.addr("overlay", r.place.client), r.client.addr("host", r.place.client)
	path, reason := model.PathDirect, ""
	local, nodeLocal := own, own
	remote, nodeRemote := netip.MustParseAddr(r.target), netip.MustParseAddr(r.target)
	switch r.place.name {
	case "other node":
		if r.script.bound {
			path, reason = model.PathOverlay, "fallback_bound"
			break
		}
		nodeLocal, nodeRemote = underlay, r.client.addr("host", r.place.server)
	case "same node":
		path = model.PathLocal
		if r.serverMode == "overlay" {
			path, reason = model.PathOverlay, "fallback_local_plain"
		}
	case "own address":
		path = model.PathLocal
	case "loopback":
		path, local = model.PathLoopback, remote
		r.checkAliases(t, c)
		nodeLocal, nodeRemote = c.NodeLocal.Addr(), c.NodeRemote.Addr()
	case "own node underlay", "own node gateway":
		path = model.PathNode
	case "other node gateway":
		path, reason = model.PathOverlay, "fallback_peer_plain"
	case "outside", "other node underlay":
		path = model.PathOutside
		if !r.script.bound {
			nodeLocal = underlay
		}
	}
	if c.Path != path || c.Reason != reason || c.State != "ESTABLISHED" {
		t.Errorf("client's path %s, reason %q, %s; want %s, %q, ESTABLISHED", c.Path, c.Reason, c.State, path, reason)
	}
	checkAddrs(t, "client's", c, local, remote, nodeLocal, nodeRemote)
	direct := model.DefaultDirectPorts.Contains(c.NodeRemote.Port())
	if path == model.PathDirect != direct {
		t.Errorf("path %s to port %d of the node", path, c.NodeRemote.Port())
	}
}

func (r pathRun) checkServer(t *testing.T, c seen) {
	t.Helper()
	own := r.server.addr("overlay", r.place.server)
	path := model.PathDirect
	local, nodeLocal := own, own
	remote := c.Remote.Addr() // the trace has it, unless the case says otherwise
	nodeRemote := remote
	switch {
	case r.place.name == "other node" && r.clientMode == "heddle" && !r.script.bound:
		remote = r.server.addr("overlay", r.place.client)
		nodeLocal, nodeRemote = r.server.addr("host", r.place.server), r.server.addr("host", r.place.client)
	case r.place.name == "other node", r.place.name == "same node" && r.clientMode == "overlay", r.place.name == "from other node":
		path = model.PathOverlay
	case r.place.name == "from own node":
		path = model.PathNode
	case r.place.name == "loopback":
		path = model.PathLoopback
		r.checkAliases(t, c)
		local, nodeLocal, nodeRemote = netip.MustParseAddr("127.0.0.1"), c.NodeLocal.Addr(), c.NodeRemote.Addr()
	default:
		path = model.PathLocal
	}
	if c.Path != path || c.Reason != "" || c.State != "ESTABLISHED" {
		t.Errorf("server's path %s, reason %q, %s; want %s, none, ESTABLISHED", c.Path, c.Reason, c.State, path)
	}
	checkAddrs(t, "server's", c, local, remote, nodeLocal, nodeRemote)
}

func checkAddrs(t *testing.T, whose string, c seen, local, remote, nodeLocal, nodeRemote netip.Addr) {
	t.Helper()
	for _, a := range []struct {
		what string
		got  netip.AddrPort
		want netip.Addr
	}{{"local", c.Local, local}, {"remote", c.Remote, remote}, {"node local", c.NodeLocal, nodeLocal}, {"node remote", c.NodeRemote, nodeRemote}} {
		if a.got.Addr() != a.want {
			t.Errorf("%s %s address %s, want %s (%+v)", whose, a.what, a.got, a.want, c)
		}
	}
}

// checkAliases: a loopback connection lies on an alias or, with a wildcard listener, on the overlay address.
func (r pathRun) checkAliases(t *testing.T, c seen) {
	t.Helper()
	aliases := netip.MustParsePrefix("127.128.0.0/9")
	own := r.client.addr("overlay", r.place.client)
	for _, a := range []netip.Addr{c.NodeLocal.Addr(), c.NodeRemote.Addr()} {
		if !aliases.Contains(a) && a != own {
			t.Errorf("node address %s of a loopback connection: want an alias or %s", a, own)
		}
	}
}
