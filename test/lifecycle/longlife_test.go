package lifecycle

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

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// keeperPID gives the process that keeps a node's seccomp listeners, 0 if there is none.
func keeperPID(t testing.TB, node string) int {
	t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	testutil.NoError(t, err)
	want := []string{"park", "--socket", lab.NodeFile(node, "holder.sock")}
	for _, p := range procs {
		raw, err := os.ReadFile(p)
		words := strings.Split(strings.TrimSuffix(string(raw), "\x00"), "\x00")
		if err != nil || !slices.Equal(words[1:], want) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(p)))
		testutil.NoError(t, err)
		return pid
	}
	return 0
}

func nodeLog(t testing.TB, node string) string {
	t.Helper()
	raw, err := os.ReadFile(lab.NodeFile(node, "heddled.log"))
	testutil.NoError(t, err)
	return string(raw)
}

// TestKeeperKilledThenAgent kills the fd keeper, which the agent replaces, then the agent. No call
// may be lost.
func TestKeeperKilledThenAgent(t *testing.T) {
	p := lab.StartPeer(t, "heddle", "n2/c1")
	p.Must(`s = tcp(4)`)
	agent := lab.AgentPID(t, "n2")
	for range 3 {
		old := keeperPID(t, "n2")
		if old == 0 {
			t.Fatal("no fd keeper")
		}
		testutil.NoError(t, syscall.Kill(old, syscall.SIGKILL))
		testutil.Eventually(t, "another fd keeper to have every listener", func() (bool, string) {
			now := keeperPID(t, "n2")
			have, want := lab.Listeners(t, now), lab.Listeners(t, agent)
			return now != 0 && now != old && have == want && want > 0, fmt.Sprintf("fd keeper %d has %d, agent %d", now, have, want)
		})
	}
	lab.EndAgent(t, "n2", syscall.SIGKILL)
	p.Begin(`s = tcp(4)`)
	testutil.NoError(t, lab.Command("up"))
	if r := p.Reply("s = tcp(4)"); r != "null" {
		t.Errorf("socket() after fd keeper and agent were killed: %s", r)
	}
}

// TestExecWithoutAgent enters a container while its node has no agent: the program starts, and its
// first socket() waits for the next agent.
func TestExecWithoutAgent(t *testing.T) {
	lab.EndAgent(t, "n2", syscall.SIGKILL)
	p := lab.StartPeer(t, "heddle", "n2/c1")
	p.Begin(`s = tcp(4)`)
	testutil.NoError(t, lab.Command("up"))
	if r := p.Reply("s = tcp(4)"); r != "null" {
		t.Errorf("socket() of a program that started without an agent: %s", r)
	}
	port := lab.FreePort()
	server := lab.StartPeer(t, "heddle", "n1/c1")
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	p.Must(`s.connect((%q, %d))`, lab.Address(t, "heddle", "n1/c1"), port)
}

// TestStateDirectoryRemoved takes an agent's files away while its containers live. The next one
// finds the fd keeper, which makes its socket again, and everything goes on.
func TestStateDirectoryRemoved(t *testing.T) {
	client, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1")
	target, port := lab.Address(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, target, port)
	server.Must(`c, who = l.accept()`)
	keeper := keeperPID(t, "n2")
	lab.EndAgent(t, "n2", syscall.SIGKILL)
	for _, f := range []string{"holder.sock", "holder.sock.lock", "api.sock", "seccomp.sock", "node.json"} {
		if err := os.Remove(lab.NodeFile("n2", f)); err != nil {
			t.Error(err)
		}
	}
	server.Begin(`n = tcp(4)`)
	testutil.NoError(t, lab.Command("up"))
	if r := server.Reply("n = tcp(4)"); r != "null" {
		t.Errorf("socket() that waited gave %s", r)
	}
	if now := keeperPID(t, "n2"); now != keeper {
		t.Errorf("fd keeper %d, was %d: its listeners are out of reach", now, keeper)
	}
	client.Must(`send(s, 5000)`)
	server.Expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c, 5000)`)
	client.Must(`s2 = connect(4, %q, %d)`, target, port)
	server.Must(`c2, who = l.accept()`)
}

// TestStoreLost replaces the store by an empty one while containers live on both nodes. The node
// whose agent starts with it and the one whose agent sees it happen both tell it what it knew. On a
// busy machine the lab may find that the latter answers too slowly, and start it anew, too.
func TestStoreLost(t *testing.T) {
	client, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1")
	target, port := lab.Address(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, target, port)
	server.Must(`c, who = l.accept()`)
	before := lab.Heddle(t, "endpoints", "--output", "json")
	lab.EndAgent(t, "n1", syscall.SIGTERM)
	testutil.NoError(t, os.RemoveAll(lab.NodeFile("n1", "etcd")))
	client.Begin(`n = tcp(4)`)
	testutil.NoError(t, lab.Command("up"))
	if r := client.Reply("n = tcp(4)"); r != "null" {
		t.Errorf("socket() that waited gave %s", r)
	}
	testutil.Eventually(t, "n2 to join the new store", func() (bool, string) {
		log := nodeLog(t, "n2")
		return strings.Contains(log, "the store had lost this node; "), log
	})
	if log := nodeLog(t, "n1"); !strings.Contains(log, "endpoint that the store had lost is adopted") {
		t.Errorf("log of n1:\n%s", log)
	}
	if got := lab.Heddle(t, "endpoints", "--output", "json"); got != before {
		t.Errorf("endpoints\n%s\nwere\n%s", got, before)
	}
	client.Must(`send(s, 5000)`)
	server.Expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c, 5000)`)
	testutil.Eventually(t, "a direct connection", func() (bool, string) {
		r := client.Do(`d = connect(4, %q, %d)`, target, port)
		return r == "null", r
	})
	server.Must(`c2, who = l.accept()`)
	client.Must(`send(d, 5000)`)
	server.Expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c2, 5000)`)
}

// TestIDsAreNotReused deletes an endpoint, restarts the agent and makes another: it gets a new id,
// although nobody has the old one.
func TestIDsAreNotReused(t *testing.T) {
	netns := lab.Name + "-ids"
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
		raw := lab.Heddle(t, "endpoints", "add", "--node", "n2", "--netns", "/run/netns/"+netns, "--output", "json", name)
		if err := json.Unmarshal([]byte(raw), &e); err != nil || e.ID == 0 {
			t.Fatalf("%v\n%s", err, raw)
		}
		lab.Heddle(t, "endpoints", "delete", "--node", "n2", name)
		return e.ID
	}
	first := add("ids/a")
	lab.EndAgent(t, "n2", syscall.SIGKILL)
	testutil.NoError(t, lab.Command("up"))
	if second := add("ids/b"); second <= first {
		t.Errorf("id %d after id %d", second, first)
	}
}

// TestEndpointDeletedWhileItsContainerRuns refuses the container new sockets, by name, before and
// after a restart of the agent. What it has goes on.
func TestEndpointDeletedWhileItsContainerRuns(t *testing.T) {
	t.Cleanup(func() { // the lab as others know it
		if err := errors.Join(lab.Command("down"), lab.Command("up", "--nodes", "2", "--containers", "2")); err != nil {
			t.Error(err)
		}
	})
	client, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c2")
	port := lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, lab.Address(t, "heddle", "n2/c2"), port)
	server.Must(`c, who = l.accept()`)
	server.Must(`before = tcp(4)`)
	lab.Heddle(t, "endpoints", "delete", "--node", "n2", "n2/c2")
	refused := func(when string) {
		t.Helper()
		server.Expect(`"ENETDOWN"`, `error_of(tcp, 4)`)
		client.Must(`send(s, 5000)`)
		server.Expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c, 5000)`)
	}
	refused("before the restart")
	server.Expect(`"ENETDOWN"`, `error_of(before.connect, (%q, %d))`, lab.Address(t, "heddle", "n1/c1"), port)
	pid := lab.AgentPID(t, "n2")
	testutil.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	server.Begin(`error_of(tcp, 4)`)
	testutil.NoError(t, lab.Command("up"))
	if r := server.Reply("error_of(tcp, 4)"); r != `"ENETDOWN"` {
		t.Errorf("socket() while no agent ran: %s", r)
	}
	refused("after the restart")
	if log := nodeLog(t, "n2"); !strings.Contains(log, "listener of an unknown endpoint") {
		t.Errorf("log of n2:\n%s", log)
	}
}

// TestKeeperAndAgentTogether kills fd keeper and agent at once, which nothing makes good without a
// service manager. Connections go on, new ones of sockets and listeners that are there are made;
// socket() fails with ENOSYS until the container is started anew.
func TestKeeperAndAgentTogether(t *testing.T) {
	client, server := lab.StartPeer(t, "heddle", "n1/c1"), lab.StartPeer(t, "heddle", "n2/c1")
	target, port := lab.Address(t, "heddle", "n2/c1"), lab.FreePort()
	server.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`s = connect(4, %q, %d)`, target, port)
	server.Must(`c, who = l.accept()`)
	agent, keeper := lab.AgentPID(t, "n2"), keeperPID(t, "n2")
	if err := syscall.Kill(agent, syscall.SIGSTOP); err != nil { // or it may start another fd keeper
		t.Fatal(err)
	}
	testutil.NoError(t, errors.Join(syscall.Kill(keeper, syscall.SIGKILL), lab.KillAgent(agent, syscall.SIGKILL)))
	t.Cleanup(func() {
		if err := lab.Command("up"); err != nil {
			t.Error(err)
		}
	})
	testutil.Eventually(t, "calls to fail", func() (bool, string) {
		r := server.Do(`error_of(tcp, 4)`)
		return r == `"ENOSYS"`, r
	})
	client.Must(`send(s, 5000)`)
	server.Expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c, 5000)`)
	client.Must(`d = connect(4, %q, %d)`, target, port)
	server.Must(`c2, who = l.accept()`)
	client.Must(`send(d, 5000)`)
	server.Expect(`[5000, "62928f6f9c49d2ca"]`, `receive(c2, 5000)`)

	if err := lab.Command("up"); err != nil { // starts the node's containers anew
		t.Fatal(err)
	}
	again := lab.StartPeer(t, "heddle", "n2/c1")
	again.Must(`l = listen(4, "0.0.0.0", %d)`, port)
	client.Must(`e = connect(4, %q, %d)`, target, port)
	again.Must(`c, who = l.accept()`)
}
