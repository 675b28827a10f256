package attack

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestImpostor: the name of a live node is not to be had, not even with the network's join file; a
// node that was killed has its own back at once, and another may take it on request.
func TestImpostor(t *testing.T) {
	a, b := lab.BareNodes(t)
	a.Start(t, a.Args())
	join := filepath.Join(a.Dir, "state", "join.pem")
	elsewhere := filepath.Join(b.Dir, "elsewhere") // the state directory of another machine
	nodes := func() string { _, out := lab.AskAgent(t, a.Socket(), "GET", "/v1/nodes", ""); return out }
	var before string
	testutil.Eventually(t, "the node to know itself", func() (bool, string) {
		before = nodes()
		return strings.Contains(before, "bad-a"), before
	})
	said := b.Fails(t, nil, b.Args("--join-file", join, "--node", "bad-a", "--state-dir", elsewhere))
	for _, want := range []string{"bad-a", a.Underlay, "--take-over", "--node"} {
		if !strings.Contains(said, want) {
			t.Errorf("it said: %s\nwithout %q", said, want)
		}
	}
	if after := nodes(); after != before {
		t.Errorf("the nodes were %s, are %s", before, after)
	}

	b.Start(t, b.Args("--join-file", join))
	b.End(t, syscall.SIGKILL)
	b.Start(t, b.Args("--join-file", join)) // at once: it need not wait for its own lease
	status := func() string { _, out := lab.AskAgent(t, a.Socket(), "GET", "/v1/status", ""); return out }
	testutil.Eventually(t, "the live node to be there", func() (bool, string) {
		out := status()
		return strings.Contains(out, `"peers":1`) && !strings.Contains(out, "peers_away"), out
	})
	b.End(t, syscall.SIGTERM)
	testutil.Eventually(t, "the ended node to be away", func() (bool, string) {
		out := status()
		return strings.Contains(out, `"peers_away":["bad-b"]`), out
	})
	another := func() { // machine: the same files but for what it is known by
		testutil.NoError(t, os.Remove(filepath.Join(b.Dir, "state", "instance")))
	}
	another()
	b.Start(t, b.Args("--join-file", join)) // the name was given up
	b.End(t, syscall.SIGKILL)
	another()
	b.Start(t, b.Args("--join-file", join, "--take-over")) // whether the lease lives or not
}

// TestTeardownRefuses: what protects containers is not taken away from around them by accident.
func TestTeardownRefuses(t *testing.T) {
	command := lab.Heddled() + " teardown --bpf-dir /run/heddle/lab/" + lab.Name + "/n2/bpf/heddle --state-dir /run/heddle/lab/" + lab.Name + "/n2 --api-socket "
	for socket, want := range map[string]string{
		"/run/heddle/lab/" + lab.Name + "/n2/api.sock": "an agent serves",
		"/none": "2 containers live",
	} {
		said := lab.Shell(t, lab.Name+"-n2", command+socket+" 2>&1; echo exit code $?")
		if !strings.Contains(said, want) || !strings.Contains(said, "--force") || !strings.Contains(said, "exit code 1") {
			t.Errorf("teardown said: %s, want %q", said, want)
		}
	}
	lab.StartPeer(t, "heddle", "n2/c1").Must(`s = tcp(4)`)
	lab.MustRun(t, "overlay", "n1/c1", "ping", "-c1", "-W5", lab.Address(t, "overlay", "n2/c1"))
}
