package test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

func nodeFile(node, name string) string {
	return filepath.Join("/run/heddle/lab", labName, node, name)
}

// holderPID gives the process that keeps a node's seccomp listeners, 0 if there is none.
func holderPID(t testing.TB, node string) int {
	t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"park", "--socket", nodeFile(node, "holder.sock")}
	for _, p := range procs {
		raw, err := os.ReadFile(p)
		words := strings.Split(strings.TrimSuffix(string(raw), "\x00"), "\x00")
		if err != nil || !slices.Equal(words[1:], want) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(p)))
		if err != nil {
			t.Fatal(err)
		}
		return pid
	}
	return 0
}

func nodeLog(t testing.TB, node string) string {
	t.Helper()
	raw, err := os.ReadFile(nodeFile(node, "heddled.log"))
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// listeners counts descriptors of seccomp listeners that a process has.
func listeners(t testing.TB, pid int) (n int) {
	t.Helper()
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if to, _ := os.Readlink(fd); to == "anon_inode:seccomp notify" {
			n++
		}
	}
	return n
}

// TestHolderKilledThenAgent kills the holder, which the agent replaces, then the agent. No call may be lost.
func TestHolderKilledThenAgent(t *testing.T) {
	p := startPeer(t, "heddle", "n2/c1")
	p.must(`s = tcp(4)`)
	agent := agentPID(t, "n2")
	for range 3 {
		old := holderPID(t, "n2")
		if old == 0 {
			t.Fatal("no holder")
		}
		if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		eventually(t, "another holder to have every listener", func() (bool, string) {
			now := holderPID(t, "n2")
			have, want := listeners(t, now), listeners(t, agent)
			return now != 0 && now != old && have == want && want > 0, fmt.Sprintf("holder %d has %d, agent %d", now, have, want)
		})
	}
	endAgent(t, "n2", syscall.SIGKILL)
	p.begin(`s = tcp(4)`)
	if err := labCommand("up"); err != nil {
		t.Fatal(err)
	}
	if r := p.reply("s = tcp(4)"); r != "null" {
		t.Errorf("socket() after holder and agent were killed: %s", r)
	}
}

// TestExecWithoutAgent enters a container while its node has no agent: the program starts, and its first
// socket() waits for the next agent.
func TestExecWithoutAgent(t *testing.T) {
	endAgent(t, "n2", syscall.SIGKILL)
	p := startPeer(t, "heddle", "n2/c1")
	p.begin(`s = tcp(4)`)
	if err := labCommand("up"); err != nil {
		t.Fatal(err)
	}
	if r := p.reply("s = tcp(4)"); r != "null" {
		t.Errorf("socket() of a program that started without an agent: %s", r)
	}
	port := freePort()
	server := startPeer(t, "heddle", "n1/c1")
	server.must(`l = listen(4, "0.0.0.0", %d)`, port)
	p.must(`s.connect((%q, %d))`, address(t, "heddle", "n1/c1"), port)
}

// TestStateDirectoryRemoved takes an agent's files away while its containers live. The next one finds the
// holder, which makes its socket again, and everything goes on.
func TestStateDirectoryRemoved(t *testing.T) {
	client, server := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n2/c1")
	target, port := address(t, "heddle", "n2/c1"), freePort()
	server.must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.must(`s = connect(4, %q, %d)`, target, port)
	server.must(`c, who = l.accept()`)
	holder := holderPID(t, "n2")
	endAgent(t, "n2", syscall.SIGKILL)
	for _, f := range []string{"holder.sock", "holder.sock.lock", "api.sock", "seccomp.sock", "node.json"} {
		if err := os.Remove(nodeFile("n2", f)); err != nil {
			t.Error(err)
		}
	}
	server.begin(`n = tcp(4)`)
	if err := labCommand("up"); err != nil {
		t.Fatal(err)
	}
	if r := server.reply("n = tcp(4)"); r != "null" {
		t.Errorf("socket() that waited gave %s", r)
	}
	if now := holderPID(t, "n2"); now != holder {
		t.Errorf("holder %d, was %d: its listeners are out of reach", now, holder)
	}
	client.must(`send(s, 5000)`)
	server.expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c, 5000)`)
	client.must(`s2 = connect(4, %q, %d)`, target, port)
	server.must(`c2, who = l.accept()`)
}

// TestStoreLost replaces the store by an empty one while containers live on both nodes. The node whose agent
// starts with it and the one whose agent sees it happen both tell it what it knew. On a busy machine the lab may find
// that the latter answers too slowly, and start it anew, too.
func TestStoreLost(t *testing.T) {
	client, server := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n2/c1")
	target, port := address(t, "heddle", "n2/c1"), freePort()
	server.must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.must(`s = connect(4, %q, %d)`, target, port)
	server.must(`c, who = l.accept()`)
	before := heddle(t, "endpoints", "--lab", labName, "--output", "json")
	endAgent(t, "n1", syscall.SIGTERM)
	if err := os.RemoveAll(nodeFile("n1", "etcd")); err != nil {
		t.Fatal(err)
	}
	client.begin(`n = tcp(4)`)
	if err := labCommand("up"); err != nil {
		t.Fatal(err)
	}
	if r := client.reply("n = tcp(4)"); r != "null" {
		t.Errorf("socket() that waited gave %s", r)
	}
	eventually(t, "n2 to join the new store", func() (bool, string) {
		log := nodeLog(t, "n2")
		return strings.Contains(log, "the store had lost this node; "), log
	})
	if log := nodeLog(t, "n1"); !strings.Contains(log, "endpoint that the store had lost is adopted") {
		t.Errorf("log of n1:\n%s", log)
	}
	if got := heddle(t, "endpoints", "--lab", labName, "--output", "json"); got != before {
		t.Errorf("endpoints\n%s\nwere\n%s", got, before)
	}
	client.must(`send(s, 5000)`)
	server.expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c, 5000)`)
	eventually(t, "a direct connection", func() (bool, string) {
		r := client.do(`d = connect(4, %q, %d)`, target, port)
		return r == "null", r
	})
	server.must(`c2, who = l.accept()`)
	client.must(`send(d, 5000)`)
	server.expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c2, 5000)`)
}

// TestIDsAreNotReused deletes an endpoint, restarts the agent and makes another: it gets a new id, although
// nobody has the old one.
func TestIDsAreNotReused(t *testing.T) {
	netns := labName + "-ids"
	if out, err := exec.Command("ip", "netns", "add", netns).CombinedOutput(); err != nil {
		t.Fatalf("ip netns add: %v\n%s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("ip", "netns", "delete", netns).CombinedOutput(); err != nil {
			t.Errorf("ip netns delete: %v\n%s", err, out)
		}
	})
	add := func(name string) (id int) {
		t.Helper()
		var e struct{ ID int }
		raw := heddle(t, "endpoints", "add", "--lab", labName, "--node", "n2", "--netns", "/run/netns/"+netns, "--output", "json", name)
		if err := json.Unmarshal([]byte(raw), &e); err != nil || e.ID == 0 {
			t.Fatalf("%v\n%s", err, raw)
		}
		heddle(t, "endpoints", "delete", "--lab", labName, "--node", "n2", name)
		return e.ID
	}
	first := add("ids/a")
	endAgent(t, "n2", syscall.SIGKILL)
	if err := labCommand("up"); err != nil {
		t.Fatal(err)
	}
	if second := add("ids/b"); second <= first {
		t.Errorf("id %d after id %d", second, first)
	}
}

// TestEndpointDeletedWhileItsContainerRuns refuses the container new sockets, by name, before and after a restart
// of the agent. What it has goes on.
func TestEndpointDeletedWhileItsContainerRuns(t *testing.T) {
	t.Cleanup(func() { // the lab as others know it
		if err := errors.Join(labCommand("down"), labCommand("up", "--nodes", "2", "--containers", "2")); err != nil {
			t.Error(err)
		}
	})
	client, server := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n2/c2")
	port := freePort()
	server.must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.must(`s = connect(4, %q, %d)`, address(t, "heddle", "n2/c2"), port)
	server.must(`c, who = l.accept()`)
	server.must(`before = tcp(4)`)
	heddle(t, "endpoints", "delete", "--lab", labName, "--node", "n2", "n2/c2")
	refused := func(when string) {
		t.Helper()
		server.expect(`"ENETDOWN"`, `error_of(tcp, 4)`)
		client.must(`send(s, 5000)`)
		server.expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c, 5000)`)
	}
	refused("before the restart")
	server.expect(`"ENETDOWN"`, `error_of(before.connect, (%q, %d))`, address(t, "heddle", "n1/c1"), port)
	pid := agentPID(t, "n2")
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	server.begin(`error_of(tcp, 4)`)
	if err := labCommand("up"); err != nil {
		t.Fatal(err)
	}
	if r := server.reply("error_of(tcp, 4)"); r != `"ENETDOWN"` {
		t.Errorf("socket() while no agent ran: %s", r)
	}
	refused("after the restart")
	if log := nodeLog(t, "n2"); !strings.Contains(log, "listener of an unknown endpoint") {
		t.Errorf("log of n2:\n%s", log)
	}
}

// TestHolderAndAgentTogether kills holder and agent at once, which nothing makes good without a service manager. Connections
// go on, new ones of sockets and listeners that are there are made; socket() fails with ENOSYS until the container is
// started anew.
func TestHolderAndAgentTogether(t *testing.T) {
	client, server := startPeer(t, "heddle", "n1/c1"), startPeer(t, "heddle", "n2/c1")
	target, port := address(t, "heddle", "n2/c1"), freePort()
	server.must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.must(`s = connect(4, %q, %d)`, target, port)
	server.must(`c, who = l.accept()`)
	agent, holder := agentPID(t, "n2"), holderPID(t, "n2")
	if err := syscall.Kill(agent, syscall.SIGSTOP); err != nil { // or it may start another holder
		t.Fatal(err)
	}
	if err := errors.Join(syscall.Kill(holder, syscall.SIGKILL), killAgent(agent, syscall.SIGKILL)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := labCommand("up"); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "calls to fail", func() (bool, string) {
		r := server.do(`error_of(tcp, 4)`)
		return r == `"ENOSYS"`, r
	})
	client.must(`send(s, 5000)`)
	server.expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c, 5000)`)
	client.must(`d = connect(4, %q, %d)`, target, port)
	server.must(`c2, who = l.accept()`)
	client.must(`send(d, 5000)`)
	server.expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c2, 5000)`)

	if err := labCommand("up"); err != nil { // starts the node's containers anew
		t.Fatal(err)
	}
	again := startPeer(t, "heddle", "n2/c1")
	again.must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.must(`e = connect(4, %q, %d)`, target, port)
	again.must(`c, who = l.accept()`)
}
