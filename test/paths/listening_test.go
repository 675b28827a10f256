package paths

import (
	"fmt"
	"strings"
	"testing"

	"heddle.dev/heddle/test/lab"
)

// closing are connects that wait for a listener with a full queue when that closes, or is shut
// down.
func closing(family, listens string) string {
	return `
server: l, m = [` + listens + ` for p in ($port, $source)]
client: s, c = [connect(` + family + `, "$target", p) for p in ($port, $source)]
client: r, sender = [pending(` + family + `, "$target", p) for p in ($port, $source)]
client: [told(w, 100) for w in (r, sender)]
server: l.close()
server: m.shutdown(socket.SHUT_RDWR)
client: [told(w) for w in (r, sender)]
client: [error_of(w.recv, 1) for w in (s, c)]
server: m.close()`
}

// TestListenerCloses: whose connect waits for a listener learns that it is gone, on every path.
func TestListenerCloses(t *testing.T) {
	for _, c := range []struct {
		name, family, listens string
		places                []lab.Place
	}{
		{"ipv4", "4", `listen(4, "0.0.0.0", p, backlog=0)`, lab.Places},
		{"ipv4 to a dual-stack listener", "4", `listen(6, "::", p, backlog=0)`, lab.Places},
		{"ipv6", "6", `listen(6, "::", p, backlog=0)`, places6},
		{"ipv6 only", "6", `listen(6, "::", p, 1, backlog=0)`, places6},
	} {
		t.Run(c.name, func(t *testing.T) {
			comparePlaces(t, c.places, script{name: "a listener closes", fails: true, text: closing(c.family, c.listens)})
		})
	}
}

// TestListenerClosesInHandshake: so does one whose last ACK is put off, and that has its
// connection, as it sees it.
func TestListenerClosesInHandshake(t *testing.T) {
	for _, c := range []struct {
		name, family, listens string
		places                []lab.Place
	}{
		{"ipv4", "4", `listen(4, "0.0.0.0", $port)`, lab.Places},
		{"ipv6", "6", `listen(6, "::", $port)`, places6},
	} {
		t.Run(c.name, func(t *testing.T) {
			comparePlaces(t, c.places, script{name: "a listener closes", fails: true, text: `
server: l = ` + c.listens + `
client: c = pending(` + c.family + `, "$target", $port, ((socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0),))
client: told(c)
server: l.close()
client: c.settimeout(20)
client: error_of(c.recv, 1)`})
		})
	}
}

// comparePlaces runs a script where the server is a container, at several places at a time: it
// waits for SYNs that are sent again.
func comparePlaces(t *testing.T, places []lab.Place, sc script) {
	for _, pl := range places {
		if pl.Modes[0][1] != "overlay" {
			continue // the node or a host outside
		}
		t.Run(pl.Name, func(t *testing.T) {
			t.Parallel()
			comparePath(t, pl, sc, pl.Target(t), startPeers(t, pl))
		})
	}
}

// TestListenUnbound: who listens without bind() is reached at a port of the kernel's choice, by all
// that reach a listener on a wildcard, and by nobody else.
func TestListenUnbound(t *testing.T) {
	for _, c := range []struct {
		name           string
		server, client int // families
		again          bool
		places         []lab.Place
	}{
		{"ipv4", 4, 4, false, lab.Places},
		{"ipv4 to a dual-stack listener", 6, 4, false, lab.Places},
		{"ipv6", 6, 6, false, places6},
		{"again", 6, 4, true, lab.Places[1:4]},
	} {
		sc := script{name: "listen without bind", text: fmt.Sprintf(`
server: l = u
server: l.getsockname()
client: s = connect(%d, "$target", $port)
server: c, who = l.accept()`, c.client) + exchange}
		t.Run(c.name, func(t *testing.T) {
			for _, pl := range c.places {
				if pl.Modes[0][1] == "overlay" {
					t.Run(pl.Name, func(t *testing.T) { compareUnbound(t, pl, sc, c.server, c.again) })
				}
			}
		})
	}
}

// compareUnbound is comparePath for a listener u of the server that is not bound; again: it
// listened before.
func compareUnbound(t *testing.T, pl lab.Place, sc script, family int, again bool) {
	peers := startPeers(t, pl)
	var baseline string
	for _, m := range pl.Modes {
		client, server := peers[pl.Client+m[0]].In(t), peers[pl.Server+m[1]].In(t)
		server.Must(`u = tcp(%d)`, family)
		if again {
			server.Must(`u.listen()`)
			server.Must(`u.shutdown(socket.SHUT_RDWR)`)
		}
		server.Must(`u.listen()`)
		r := pathRun{place: pl, script: sc, clientMode: m[0], serverMode: m[1], target: pl.Target(t), port: int(server.PortOf("u")), client: client, server: server}
		trace := r.run(t)
		server.Must(`u.close()`)
		if baseline == "" {
			baseline = trace
		}
		if trace != baseline || strings.Contains(trace, `"error"`) {
			t.Errorf("%s -> %s fails, or differs.\nGot:\n%s\nwant:\n%s", m[0], m[1], trace, baseline)
		}
	}
}

// TestUnboundIsTheContainers: a port at which a container listens without bind() is open at none of
// its node's addresses, and another container may have it as well; at loopback of the same one it
// is in use.
func TestUnboundIsTheContainers(t *testing.T) {
	p, other, node, outside := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c2"), lab.StartPeer(t, "host", "n1/c1"), lab.StartOutside(t)
	far, underlay := lab.StartPeer(t, "host", "n2/c1"), lab.Address(t, "host", "n1/c1")
	for _, family := range []int{4, 6} {
		p.Must(`u = tcp(%d)`, family)
		p.Must(`u.listen()`)
		port := p.PortOf("u")
		for _, at := range []string{"127.0.0.1", underlay, lab.GatewayOf("n1/c1")(t)} {
			node.Expect(`"ECONNREFUSED"`, `error_of(connect, 4, %q, %d)`, at, port)
		}
		node.Expect(`"ECONNREFUSED"`, `error_of(connect, 6, "::1", %d)`, port)
		far.Expect(`"ECONNREFUSED"`, `error_of(connect, 4, %q, %d)`, underlay, port)
		outside.Expect(`"ECONNREFUSED"`, `error_of(connect, 4, %q, %d)`, underlay, port)
		other.Must(`l = listen(%d, %q, %d)`, family, map[int]string{4: "0.0.0.0", 6: "::"}[family], port)
		p.Expect(`"EADDRINUSE"`, `error_of(listen, 4, "127.0.0.1", %d)`, port)
		p.Must(`u.close()`)
		p.Must(`listen(4, "127.0.0.1", %d).close()`, port)
		other.Must(`l.close()`)
	}
}
