package paths

import (
	"fmt"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestCrossing: sockets whose own address is of no use where they go (bound to [::] and connecting
// by IPv6, or bound with AF_UNSPEC) carry any amount both ways, end as others do, and are judged by
// policy. What they see: programs crossing6 and unspec in testdata/differ.
func TestCrossing(t *testing.T) {
	const large = 8 << 20
	for _, c := range []struct {
		name, make string
		family     int
		addr       string
	}{
		{"bound to [::]", `bound(6, "::", 0)`, 6, lab.Overlay6(t, "n1/c2")},
		{"bound with AF_UNSPEC", `unbound_address()`, 4, lab.Address(t, "overlay", "n1/c2")},
	} {
		for _, mode := range lab.Modes {
			t.Run(c.name+"/"+mode, func(t *testing.T) {
				client, server, port, denied := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, mode, "n1/c2"), lab.FreePort(), lab.FreePort()
				client.Must(lab.BoundToNothing)
				server.Must(`l, d = listen(6, "::", %d), listen(6, "::", %d)`, port, denied)
				before := lab.Counters(t, "n1")["fallback_crossed"]
				client.Must(`(s := %s).connect((%q, %d))`, c.make, c.addr, port)
				if n := lab.Counters(t, "n1")["fallback_crossed"] - before; n != 1 {
					t.Errorf("fallback_crossed rose by %d", n)
				}
				server.Must(`a = l.accept()[0]`)
				client.Must(`send(s, %d)`, large)
				server.Must(`send(a, %d)`, large)
				whole := client.Must(`digest(pattern(%d))`, large)
				client.Expect(whole, `receive(s, %d)`, large)
				server.Expect(whole, `receive(a, %d)`, large)
				// The end that closes first waits, and answers the other's FIN all the same.
				own := client.Must(`s.getsockname()[1]`)
				client.Must(`s.close()`)
				server.Must(`a.recv(1), a.close()`)
				testutil.Eventually(t, "the last ACK to arrive", func() (bool, string) {
					said := lastACK(t, mode, own)
					return said == "", said
				})

				client.Must(`(s := %s).connect((%q, %d))`, c.make, c.addr, denied)
				server.Must(`a = d.accept()[0]`)
				lab.ApplyPolicy(t, "crossing", []map[string]any{lab.DenyRule("reject", denied)}, nil)
				for p, line := range map[*lab.Peer]string{client: `error_of(s.recv, 1)`, server: `error_of(a.recv, 1)`} { // whichever is cut first resets the other
					if got := p.Must("%s", line); got != `"ECONNABORTED"` && got != `"ECONNRESET"` {
						t.Errorf("a connection that policy cut: %s says %s", line, got)
					}
				}
				client.Expect(`"ECONNREFUSED"`, `error_of((%s).connect, (%q, %d))`, c.make, c.addr, denied)
				lab.ApplyPolicy(t, "crossing", []map[string]any{lab.DenyRule("drop", denied)}, nil)
				client.Must(`(s := %s).setblocking(False)`, c.make)
				client.Expect(`"EINPROGRESS"`, `error_of(s.connect, (%q, %d))`, c.addr, denied)
				client.Expect(`[]`, `select.select([], [s], [], 1)[1]`)
				client.Must(`(s := %s).connect((%q, %d))`, c.make, c.addr, port)
			})
		}
	}
}

// TestCrossingToOwnLoopback: a client bound to [::], as dig's, reaches by ::1 a listener of its
// container on [::] with IPV6_V6ONLY, as dnsmasq's, whichever it is underneath.
func TestCrossingToOwnLoopback(t *testing.T) {
	p, port := lab.StartPeer(t, "heddle", "n1/c1"), lab.FreePort()
	own := lab.Overlay6(t, "n1/c1")
	p.Must(`l = listen(6, "::", %d, v6only=1)`, port)
	p.Must(`(s := bound(6, "::", 0)).connect(("::1", %d))`, port)
	p.Must(`a, peer = l.accept()`)
	p.Must(`s.sendall(b"ask"), a.sendall(b"answer")`)
	p.Expect(`["ask", "answer"]`, `[a.recv(9).decode(), s.recv(9).decode()]`)
	// Both ends have the own address for ::1, and of each other's ports know the right ones.
	p.Expect(fmt.Sprintf(`["%s", "%s", "%s", "%s"]`, own, own, own, own), `[s.getsockname()[0], s.getpeername()[0], a.getsockname()[0], peer[0]]`)
	p.Expect(`[true, true]`, `[s.getsockname()[1] == peer[1], s.getpeername()[1] == %d]`, port)
	p.Must(`s.close()`)
	p.Expect(`""`, `a.recv(1).decode()`)
	// A socket that is bound to ::1 is the alias of it, which leads nowhere else.
	p.Expect(`"ECONNREFUSED"`, `error_of(bound(6, "::1", 0).connect, ("::1", %d))`, port)
}

// lastACK gives the connections of n1/c2 with a peer's port that wait for the last ACK.
func lastACK(t *testing.T, mode, port string) string {
	t.Helper()
	if mode == "heddle" {
		return lab.InNode(t, "n1", "ss", "-Htn", "state", "last-ack", fmt.Sprintf("( dport = :%s )", port))
	}
	return lab.MustRun(t, mode, "n1/c2", "ss", "-Htn", "state", "last-ack", fmt.Sprintf("( dport = :%s )", port))
}
