package paths

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// loopbackScripts are every way from a container to itself that TestPaths does not have.
func loopbackScripts() []script {
	accept := `
client: s = connect($how)
server: c, who = l.accept()
server: who
client: names(s)
server: names(c)
client: send(s, 5000)
server: receive(c, 5000)`
	sc := func(name, listen, connect string) script {
		return script{name: name, text: "server: l = listen(" + listen + ")\nserver: l.getsockname()" + strings.ReplaceAll(accept, "$how", connect)}
	}
	refused := func(name, listen, connect string) script {
		return script{name: name, fails: true, text: "server: l = listen(" + listen + ")\nclient: connect(" + connect + ")"}
	}
	return []script{
		sc("::1 to ::", `6, "::", $port`, `6, "::1", $port`),
		sc("::1 to ::1", `6, "::1", $port`, `6, "::1", $port`),
		sc("::1 to V6ONLY", `6, "::", $port, v6only=1`, `6, "::1", $port`),
		sc("127.0.0.1 to ::", `6, "::", $port`, `4, "127.0.0.1", $port`),
		sc("mapped 127.0.0.1 to ::", `6, "::", $port`, `6, "::ffff:127.0.0.1", $port`),
		sc("127.0.0.1 to 127.0.0.1", `4, "127.0.0.1", $port`, `4, "127.0.0.1", $port`),
		sc("0.0.0.0 to 127.0.0.1", `4, "127.0.0.1", $port`, `4, "0.0.0.0", $port`),
		sc(":: to ::1", `6, "::1", $port`, `6, "::", $port`),
		sc("own address from ::", `6, "::", $port`, `4, "$target", $port`),
		refused("127.0.0.1 to own address", `4, "$target", $port`, `4, "127.0.0.1", $port`),
		refused("own address to 127.0.0.1", `4, "127.0.0.1", $port`, `4, "$target", $port`),
		refused("own address to V6ONLY", `6, "::", $port, v6only=1`, `4, "$target", $port`),
		refused("::1 to 0.0.0.0", `4, "0.0.0.0", $port`, `6, "::1", $port`),
		refused("::1 to 127.0.0.1", `4, "127.0.0.1", $port`, `6, "::1", $port`),
	}
}

// TestLoopback checks ::1 and 127.0.0.0/8, which TestPaths has only by 127.0.0.1.
func TestLoopback(t *testing.T) {
	compareAt(t, lab.Place{Name: "loopback", Client: "n1/c1", Server: "n1/c1", Target: lab.OverlayOf("n1/c1"), Modes: lab.SameModes}, loopbackScripts()...)
}

// TestNames checks the names of sockets that are not connected.
func TestNames(t *testing.T) {
	compareAt(t, lab.Place{Name: "names", Client: "n1/c1", Server: "n1/c1", Target: lab.OverlayOf("n1/c1"), Modes: lab.SameModes},
		script{name: "fresh", text: `
client: s = tcp(4)
client: s.getsockname()
client: error_of(s.getpeername)
client: s = tcp(6)
client: s.getsockname()
client: error_of(s.getpeername)`},
		// Ports of the kernel's choice are looked at, not named: two may be the same by chance.
		script{name: "bound", text: `
client: s = tcp(4)
client: s.bind(("0.0.0.0", $port))
client: s.getsockname()
client: error_of(s.bind, ("0.0.0.0", $port))
client: error_of(tcp(4).bind, ("0.0.0.0", $port))
client: error_of(tcp(4).bind, ("$client", $port))
client: error_of(tcp(6).bind, ("::", $port))
client: s.listen(1)
client: s.getsockname()
client: error_of(s.getpeername)
client: s = tcp(4)
client: s.bind(("$client", 0))
client: [x > 0 if i == 1 else x for i, x in enumerate(s.getsockname())]
client: s = tcp(6)
client: s.bind(("::", 0))
client: [x > 0 if i == 1 else x for i, x in enumerate(s.getsockname())]
client: s = tcp(6)
client: s.bind(("::ffff:$client", 0))
client: [x > 0 if i == 1 else x for i, x in enumerate(s.getsockname())]
client: s = tcp(6)
client: s.bind(("::1", 0))
client: [x > 0 if i == 1 else x for i, x in enumerate(s.getsockname())]
client: s = tcp(4)
client: s.bind(("127.0.0.5", 0))
client: [x > 0 if i == 1 else x for i, x in enumerate(s.getsockname())]`},
		script{name: "bound by connect and listen", text: `
client: s = tcp(4)
client: s.listen(1)
client: s.getsockname()[0]
client: s = tcp(6)
client: s.listen(1)
client: s.getsockname()[0]`},
		script{name: "wrong", text: `
client: error_of(tcp(4).connect, ("0.0.0.0", 1))
client: error_of(tcp(6).connect, ("2001:db8::1", 80))
client: error_of(tcp(4).bind, ("192.0.2.1", 0))
client: error_of(tcp(6).bind, ("2001:db8::1", 0))
client: error_of(tcp(4).listen, -1)
client: error_of(tcp(4).shutdown, 2)
client: error_of(tcp(4).accept)
client: error_of(tcp(4).send, b"x")
client: error_of(tcp(4).recv, 1)
client: error_of(socket.socket, socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_UDP)
client: error_of(socket.socket, socket.AF_INET, 77)`},
	)
}

// TestReconnect connects one socket several times: a connect that fails must leave nothing behind.
func TestReconnect(t *testing.T) {
	again := `
server: l = listen(4, "0.0.0.0", $port)
client: error_of(s.connect, ("$target", $port))
server: c, who = l.accept()
server: who
client: names(s)
server: names(c)
client: send(s, 5000)
server: receive(c, 5000)`
	after := func(name, first string) script {
		return script{name: name, text: "client: s = tcp(4)\nclient: error_of(s.connect, (\"" + first + "\", $source))\nclient: error_of(s.getpeername)" + again}
	}
	for _, pl := range lab.Places[:3] {
		t.Run(pl.Name, func(t *testing.T) {
			compareAt(t, pl,
				after("refused by loopback", "127.0.0.1"),
				after("refused by itself", "$client"),
				after("refused by the target", "$target"),
				script{name: "second connect", text: "client: s = tcp(4)" + again + "\nclient: error_of(s.connect, (\"$target\", $port))\nclient: names(s)"},
			)
		})
	}
}

// TestBoundLoopback: which source a socket has that is bound before it connects to its own
// container.
func TestBoundLoopback(t *testing.T) {
	var scripts []script
	for _, listen := range []string{"0.0.0.0", "127.0.0.1", "$client"} {
		for _, bind := range []string{"0.0.0.0", "127.0.0.1", "127.0.0.7", "$client"} {
			for _, connect := range []string{"127.0.0.1", "$client"} {
				scripts = append(scripts, script{name: bind + " to " + connect + ", listener at " + listen, fails: true, text: `
server: l = listen(4, "` + listen + `", $port)
server: l.settimeout(0.5)
client: s = tcp(4)
client: s.bind(("` + bind + `", 0))
client: s.settimeout(1)
client: error_of(s.connect, ("` + connect + `", $port))
server: r = error_of(lambda: globals().update(c=l.accept()[0]))
server: r
client: [s.getsockname(), c.getsockname(), c.getpeername()] if r == "ok" else r
client: send(s, 5000) if r == "ok" else r
client: receive(c, 5000) if r == "ok" else r`})
			}
		}
	}
	compareAt(t, lab.Place{Name: "itself", Client: "n1/c1", Server: "n1/c1", Target: lab.OverlayOf("n1/c1"), Modes: lab.SameModes}, scripts...)
}

// TestLoopbackSource: nobody beyond the container may take a loopback address for its own.
func TestLoopbackSource(t *testing.T) {
	for _, pl := range lab.Places {
		if pl.Client != "n1/c1" || pl.Server == "n1/c1" {
			continue
		}
		t.Run(pl.Name, func(t *testing.T) {
			compareAt(t, pl, script{name: "bound to 127.0.0.1", fails: true, text: `
server: l = listen(4, "0.0.0.0", $port)
client: s = tcp(4)
client: s.bind(("127.0.0.1", 0))
client: error_of(s.connect, ("$target", $port))`})
		})
	}
}

// TestLoopbackIsolation: what a container listens on at its loopback is its own, by whatever
// address another asks for it.
func TestLoopbackIsolation(t *testing.T) {
	port := lab.FreePort()
	for _, mode := range lab.Modes {
		t.Run(mode, func(t *testing.T) {
			owner := lab.StartPeer(t, mode, "n1/c2")
			owner.Must(`l = listen(4, "127.0.0.1", %d)`, port)
			owner.Must(`l6 = listen(6, "::1", %d)`, port)
			owner.Must(`s, s6 = connect(4, "127.0.0.1", %d), connect(6, "::1", %d)`, port, port)
			targets := []string{"127.0.0.1", "127.0.0.2", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::", lab.Address(t, mode, "n1/c2")}
			for id := range model.EndpointID(8) {
				for _, a := range lab.LoopbackAliases(id) {
					targets = append(targets, a.String(), "::ffff:"+a.String())
				}
			}
			for _, container := range []string{"n1/c1", "n2/c1"} {
				other := lab.StartPeer(t, mode, container)
				for _, target := range targets {
					family := 4
					if netip.MustParseAddr(target).Is6() {
						family = 6
					}
					if got := other.Do(`connect(%d, %q, %d)`, family, target, port); got != `{"error": "ECONNREFUSED"}` {
						t.Errorf("%s -> %s: %s, want ECONNREFUSED", container, target, got)
					}
				}
			}
			owner.Expect(`["ok", "ok"]`, `[error_of(lambda: l.accept()), error_of(lambda: l6.accept())]`)
			owner.Must(`l.setblocking(False)`)
			owner.Expect(`"EAGAIN"`, `error_of(l.accept)`)
		})
	}
}

// TestUnassigned connects to overlay addresses nobody has. On the caller's node the errno is the
// same; on another node a refusal comes instead of "no route", see docs/differences.md.
func TestUnassigned(t *testing.T) {
	for _, c := range []struct {
		node, container string
		want            map[string]string
	}{
		{"own node", "n1/c1", map[string]string{"overlay": "EHOSTUNREACH", "heddle": "EHOSTUNREACH"}},
		{"other node", "n2/c1", map[string]string{"overlay": "EHOSTUNREACH", "heddle": "ECONNREFUSED"}},
	} {
		prefix, err := netip.MustParseAddr(lab.Address(t, "overlay", c.container)).Prefix(24)
		testutil.NoError(t, err)
		base := prefix.Addr().As4()
		base[3] = 200
		for _, mode := range lab.Modes {
			t.Run(c.node+" "+mode, func(t *testing.T) {
				p := lab.StartPeer(t, mode, "n1/c1")
				p.Must("s = tcp(4)")
				p.Must("s.settimeout(10)")
				p.Expect(fmt.Sprintf("%q", c.want[mode]), `error_of(s.connect, (%q, 80))`, netip.AddrFrom4(base))
			})
		}
	}
}

// TestCounters: each path counts under its reason, on the node it concerns.
func TestCounters(t *testing.T) {
	for _, c := range []struct {
		clientMode, client, serverMode, server, target, node, reason string
	}{
		{"heddle", "n1/c1", "heddle", "n2/c1", "", "n1", "connect_direct"},
		{"heddle", "n1/c1", "heddle", "n2/c1", "", "n2", "accept_direct"},
		{"heddle", "n1/c1", "overlay", "n2/c1", "", "n2", "relay_opened"},
		{"overlay", "n1/c1", "heddle", "n2/c1", "", "n2", "deliver_overlay"},
		{"overlay", "n1/c1", "heddle", "n2/c1", "", "n2", "accept_local"},
		{"heddle", "n1/c1", "heddle", "n1/c2", "", "n1", "connect_local"},
		{"heddle", "n1/c1", "overlay", "n1/c2", "", "n1", "fallback_local_plain"},
		{"overlay", "n1/c1", "heddle", "n1/c2", "", "n1", "deliver_overlay"},
		{"host", "n1/c1", "heddle", "n1/c2", "", "n1", "deliver_node"},
		{"heddle", "n1/c1", "heddle", "n1/c1", "127.0.0.1", "n1", "connect_loopback"},
		{"heddle", "n1/c1", "host", "n1/c1", "", "n1", "connect_node"},
		{"heddle", "n1/c1", "host", "n2/c1", "", "n1", "connect_outside"},
	} {
		t.Run(fmt.Sprintf("%s %s to %s %s %s %s", c.clientMode, c.client, c.serverMode, c.server, c.target, c.reason), func(t *testing.T) {
			target := c.target
			if target == "" {
				target = lab.Address(t, c.serverMode, c.server)
			}
			port := lab.FreePort()
			client, server := lab.StartPeer(t, c.clientMode, c.client), lab.StartPeer(t, c.serverMode, c.server)
			server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
			before := lab.Counters(t, c.node)[c.reason]
			client.Must(`s = connect(4, %q, %d)`, target, port)
			server.Must(`c, who = l.accept()`)
			if after := lab.Counters(t, c.node)[c.reason]; after <= before {
				t.Errorf("%s of %s stayed %d", c.reason, c.node, before)
			}
		})
	}
}
