package paths

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
	"heddle.dev/heddle/test/lab"
)

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

var scripts = append([]script{
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
}, inFamily("4", "0.0.0.0", `connect(6, "::ffff:$target", $port)`)...)

// inFamily are scripts that both families have. also is one more way to connect that is refused, ""
// if there is none.
func inFamily(family, wildcard, also string) []script {
	if also != "" {
		also = "client: " + also
	}
	fill := strings.NewReplacer("$family", family, "$any", wildcard, "$also", also)
	out := []script{
		{name: "non-blocking", text: `
server: l = listen($family, "$any", $port)
client: r, s = connect_polled($family, "$target", $port)
client: r
server: c, who = l.accept()` + exchange},
		{name: "refused", fails: true, text: `
client: connect($family, "$target", $port)
$also
client: r, s = connect_polled($family, "$target", $port)
client: r
client: error_of(s.getpeername)
client: s.close()
client: s = tcp($family)
client: error_of(s.connect, ("$target", $port))
server: l = listen($family, "$any", $port)
client: error_of(s.connect, ("$target", $port))
server: c, who = l.accept()
server: who[0]
client: send(s, 5000)
server: receive(c, 5000)`},
		{name: "reset", fails: true, text: `
server: l = listen($family, "$any", $port)
client: s = connect($family, "$target", $port)
server: c, who = l.accept()
server: c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ONE_LINGER)
server: c.close()
client: s.recv(1)
client: error_of(s.send, b"x")`},
	}
	for i := range out {
		out[i].text = fill.Replace(out[i].text)
	}
	return out
}

// TestPaths runs every script at every place, in every pair of modes, and compares what the
// programs saw; while a connection is open the nodes must name its path, addresses and bytes.
func TestPaths(t *testing.T) {
	for _, pl := range lab.Places {
		t.Run(pl.Name, func(t *testing.T) { compareAt(t, pl, scripts...) })
	}
}

// TestPathsIPv6 is TestPaths for IPv6 overlay addresses.
func TestPathsIPv6(t *testing.T) {
	for _, pl := range places6 {
		t.Run(pl.Name, func(t *testing.T) { compareAt(t, pl, scripts6...) })
	}
}

// compareAt runs scripts at a place in every pair of its modes and compares the traces.
func compareAt(t *testing.T, pl lab.Place, scripts ...script) {
	t.Helper()
	target := pl.Target(t)
	peers := startPeers(t, pl)
	for _, sc := range scripts {
		if !slices.Contains(sc.skip, pl.Name) {
			t.Run(sc.name, func(t *testing.T) { comparePath(t, pl, sc, target, peers) })
		}
	}
}

// startPeers starts the peers of a place, by container and mode.
func startPeers(t testing.TB, pl lab.Place) map[string]*lab.Peer {
	t.Helper()
	peers := map[string]*lab.Peer{}
	for _, m := range pl.Modes {
		for i, container := range []string{pl.Client, pl.Server} {
			if key := container + m[i]; peers[key] == nil {
				peers[key] = lab.StartPeerAt(t, m[i], container)
			}
		}
	}
	return peers
}

func comparePath(t *testing.T, pl lab.Place, sc script, target string, peers map[string]*lab.Peer) {
	var baseline string
	for _, m := range pl.Modes {
		r := pathRun{
			place: pl, script: sc, clientMode: m[0], serverMode: m[1], target: target, port: lab.FreePort(), source: lab.FreePort(),
			client: peers[pl.Client+m[0]].In(t), server: peers[pl.Server+m[1]].In(t),
		}
		trace := r.run(t)
		if baseline == "" {
			baseline = trace
			if !sc.fails && strings.Contains(trace, `"error"`) {
				t.Errorf("%s -> %s fails itself:\n%s", m[0], m[1], trace)
			}
		} else if trace != baseline {
			t.Errorf("%s -> %s differs from %s -> %s.\nGot:\n%s\nwant:\n%s", m[0], m[1], pl.Modes[0][0], pl.Modes[0][1], trace, baseline)
		}
	}
}

// pathRun is one script at one place in one pair of modes.
type pathRun struct {
	place                  lab.Place
	script                 script
	clientMode, serverMode string
	target                 string
	port, source           int
	client, server         *lab.Peer
}

// run gives the trace, with ports by name.
func (r pathRun) run(t *testing.T) string {
	t.Helper()
	own := ""
	if r.clientMode != "host" {
		own = lab.Address(t, "overlay", r.place.Client)
		if r.place.IPv6 {
			own = lab.Overlay6(t, r.place.Client)
		}
	}
	fill := strings.NewReplacer("$target", r.target, "$port", fmt.Sprint(r.port), "$source", fmt.Sprint(r.source), "$client", own)
	for _, p := range []*lab.Peer{r.client, r.server} {
		p.Do(`[globals().pop(v, None) for v in ("l", "l6", "c", "s", "who", "r", "sender")] and None`)
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
			trace = append(trace, line+" => "+r.client.Do("%s", fill.Replace(code)))
		case "server":
			trace = append(trace, line+" => "+r.server.Do("%s", fill.Replace(code)))
		default:
			t.Fatalf("script %s: %q", r.script.name, line)
		}
		if t.Failed() {
			t.Logf("trace of %s -> %s:\n%s", r.clientMode, r.serverMode, strings.Join(trace, "\n"))
			t.FailNow()
		}
	}
	text := namePort(lab.Normalise(trace), r.port, "PORT")
	return namePort(text, r.source, "SOURCE")
}

// namePort puts a name in a port's place: where it stands by itself, not among the digits of a
// digest.
func namePort(text string, port int, name string) string {
	return regexp.MustCompile(fmt.Sprintf(`\b%d\b`, port)).ReplaceAllString(text, name)
}

// look checks what the nodes say of the open connection.
func (r pathRun) look(t *testing.T) {
	t.Helper()
	sport := r.client.PortOf("s")
	if r.place.InPod() {
		r.lookPod(t, sport)
		return
	}
	if r.place.IPv6 {
		r.lookIPv6(t, sport)
		return
	}
	if r.clientMode == "heddle" {
		c := lab.AwaitConnection(t, r.place.Client, sport, uint16(r.port), 300000, 70001)
		r.checkClient(t, c)
	}
	if r.serverMode == "heddle" {
		c := lab.AwaitConnection(t, r.place.Server, uint16(r.port), sport, 70001, 300000)
		r.checkServer(t, c)
	}
}

func (r pathRun) checkClient(t *testing.T, c lab.ListedConnection) {
	t.Helper()
	own, underlay := r.client.Addr("overlay", r.place.Client), r.client.Addr("host", r.place.Client)
	path, reason := names.PathDirect, ""
	local, nodeLocal := own, own
	remote, nodeRemote := netip.MustParseAddr(r.target), netip.MustParseAddr(r.target)
	switch r.place.Name {
	case "other node":
		if r.script.bound {
			path, reason = names.PathOverlay, "fallback_bound"
			break
		}
		nodeLocal, nodeRemote = underlay, r.client.Addr("host", r.place.Server)
	case "same node":
		path = names.PathLocal
		if r.serverMode == "overlay" {
			path, reason = names.PathOverlay, "fallback_local_plain"
		}
	case "own address":
		path = names.PathLocal
	case "loopback":
		path, local = names.PathLoopback, remote
		r.checkAliases(t, c)
		nodeLocal, nodeRemote = c.NodeLocal.Addr(), c.NodeRemote.Addr()
	case "own node underlay", "own node gateway":
		path = names.PathNode
	case "other node gateway":
		path, reason = names.PathOverlay, "fallback_peer_plain"
	case "outside", "other node underlay":
		path = names.PathOutside
		if !r.script.bound {
			nodeLocal = underlay
		}
	}
	if c.Path != path || c.Reason != reason || c.State != "ESTABLISHED" {
		t.Errorf("client's path %s, reason %q, %s; want %s, %q, ESTABLISHED", c.Path, c.Reason, c.State, path, reason)
	}
	checkAddrs(t, "client's", c, local, remote, nodeLocal, nodeRemote)
	direct := model.DefaultDirectPorts.Contains(c.NodeRemote.Port())
	if path == names.PathDirect != direct {
		t.Errorf("path %s to port %d of the node", path, c.NodeRemote.Port())
	}
}

func (r pathRun) checkServer(t *testing.T, c lab.ListedConnection) {
	t.Helper()
	own := r.server.Addr("overlay", r.place.Server)
	path := names.PathDirect
	local, nodeLocal := own, own
	remote := c.Remote.Addr() // the trace has it, unless the case says otherwise
	nodeRemote := remote
	switch {
	case r.place.Name == "other node" && r.clientMode == "heddle" && !r.script.bound:
		remote = r.server.Addr("overlay", r.place.Client)
		nodeLocal, nodeRemote = r.server.Addr("host", r.place.Server), r.server.Addr("host", r.place.Client)
	case r.place.Name == "other node", r.place.Name == "same node" && r.clientMode == "overlay", r.place.Name == "from other node":
		path = names.PathOverlay
	case r.place.Name == "from own node":
		path = names.PathNode
	case r.place.Name == "loopback":
		path = names.PathLoopback
		r.checkAliases(t, c)
		local, nodeLocal, nodeRemote = netip.MustParseAddr("127.0.0.1"), c.NodeLocal.Addr(), c.NodeRemote.Addr()
	default:
		path = names.PathLocal
	}
	if c.Path != path || c.Reason != "" || c.State != "ESTABLISHED" {
		t.Errorf("server's path %s, reason %q, %s; want %s, none, ESTABLISHED", c.Path, c.Reason, c.State, path)
	}
	checkAddrs(t, "server's", c, local, remote, nodeLocal, nodeRemote)
}

func checkAddrs(t *testing.T, whose string, c lab.ListedConnection, local, remote, nodeLocal, nodeRemote netip.Addr) {
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

// checkAliases: a loopback connection lies on an alias or, with a wildcard listener, on the overlay
// address.
func (r pathRun) checkAliases(t *testing.T, c lab.ListedConnection) {
	t.Helper()
	aliases := netip.MustParsePrefix("127.128.0.0/9")
	own := r.client.Addr("overlay", r.place.Client)
	for _, a := range []netip.Addr{c.NodeLocal.Addr(), c.NodeRemote.Addr()} {
		if !aliases.Contains(a) && a != own {
			t.Errorf("node address %s of a loopback connection: want an alias or %s", a, own)
		}
	}
}
