package test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// agentPID gives the process of a node's agent.
func agentPID(t testing.TB, node string) int {
	t.Helper()
	var status []struct{ PID int }
	raw := heddle(t, "status", "--lab", labName, "--node", node, "--output", "json")
	if err := json.Unmarshal([]byte(raw), &status); err != nil || len(status) != 1 || status[0].PID < 2 {
		t.Fatalf("status of %s: %v\n%s", node, err, raw)
	}
	return status[0].PID
}

// endAgent ends a node's agent and waits until it is gone; the lab gets it back at the end of the test.
func endAgent(t testing.TB, node string, sig syscall.Signal) {
	t.Helper()
	t.Cleanup(func() {
		if err := labCommand("up"); err != nil {
			t.Error(err)
		}
	})
	if err := killAgent(agentPID(t, node), sig); err != nil {
		t.Fatal(err)
	}
}

// killAgent ends the agent pid and waits until it is gone.
func killAgent(pid int, sig syscall.Signal) error {
	if pid < 2 {
		return fmt.Errorf("end agent %d: no such process", pid)
	}
	if err := syscall.Kill(pid, sig); err != nil {
		return fmt.Errorf("end agent %d: %w", pid, err)
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(state), ") Z ") {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("agent %d did not end within %s:\n%s", pid, patience, lastWords(pid))
		}
	}
}

// lastWords ends the agent pid and gives the end of its log, which says what it waits for.
func lastWords(pid int) string {
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/2", pid))
	if err == nil {
		err = syscall.Kill(pid, syscall.SIGQUIT)
	}
	var log []byte
	for deadline := time.Now().Add(patience); err == nil && time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if log, err = os.ReadFile(path); strings.Contains(string(log), "SIGQUIT") && syscall.Kill(pid, 0) != nil {
			break
		}
	}
	if err != nil {
		return err.Error()
	}
	return string(log[max(0, len(log)-64<<10):])
}

// pins lists what is pinned for a node.
func pins(t testing.TB, node string) []string {
	t.Helper()
	list, err := filepath.Glob("/run/heddle/lab/" + labName + "/" + node + "/bpf/heddle/*")
	if err != nil || len(list) == 0 {
		t.Fatalf("pins of %s: %v, %v", node, list, err)
	}
	return list
}

// TestRestart ends an agent while connections live. Nothing but socket() may notice.
func TestRestart(t *testing.T) {
	for _, node := range []string{"n1", "n2"} {
		for name, sig := range map[string]syscall.Signal{"TERM": syscall.SIGTERM, "KILL": syscall.SIGKILL} {
			t.Run(node+" "+name, func(t *testing.T) { restart(t, node, sig) })
		}
	}
}

func restart(t *testing.T, node string, sig syscall.Signal) {
	client, server := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n2/c1")
	plain := startPeer(t, "overlay", "n1/c1")
	pod := startPod(t, client, plain)
	mine := map[string]*peer{"n1": client, "n2": server}[node]
	target, port := address(t, "heddle", "n2/c1"), freePort()
	server.must(`l = listen(6, "::", %d)`, port)
	client.must(`s = connect(4, %q, %d)`, target, port)
	server.must(`c, who = l.accept()`)
	// Sockets made before: one for each kind of connect.
	client.must(`direct, bound, local = tcp(4), tcp(6), tcp(4)`)
	client.must(`inside = [tcp(4) for _ in range(2)]`)
	names := client.must(`names(s)`) + server.must(`names(c)`)
	endpoints := heddle(t, "endpoints", "--lab", labName, "--output", "json")
	before, pinned := counters(t, node), pins(t, node)
	connection := awaitConnection(t, "n1/c1", client.portOf("s"), uint16(port), 0, 0)

	endAgent(t, node, sig)
	alive := func(when string) {
		t.Helper()
		client.must(`send(s, 200000)`)
		server.expect(`[200000, "16a7de9d66951288"]`, `receive(c, 200000)`)
		client.must(`drained()`)
		server.expect(`[1, "01"]`, `[len(shown(c)), shown(c)[0][2]]`)
		pod()
		if got := client.must(`names(s)`) + server.must(`names(c)`); got != names {
			t.Errorf("%s: names %s, were %s", when, got, names)
		}
	}
	alive("without agent")
	if node == "n2" {
		probeWithoutAgent(t, client)
	}
	connectWith := func(p *peer, socket, target string) {
		t.Helper()
		p.must(`%s.connect((%q, %d))`, socket, target, port)
		server.must(`c2, who = l.accept()`)
		p.must(`send(%s, 5000)`, socket)
		server.expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c2, 5000)`)
		server.expect("true", `c2.getpeername()[:2] == who[:2]`)
		server.expect(fmt.Sprintf(`["::ffff:%s", "::ffff:%s"]`, strings.TrimPrefix(target, "::ffff:"), address(t, "heddle", "n1/c1")), `[c2.getsockname()[0], who[0]]`)
	}
	connectWith(client, "direct", target)
	client.must(`bound.bind(("::", 0))`)
	connectWith(client, "bound", "::ffff:"+target)
	plain.must(`p = tcp(4)`)
	connectWith(plain, "p", target)

	// A new socket waits for the agent.
	mine.begin(`n = tcp(4)`)
	select {
	case r := <-mine.replies:
		t.Fatalf("socket() without agent gave %s", r)
	case <-time.After(300 * time.Millisecond): // long enough to fail, were it to
	}
	if err := labCommand("up"); err != nil {
		t.Fatal(err)
	}
	if r := mine.reply("n = tcp(4)"); r != "null" {
		t.Fatalf("socket() that waited gave %s", r)
	}
	alive("with the new agent")
	if node == "n1" {
		connectWith(client, "n", target)
	}
	client.must(`n = tcp(4)`)
	connectWith(client, "n", target)

	if got := heddle(t, "endpoints", "--lab", labName, "--output", "json"); got != endpoints {
		t.Errorf("endpoints\n%s\nwere\n%s", got, endpoints)
	}
	after := counters(t, node)
	for reason, n := range before {
		if after[reason] < n {
			t.Errorf("%s fell from %d to %d", reason, n, after[reason])
		}
	}
	if node == "n2" && after["probe_answered"] == before["probe_answered"] {
		t.Error("n2's programs have answered no probe")
	}
	if got := pins(t, node); strings.Join(got, " ") != strings.Join(pinned, " ") {
		t.Errorf("pins %v, were %v", got, pinned)
	}
	if c := awaitConnection(t, "n1/c1", client.portOf("s"), uint16(port), 400000, 0); c.Cookie != connection.Cookie || c.Path != connection.Path || c.NodeRemote != connection.NodeRemote {
		t.Errorf("connection %+v, was %+v", c, connection)
	}
}

// TestRestartBoth ends both agents, the store with them, and brings them back while a program waits in
// socket() on each node.
func TestRestartBoth(t *testing.T) {
	client, server := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n2/c1")
	target, port := address(t, "heddle", "n2/c1"), freePort()
	endAgent(t, "n1", syscall.SIGKILL)
	endAgent(t, "n2", syscall.SIGTERM)
	client.begin(`s = tcp(4)`)
	server.begin(fmt.Sprintf(`l = listen(4, "0.0.0.0", %d)`, port))
	if err := labCommand("up"); err != nil {
		t.Fatal(err)
	}
	client.reply("tcp")
	server.reply("listen")
	client.must(`s.connect((%q, %d))`, target, port)
	server.must(`c, who = l.accept()`)
	awaitConnection(t, "n1/c1", client.portOf("s"), uint16(port), 0, 0)
}
