package test

import (
	"fmt"
	"testing"
)

// TestCrossing: sockets whose own address is of no use where they go (bound to [::] and connecting by IPv6, or bound with AF_UNSPEC)
// carry any amount both ways, end as others do, and are judged by policy. What they see: programs crossing6 and unspec in
// testdata/differ.
func TestCrossing(t *testing.T) {
	const large = 8 << 20
	for _, c := range []struct {
		name, make string
		family     int
		addr       string
	}{
		{"bound to [::]", `bound(6, "::", 0)`, 6, own6(t, "n1/c2")},
		{"bound with AF_UNSPEC", `adrift()`, 4, address(t, "overlay", "n1/c2")},
	} {
		for _, mode := range modes {
			t.Run(c.name+"/"+mode, func(t *testing.T) {
				client, server, port, denied := startPeer(t, "heddle", "n1/c1"), startPeer(t, mode, "n1/c2"), freePort(), freePort()
				client.must(boundToNothing)
				server.must(`l, d = listen(6, "::", %d), listen(6, "::", %d)`, port, denied)
				before := counters(t, "n1")["fallback_crossed"]
				client.must(`(s := %s).connect((%q, %d))`, c.make, c.addr, port)
				if n := counters(t, "n1")["fallback_crossed"] - before; n != 1 {
					t.Errorf("fallback_crossed rose by %d", n)
				}
				server.must(`a = l.accept()[0]`)
				client.must(`send(s, %d)`, large)
				server.must(`send(a, %d)`, large)
				whole := client.must(`digest(pattern(%d))`, large)
				client.expect(whole, `receive(s, %d)`, large)
				server.expect(whole, `receive(a, %d)`, large)
				// The end that closes first waits, and answers the other's FIN all the same.
				own := client.must(`s.getsockname()[1]`)
				client.must(`s.close()`)
				server.must(`a.recv(1), a.close()`)
				eventually(t, "the last ACK to arrive", func() (bool, string) {
					said := lastACK(t, mode, own)
					return said == "", said
				})

				client.must(`(s := %s).connect((%q, %d))`, c.make, c.addr, denied)
				server.must(`a = d.accept()[0]`)
				applyPolicy(t, "crossing", []map[string]any{denyRule("reject", denied)}, nil)
				for p, line := range map[*peer]string{client: `error_of(s.recv, 1)`, server: `error_of(a.recv, 1)`} { // whichever is cut first resets the other
					if got := p.must("%s", line); got != `"ECONNABORTED"` && got != `"ECONNRESET"` {
						t.Errorf("a connection that policy cut: %s says %s", line, got)
					}
				}
				client.expect(`"ECONNREFUSED"`, `error_of((%s).connect, (%q, %d))`, c.make, c.addr, denied)
				applyPolicy(t, "crossing", []map[string]any{denyRule("drop", denied)}, nil)
				client.must(`(s := %s).setblocking(False)`, c.make)
				client.expect(`"EINPROGRESS"`, `error_of(s.connect, (%q, %d))`, c.addr, denied)
				client.expect(`[]`, `select.select([], [s], [], 1)[1]`)
				client.must(`(s := %s).connect((%q, %d))`, c.make, c.addr, port)
			})
		}
	}
}

// lastACK gives the connections of n1/c2 with a peer's port that wait for the last ACK.
func lastACK(t *testing.T, mode, port string) string {
	t.Helper()
	if mode == "heddle" {
		return nodeExec(t, "n1", "ss", "-Htn", "state", "last-ack", fmt.Sprintf("( dport = :%s )", port))
	}
	return mustRun(t, mode, "n1/c2", "ss", "-Htn", "state", "last-ack", fmt.Sprintf("( dport = :%s )", port))
}
