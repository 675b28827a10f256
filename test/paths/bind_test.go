package paths

import (
	"encoding/json"
	"fmt"
	"testing"

	"heddle.dev/heddle/test/lab"
)

// TestBindConflicts: two sockets of a container may hold one port exactly when they may on a plain
// one, for all pairs of addresses, whoever comes first.
func TestBindConflicts(t *testing.T) {
	port := lab.FreePort()
	own := lab.Address(t, "overlay", "n1/c1")
	names := fmt.Sprintf(`[[4, "0.0.0.0"], [4, "127.0.0.1"], [4, "127.0.0.2"], [4, "127.1.2.3"], [4, %q],
		[6, "::"], [6, "::", 1], [6, "::1"], [6, "::ffff:0.0.0.0"], [6, "::ffff:127.0.0.1"], [6, %q], [6, %q], [6, %q, 1]]`,
		own, "::ffff:"+own, lab.Overlay6(t, "n1/c1"), lab.Overlay6(t, "n1/c1"))
	plain, intercepted := lab.StartPeer(t, "overlay", "n1/c1"), lab.StartPeer(t, "heddle", "n1/c1")
	for _, how := range []string{
		"", ", reuseaddr=True", ", reuseport=True", ", listening=True", ", reuseaddr=True, listening=True",
		", reuseaddr=True, reuseport=True, listening=True",
	} {
		t.Run("bind"+how, func(t *testing.T) {
			var want, got map[string]string
			askInto(t, plain, &want, `conflicts(%d, %s%s)`, port, names, how)
			askInto(t, intercepted, &got, `conflicts(%d, %s%s)`, port, names, how)
			if len(want) < 100 {
				t.Fatalf("%d pairs tried", len(want))
			}
			for pair, w := range want {
				if got[pair] != w {
					t.Errorf("%s: %s, on a plain container %s", pair, got[pair], w)
				}
			}
		})
	}
}

// TestBindClaims: what a socket holds goes with it, in whatever way it ends, and follows its
// options.
func TestBindClaims(t *testing.T) {
	for _, sc := range []script{
		{name: "closed", fails: true, text: `
server: a = bound(4, "0.0.0.0", $port)
server: error_of(bound, 4, "127.0.0.1", $port)
server: a.close()
server: b = bound(4, "127.0.0.1", $port)
server: error_of(bound, 6, "::", $port)
server: b.close()`},
		{name: "a copy stays", fails: true, text: `
server: a = bound(4, "0.0.0.0", $port)
server: b = a.dup()
server: a.close()
server: error_of(bound, 4, "127.0.0.1", $port)
server: b.close()
server: error_of(bound, 4, "127.0.0.1", $port)`},
		{name: "held by a child", fails: true, text: `
server: error_of(forked, lambda: bound(4, "0.0.0.0", $port) and 0)
server: error_of(bound, 4, "127.0.0.1", $port)`},
		{name: "options later", fails: true, text: `
server: a = bound(4, "0.0.0.0", $port)
server: a.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server: error_of(bound, 4, "127.0.0.1", $port, None, True)
server: a.listen()
server: error_of(bound, 4, "127.0.0.1", $port, None, True)
server: a.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
server: error_of(bound, 4, "127.0.0.1", $port, None, False, True)`},
		{name: "accepted sockets do not hold it twice", fails: true, text: `
server: l = listen(4, "0.0.0.0", $port)
client: s = connect(4, "127.0.0.1", $port)
server: c, who = l.accept()
client: s.close()
server: c.recv(1)
server: c.close()
server: l.close()
server: error_of(listen, 4, "127.0.0.1", $port)`},
		{name: "users", fails: true, text: `
server: a = bound(4, "0.0.0.0", $port, None, False, True)
server: error_of(bound, 4, "127.0.0.1", $port, None, False, True)
server: forked(as_user, 1234, error_of, bound, 4, "127.0.0.1", $port, None, False, True)`},
		{name: "three addresses of loopback", text: `
server: l1 = listen(4, "127.0.0.1", $port)
server: l2 = listen(4, "127.0.0.2", $port)
server: l3 = listen(4, "127.1.2.3", $port)
client: s3 = connect(4, "127.1.2.3", $port)
client: s2 = connect(4, "127.0.0.2", $port)
client: s1 = connect(4, "127.0.0.1", $port)
server: [[l.getsockname(), l.accept()[0].getsockname()] for l in (l1, l2, l3)]
client: [s.getpeername() for s in (s1, s2, s3)]
client: error_of(connect, 4, "127.0.0.3", $port)`, fails: true},
		{name: "other loopback addresses and a wildcard", text: `
server: l = listen(4, "0.0.0.0", $port)
client: s = connect(4, "127.0.0.9", $port)
client: t = connect(4, "127.9.9.9", $port, ("127.0.0.7", 0))
server: c, who = l.accept()
server: [c.getsockname(), who[0], c.getpeername()[0]]
server: d, who = l.accept()
server: [d.getsockname(), who[0], d.getpeername()[0]]
client: [s.getpeername(), s.getsockname()[0], t.getpeername(), t.getsockname()[0]]`},
	} {
		t.Run(sc.name, func(t *testing.T) {
			pl := lab.Places[3]
			comparePath(t, pl, sc, pl.Target(t), startPeers(t, pl))
		})
	}
}

// askInto is p.do with an answer of the caller's type.
func askInto(t *testing.T, p *lab.Peer, into any, format string, args ...any) {
	t.Helper()
	said := p.In(t).Do(format, args...)
	if err := json.Unmarshal([]byte(said), into); err != nil {
		t.Fatalf("%s: %s: %v", p.Name, said, err)
	}
}
