package lifecycle

import (
	"encoding/json"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/peerapi"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// askAll runs `heddle connections` for all nodes by way of one, and gives the nodes that answered
// and what is said beside.
func askAll(t *testing.T, by string) (nodes map[string]bool, said string, err error) {
	t.Helper()
	var out, errs strings.Builder
	cmd := exec.CommandContext(t.Context(), lab.Bin, "connections", "--api", lab.APISocket(by), "--all-nodes", "-o", "json")
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	var list []struct{ Node string }
	testutil.NoError(t, json.Unmarshal([]byte(out.String()), &list))
	nodes = make(map[string]bool)
	for _, c := range list {
		nodes[c.Node] = true
	}
	return nodes, errs.String(), err
}

// TestWholeNetwork: any agent answers for all; one that is stopped is named within seconds, and
// does not hide the others; a container does not reach the port.
func TestWholeNetwork(t *testing.T) {
	inLab(t, "w")
	server, client := lab.StartPeer(t, "heddle", "n2/c1"), lab.StartPeer(t, "heddle", "n1/c1")
	server.Must(`l = tcp(4)`)
	server.Must(`l.bind(("0.0.0.0", 7300))`)
	server.Must(`l.listen(8)`)
	client.Must(`s = tcp(4)`)
	client.Must(`s.connect((%q, 7300))`, lab.Address(t, "heddle", "n2/c1"))
	server.Must(`c = l.accept()[0]`)
	for _, by := range []string{"n1", "n2"} {
		nodes, said, err := askAll(t, by)
		if err != nil || !nodes["n1"] || !nodes["n2"] {
			t.Errorf("by way of %s: %v answered, %v: %s", by, nodes, err, said)
		}
	}
	if one := lab.Heddle(t, "status", "--all-nodes", "-o", "json"); strings.Count(one, `"vtep_mac"`) != 2 {
		t.Errorf("status of all nodes:\n%s", one)
	}

	t.Run("silent", func(t *testing.T) {
		pid := lab.AgentPID(t, "n2")
		testutil.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
		t.Cleanup(func() { testutil.NoError(t, syscall.Kill(pid, syscall.SIGCONT)) })
		nodes, said, err := askAll(t, "n1")
		if err == nil || !nodes["n1"] || nodes["n2"] || !strings.Contains(said, "ask node n2") || !strings.Contains(said, peerapi.Answers.String()) {
			t.Errorf("with n2 stopped: %v answered, %v: %s", nodes, err, said)
		}
	})

	t.Run("container", func(t *testing.T) {
		for _, mode := range []string{"heddle", "overlay"} {
			p := lab.StartPeer(t, mode, "n1/c2")
			p.Expect(`"ECONNREFUSED"`, `error_of(tcp(4).connect, (%q, %d))`, lab.Address(t, "host", "n1/c1"), peerapi.DefaultPort)
		}
	})
}
