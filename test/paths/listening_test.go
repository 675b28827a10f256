package test

import (
	"fmt"
	"strings"
	"testing"
)

// closing are connects that wait for a listener with a full queue when that closes, or is shut down.
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
		places                []place
	}{
		{"ipv4", "4", `listen(4, "0.0.0.0", p, backlog=0)`, places},
		{"ipv4 to a dual-stack listener", "4", `listen(6, "::", p, backlog=0)`, places},
		{"ipv6", "6", `listen(6, "::", p, backlog=0)`, places6},
		{"ipv6 only", "6", `listen(6, "::", p, 1, backlog=0)`, places6},
	} {
		t.Run(c.name, func(t *testing.T) {
			comparePlaces(t, c.places, script{name: "a listener closes", fails: true, text: closing(c.family, c.listens)})
		})
	}
}

// TestListenerClosesInHandshake: so does one whose last ACK is put off, and that has its connection, as it sees it.
func TestListenerClosesInHandshake(t *testing.T) {
	for _, c := range []struct {
		name, family, listens string
		places                []place
	}{
		{"ipv4", "4", `listen(4, "0.0.0.0", $port)`, places},
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

// comparePlaces runs a script where the server is a container, at several places at a time: it waits for SYNs that are sent again.
func comparePlaces(t *testing.T, places []place, sc script) {
	for _, pl := range places {
		if pl.modes[0][1] != "overlay" {
			continue // the node or a host outside
		}
		t.Run(pl.name, func(t *testing.T) {
			t.Parallel()
			comparePath(t, pl, sc, pl.target(t), startPeers(t, pl))
		})
	}
}

// TestListenUnbound: who listens without bind() is reached at a port of the kernel's choice, by all that reach a listener on a
// wildcard, and by nobody else.
func TestListenUnbound(t *testing.T) {
	for _, c := range []struct {
		name           string
		server, client int // families
		again          bool
		places         []place
	}{
		{"ipv4", 4, 4, false, places},
		{"ipv4 to a dual-stack listener", 6, 4, false, places},
		{"ipv6", 6, 6, false, places6},
		{"again", 6, 4, true, places[1:4]},
	} {
		sc := script{name: "listen without bind", text: fmt.Sprintf(`
server: l = u
server: l.getsockname()
client: s = connect(%d, "$target", $port)
server: c, who = l.accept()`, c.client) + exchange}
		t.Run(c.name, func(t *testing.T) {
			for _, pl := range c.places {
				if pl.modes[0][1] == "overlay" {
					t.Run(pl.name, func(t *testing.T) { compareUnbound(t, pl, sc, c.server, c.again) })
				}
			}
		})
	}
}

// compareUnbound is comparePath for a listener u of the server that is not bound; again: it listened before.
func compareUnbound(t *testing.T, pl place, sc script, family int, again bool) {
	peers := startPeers(t, pl)
	var baseline string
	for _, m := range pl.modes {
		client, server := peers[pl.client+m[0]].in(t), peers[pl.server+m[1]].in(t)
		server.must(`u = tcp(%d)`, family)
		if again {
			server.must(`u.listen()`)
			server.must(`u.shutdown(socket.SHUT_RDWR)`)
		}
		server.must(`u.listen()`)
		r := pathRun{place: pl, script: sc, clientMode: m[0], serverMode: m[1], target: pl.target(t), port: int(server.portOf("u")), client: client, server: server}
		trace := r.run(t)
		server.must(`u.close()`)
		if baseline == "" {
			baseline = trace
		}
		if trace != baseline || strings.Contains(trace, `"error"`) {
			t.Errorf("%s -> %s fails, or differs.\nGot:\n%s\nwant:\n%s", m[0], m[1], trace, baseline)
		}
	}
}

// TestUnboundIsTheContainers: a port at which a container listens without bind() is open at none of its node's addresses, and
// another container may have it as well; at loopback of the same one it is in use.
func TestUnboundIsTheContainers(t *testing.T) {
	p, other, node, outside := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n1/c2"), startPeer(t, "host", "n1/c1"), startOutside(t)
	far, underlay := startPeer(t, "host", "n2/c1"), address(t, "host", "n1/c1")
	for _, family := range []int{4, 6} {
		p.must(`u = tcp(%d)`, family)
		p.must(`u.listen()`)
		port := p.portOf("u")
		for _, at := range []string{"127.0.0.1", underlay, gatewayOf("n1/c1")(t)} {
			node.expect(`"ECONNREFUSED"`, `error_of(connect, 4, %q, %d)`, at, port)
		}
		node.expect(`"ECONNREFUSED"`, `error_of(connect, 6, "::1", %d)`, port)
		far.expect(`"ECONNREFUSED"`, `error_of(connect, 4, %q, %d)`, underlay, port)
		outside.expect(`"ECONNREFUSED"`, `error_of(connect, 4, %q, %d)`, underlay, port)
		other.must(`l = listen(%d, %q, %d)`, family, map[int]string{4: "0.0.0.0", 6: "::"}[family], port)
		p.expect(`"EADDRINUSE"`, `error_of(listen, 4, "127.0.0.1", %d)`, port)
		p.must(`u.close()`)
		p.must(`listen(4, "127.0.0.1", %d).close()`, port)
		other.must(`l.close()`)
	}
}
