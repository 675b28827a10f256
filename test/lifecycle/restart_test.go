package lifecycle

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestRestart ends an agent while connections live. Nothing but new sockets may notice, which are
// the container's own stack's until the next one runs.
func TestRestart(t *testing.T) {
	for _, node := range []string{"n1", "n2"} {
		for name, sig := range map[string]syscall.Signal{"TERM": syscall.SIGTERM, "KILL": syscall.SIGKILL} {
			t.Run(node+" "+name, func(t *testing.T) { restart(t, node, sig) })
		}
	}
}

func restart(t *testing.T, node string, sig syscall.Signal) {
	client, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1")
	plain := lab.StartPeer(t, "overlay", "n1/c1")
	pod := lab.ConnectPod(t, client, plain)
	mine := map[string]*lab.Peer{"n1": client, "n2": server}[node]
	target, port := lab.Address(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(6, "::", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, target, port)
	server.Must(`c, who = l.accept()`)
	// Sockets made before: one for each kind of connect.
	client.Must(`direct, bound, local, ear = tcp(4), tcp(6), tcp(4), tcp(4)`)
	client.Must(`inside = [tcp(4) for _ in range(2)]`)
	names := client.Must(`names(s)`) + server.Must(`names(c)`)
	endpoints := lab.Heddle(t, "endpoints", "--output", "json")
	before, pinned := lab.Counters(t, node), lab.Pins(t, node)
	connection := lab.AwaitConnection(t, "n1/c1", client.PortOf("s"), uint16(port), 0, 0)

	lab.EndAgent(t, node, sig)
	alive := func(when string) {
		t.Helper()
		client.Must(`send(s, 200000)`)
		server.Expect(`[200000, "16a7de9d66951288"]`, `receive(c, 200000)`)
		client.Must(`drained()`)
		server.Expect(`[1, "01"]`, `[len(shown(c)), shown(c)[0][2]]`)
		pod()
		if got := client.Must(`names(s)`) + server.Must(`names(c)`); got != names {
			t.Errorf("%s: names %s, were %s", when, got, names)
		}
	}
	alive("without agent")
	if node == "n2" {
		lab.ProbeWithoutAgent(t, client)
	}
	connectWith := func(p *lab.Peer, socket, target string) {
		t.Helper()
		p.Must(`%s.connect((%q, %d))`, socket, target, port)
		server.Must(`c2, who = l.accept()`)
		p.Must(`send(%s, 5000)`, socket)
		server.Expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c2, 5000)`)
		server.Expect("true", `c2.getpeername()[:2] == who[:2]`)
		server.Expect(fmt.Sprintf(`["::ffff:%s", "::ffff:%s"]`, strings.TrimPrefix(target, "::ffff:"), lab.Address(t, "heddle", "n1/c1")), `[c2.getsockname()[0], who[0]]`)
	}
	connectWith(client, "direct", target)
	client.Must(`bound.bind(("::", 0))`)
	connectWith(client, "bound", "::ffff:"+target)
	plain.Must(`p = tcp(4)`)
	connectWith(plain, "p", target)

	made := withoutAgent(t, node, client, server, mine, port, func(socket string) { connectWith(client, socket, target) })
	testutil.NoError(t, lab.Command("up"))
	if made == 0 {
		if r := mine.Reply("waits = tcp(4)"); r != "null" {
			t.Fatalf("socket() that waited gave %s", r)
		}
	}
	alive("with the new agent")
	var status []api.Status
	lab.Query(t, &status, "status", "--node", node)
	if n := status[0].Interception.Failed["no_agent"]; n < made {
		t.Errorf("no_agent %d, want %d at least", n, made)
	}
	client.Must(`n = tcp(4)`)
	connectWith(client, "n", target)

	if got := lab.Heddle(t, "endpoints", "--output", "json"); got != endpoints {
		t.Errorf("endpoints\n%s\nwere\n%s", got, endpoints)
	}
	after := lab.Counters(t, node)
	for reason, n := range before {
		if after[reason] < n {
			t.Errorf("%s fell from %d to %d", reason, n, after[reason])
		}
	}
	if node == "n2" && after["probe_answered"] == before["probe_answered"] {
		t.Error("n2's programs have answered no probe")
	}
	if got := lab.Pins(t, node); strings.Join(got, " ") != strings.Join(pinned, " ") {
		t.Errorf("pins %v, were %v", got, pinned)
	}
	if c := lab.AwaitConnection(t, "n1/c1", client.PortOf("s"), uint16(port), 400000, 0); c.Cookie != connection.Cookie || c.Path != connection.Path || c.NodeRemote != connection.NodeRemote {
		t.Errorf("connection %+v, was %+v", c, connection)
	}
}

// withoutAgent makes sockets of mine while its node has no agent, which are the container's own
// stack's, and the overlay's, and gives their number. Where the kernel lets socket() wait for the
// next agent, it leaves a call that does.
func withoutAgent(t *testing.T, node string, client, server, mine *lab.Peer, port int, connect func(socket string)) (made uint64) {
	t.Helper()
	if !lab.SocketsWithoutAgent(t) {
		mine.Begin(`waits = tcp(4)`)
		return 0
	}
	mine.Must(`own = [tcp(4), tcp(6), tcp(4)]`)
	if node == "n1" {
		connect("own[0]")
		client.Must(`ear.bind(("0.0.0.0", %d)) or ear.listen()`, port)
		client.Must(`own[2].connect(("127.0.0.1", %d))`, port)
		client.Expect(`"127.0.0.1"`, `ear.accept()[1][0]`)
	} else {
		server.Must(`l2 = own[0].bind(("0.0.0.0", %d)) or own[0].listen() or own[0]`, port+1)
		client.Must(`late = connect(4, %q, %d)`, lab.Address(t, "heddle", "n2/c1"), port+1)
		server.Must(`c3, who = l2.accept()`)
		server.Expect(fmt.Sprintf("%q", lab.Address(t, "heddle", "n1/c1")), `who[0]`)
	}
	return 3
}

// TestRestartBoth ends both agents, the store with them, and brings them back while programs of
// both nodes have sockets that they made meanwhile.
func TestRestartBoth(t *testing.T) {
	client, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1")
	target, port := lab.Address(t, "heddle", "n2/c1"), lab.FreePort()
	lab.EndAgent(t, "n1", syscall.SIGKILL)
	lab.EndAgent(t, "n2", syscall.SIGTERM)
	exchange := func(when string) {
		t.Helper()
		client.Must(`s.connect((%q, %d))`, target, port)
		server.Must(`c, who = l.accept()`)
		client.Must(`send(s, 5000)`)
		if got := server.Do(`receive(c, 5000)`); got != `[5000, "62928f6f9c49d2ca"]` {
			t.Errorf("%s: %s", when, got)
		}
	}
	client.Begin(`s = tcp(4)`)
	server.Begin(fmt.Sprintf(`l = listen(4, "0.0.0.0", %d)`, port))
	if lab.SocketsWithoutAgent(t) {
		client.Reply("tcp")
		server.Reply("listen")
		exchange("without agents")
		testutil.NoError(t, lab.Command("up"))
		client.Must(`s = tcp(4)`)
	} else {
		testutil.NoError(t, lab.Command("up"))
		client.Reply("tcp")
		server.Reply("listen")
	}
	exchange("with the next agents")
}
