package paths

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"testing"

	"heddle.dev/heddle/test/lab"
)

// socketScripts are things programs do with sockets beyond connecting them.
var socketScripts = []script{
	{name: "dup", text: `
server: l = listen(4, "0.0.0.0", $port)
server: l2 = l.dup()
server: l.close()
client: s0 = connect(4, "$target", $port)
client: s = s0.dup()
client: s0.close()
server: c0, who = l2.accept()
server: c = c0.dup()
server: c0.close()
server: l2.close()` + exchange},
	{name: "fork", text: `
server: l = listen(4, "0.0.0.0", $port)
client: s = connect(4, "$target", $port)
server: c, who = l.accept()
client: forked(names, s)
server: forked(names, c)
client: forked(s.send, pattern(1000))
server: forked(receive, c, 1000)
client: forked(lambda: s.close())
client: forked(receive, s, 0)
server: send(c, 70001)
client: forked(receive, s, 70001)
server: drained()
client: s.close()
server: c.recv(1) == b""`},
	{name: "connected by a child", text: `
server: l = listen(4, "0.0.0.0", $port)
client: s = tcp(4)
client: forked(s.connect, ("$target", $port))
server: c, who = l.accept()` + exchange},
	{name: "flags", text: `
client: flags_of(socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
client: flags_of(socket.socket(socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
client: s = tcp(4)
client: s.set_inheritable(True)
client: flags_of(s)
client: [inherited(s), s.set_inheritable(False), inherited(s)]
client: [tcp(4).getsockopt(socket.SOL_SOCKET, o) for o in (socket.SO_TYPE, socket.SO_DOMAIN, socket.SO_PROTOCOL)]
client: [tcp(6).getsockopt(socket.SOL_SOCKET, o) for o in (socket.SO_TYPE, socket.SO_DOMAIN, socket.SO_PROTOCOL)]`},
	{name: "file limit", text: `
client: exhaust(64)
client: error_of(tcp)`},
	{name: "half close by the server", text: `
server: l = listen(4, "0.0.0.0", $port)
client: s = connect(4, "$target", $port)
server: c, who = l.accept()
server: c.shutdown(socket.SHUT_WR)
client: s.recv(1) == b""
client: send(s, 100000)
server: receive(c, 100000)
client: drained()
client: s.shutdown(socket.SHUT_WR)
server: c.recv(1) == b""
server: error_of(c.send, b"x")
client: error_of(s.send, b"x")`},
	{name: "started program", text: `
server: l = listen(4, "0.0.0.0", $port)
client: child_connects("$target", $port)
server: c, who = l.accept()
server: who[0]
server: receive(c, 5)`},
	{name: "out of band and peek", text: `
server: l = listen(4, "0.0.0.0", $port)
client: s = connect(4, "$target", $port)
server: c, who = l.accept()
client: s.send(b"!", socket.MSG_OOB)
client: send(s, 10)
client: drained()
server: c.recv(1, socket.MSG_OOB) == b"!"
server: len(c.recv(10, socket.MSG_PEEK | socket.MSG_WAITALL))
server: receive(c, 10)`},
	{name: "reuseport and users", fails: true, text: `
server: l = listen(4, "0.0.0.0", $port, reuseport=True)
server: forked(error_of, listen, 4, "0.0.0.0", $port, None, True)
server: forked(as_user, 1234, error_of, listen, 4, "0.0.0.0", $port, None, True)
server: forked(error_of, listen, 4, "0.0.0.0", $port)
server: forked(as_user, 1234, error_of, listen, 4, "0.0.0.0", 80)
server: os.fstat(l.fileno()).st_uid
server: forked(as_user, 1234, lambda: os.fstat(tcp().fileno()).st_uid)`},
}

// TestSockets runs them between nodes and on one node.
func TestSockets(t *testing.T) {
	for _, pl := range lab.Places[:2] {
		t.Run(pl.Name, func(t *testing.T) { compareAt(t, pl, socketScripts...) })
	}
}

// TestServerProcesses: connections are spread over the processes of a server, whether they share a
// listener or each have one of their own.
func TestServerProcesses(t *testing.T) {
	const processes, asked = 4, 160
	for _, pl := range lab.Places[:2] {
		for _, m := range pl.Modes {
			for name, how := range map[string]string{
				"prefork":   `(l := listen(4, "0.0.0.0", %d)) and serve_forked(lambda: l, %d)`,
				"reuseport": `serve_forked(lambda: listen(4, "0.0.0.0", %d, reuseport=True), %d)`,
				// Each user's own sockets; root's and another's do not mix.
				"reuseport as another user": `serve_forked(lambda: as_user(1234, listen, 4, "0.0.0.0", %d, None, True), %d)`,
			} {
				t.Run(fmt.Sprintf("%s, %s to %s, %s", pl.Name, m[0], m[1], name), func(t *testing.T) {
					client, server := lab.StartPeer(t, m[0], pl.Client), lab.StartPeer(t, m[1], pl.Server)
					port := lab.FreePort()
					server.Must(how, port, processes)
					defer server.Must(`stop_served()`)
					raw := client.Must(`ask_many(4, %q, %d, %d)`, pl.Target(t), port, asked)
					var by map[string]int
					if err := json.Unmarshal([]byte(raw), &by); err != nil {
						t.Fatalf("%v: %s", err, raw)
					}
					total := 0
					for who, n := range by {
						total += n
						// Processes that share a listener take what they can get; a group is
						// balanced by hash.
						if name != "prefork" && n < asked/processes/4 {
							t.Errorf("process %s answered %d of %d connections", who, n, asked)
						}
					}
					if total != asked || name != "prefork" && len(by) != processes {
						t.Errorf("answers by process: %v, want %d by %d", by, asked, processes)
					}
				})
			}
		}
	}
}

// TestPassedSocket: a socket stays the endpoint's it was made for, wherever it is passed.
func TestPassedSocket(t *testing.T) {
	for _, to := range []struct{ mode, container string }{
		{"heddle", "n1/c1"}, {"overlay", "n1/c1"}, {"heddle", "n1/c2"}, {"overlay", "n1/c2"}, {"host", "n1/c1"},
	} {
		t.Run(to.container+" "+to.mode, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			port := lab.FreePort()
			maker, user, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, to.mode, to.container), lab.StartPeer(t, "heddle", "n2/c1")
			own, target := lab.Address(t, "heddle", "n1/c1"), lab.Address(t, "heddle", "n2/c1")
			server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
			user.Must(`u = taker(%q)`, path)
			user.Begin(`s = take(u)`)
			maker.Must(`give(%q, tcp())`, path)
			user.Reply("take")
			user.Must(`s.connect((%q, %d))`, target, port)
			server.Must(`c, who = l.accept()`)
			server.Expect(fmt.Sprintf("%q", own), `who[0]`)
			user.Expect(fmt.Sprintf("[%q, [%q, %d]]", own, target, port), `[s.getsockname()[0], s.getpeername()]`)
			user.Must(`send(s, 5000)`)
			server.Expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c, 5000)`)
			c := lab.AwaitConnection(t, "n1/c1", user.PortOf("s"), uint16(port), 5000, 0)
			if string(c.Path) != "direct" {
				t.Errorf("path %s", c.Path)
			}
		})
	}
}

// TestPassedListener: so does a listener, and what it accepts.
func TestPassedListener(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	port := lab.FreePort()
	maker, user, client := lab.StartPeer(t, "heddle", "n2/c1"), lab.StartPeer(t, "overlay", "n2/c2"), lab.StartPeer(t, "heddle", "n1/c1")
	target := lab.Address(t, "heddle", "n2/c1")
	maker.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	user.Must(`u = taker(%q)`, path)
	user.Begin(`l = take(u)`)
	maker.Must(`give(%q, l)`, path)
	user.Reply("take")
	maker.Must(`l.close()`)
	client.Must(`s = connect(4, %q, %d)`, target, port)
	user.Must(`c, who = l.accept()`)
	user.Expect(fmt.Sprintf("[[%q, %d], true]", target, port), `[c.getsockname(), who == c.getpeername()]`)
	client.Must(`send(s, 5000)`)
	user.Expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c, 5000)`)
}

// TestCloseIsFinal: a socket that its program closed is closed, however soon after socket() that
// was: the agent, which made it, holds it no longer than the program waits for it.
func TestCloseIsFinal(t *testing.T) {
	p := lab.StartPeer(t, "heddle", "n1/c1")
	p.Expect(`0`, `sum(closed_late() for _ in range(500))`)
}
