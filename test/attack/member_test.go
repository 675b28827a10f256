package test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// end ends the agent of a bare node. One that is killed cannot say anything to the store any more.
func (n bareNode) end(t *testing.T, sig syscall.Signal) {
	t.Helper()
	var status struct{ PID int }
	_, body := ask(t, n.socket(), "GET", "/v1/status", "")
	if err := json.Unmarshal([]byte(body), &status); err != nil || status.PID < 2 {
		t.Fatalf("%v: %s", err, body)
	}
	if err := syscall.Kill(status.PID, sig); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the agent to end", func() (bool, string) {
		state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", status.PID))
		return err != nil || strings.Contains(string(state), ") Z "), string(state)
	})
}

// TestImpostor: the name of a live node is not to be had, not even with the network's join file; a node that was
// killed has its own back at once, and another may take it on request.
func TestImpostor(t *testing.T) {
	a, b := bareNodes(t)
	a.start(t, a.args())
	join := filepath.Join(a.dir, "state", "join.pem")
	elsewhere := filepath.Join(b.dir, "elsewhere") // the state directory of another machine
	nodes := func() string { _, out := ask(t, a.socket(), "GET", "/v1/nodes", ""); return out }
	var before string
	eventually(t, "the node to know itself", func() (bool, string) {
		before = nodes()
		return strings.Contains(before, "bad-a"), before
	})
	said := b.fails(t, nil, b.args("--join-file", join, "--node", "bad-a", "--state-dir", elsewhere))
	for _, want := range []string{"bad-a", a.underlay, "--take-over", "--node"} {
		if !strings.Contains(said, want) {
			t.Errorf("it said: %s\nwithout %q", said, want)
		}
	}
	if after := nodes(); after != before {
		t.Errorf("the nodes were %s, are %s", before, after)
	}

	b.start(t, b.args("--join-file", join))
	b.end(t, syscall.SIGKILL)
	b.start(t, b.args("--join-file", join)) // at once: it need not wait for its own lease
	status := func() string { _, out := ask(t, a.socket(), "GET", "/v1/status", ""); return out }
	eventually(t, "the live node to be there", func() (bool, string) {
		out := status()
		return strings.Contains(out, `"peers":1`) && !strings.Contains(out, "peers_away"), out
	})
	b.end(t, syscall.SIGTERM)
	eventually(t, "the ended node to be away", func() (bool, string) {
		out := status()
		return strings.Contains(out, `"peers_away":["bad-b"]`), out
	})
	another := func() { // machine: the same files but for what it is known by
		if err := os.Remove(filepath.Join(b.dir, "state", "instance")); err != nil {
			t.Fatal(err)
		}
	}
	another()
	b.start(t, b.args("--join-file", join)) // the name was given up
	b.end(t, syscall.SIGKILL)
	another()
	b.start(t, b.args("--join-file", join, "--take-over")) // whether the lease lives or not
}

// TestTeardownRefuses: what protects containers is not taken away from around them by accident.
func TestTeardownRefuses(t *testing.T) {
	command := heddled() + " teardown --bpf-dir /run/heddle/lab/" + labName + "/n2/bpf/heddle --state-dir /run/heddle/lab/" + labName + "/n2 --api-socket "
	for socket, want := range map[string]string{
		"/run/heddle/lab/" + labName + "/n2/api.sock": "an agent serves",
		"/none": "2 containers live",
	} {
		said := sh(t, labName+"-n2", command+socket+" 2>&1; echo exit code $?")
		if !strings.Contains(said, want) || !strings.Contains(said, "--force") || !strings.Contains(said, "exit code 1") {
			t.Errorf("teardown said: %s, want %q", said, want)
		}
	}
	startPeer(t, "heddle", "n2/c1").must(`s = tcp(4)`)
	mustRun(t, "overlay", "n1/c1", "ping", "-c1", "-W5", address(t, "overlay", "n2/c1"))
}
