package lab

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

// ListedConnection is one line of `heddle connections`.
type ListedConnection struct {
	Node string
	model.Connection
}

// Connections lists a node's connections of one endpoint.
func Connections(t testing.TB, container string, args ...string) []ListedConnection {
	t.Helper()
	node, _, _ := strings.Cut(container, "/")
	var all []ListedConnection
	Query(t, &all, append([]string{"connections", "--node", node, "--endpoint", container}, args...)...)
	return all
}

// AwaitConnection waits until a node lists the connection with these ports and byte counts.
func AwaitConnection(t testing.TB, container string, local, remote uint16, sent, received uint64) ListedConnection {
	t.Helper()
	var found ListedConnection
	what := fmt.Sprintf("a connection of %s from port %d to %d with %d bytes sent, %d received", container, local, remote, sent, received)
	testutil.Eventually(t, what, func() (bool, string) {
		all := Connections(t, container)
		at := slices.IndexFunc(all, func(c ListedConnection) bool {
			return c.Local.Port() == local && c.Remote.Port() == remote && c.BytesSent == sent && c.BytesReceived == received
		})
		if at >= 0 {
			found = all[at]
		}
		return at >= 0, fmt.Sprintf("%+v", all)
	})
	return found
}

// DirectPaths gives what a node's agent knows of the direct paths to the others.
func DirectPaths(t testing.TB, node string) model.DirectPaths {
	t.Helper()
	var status []struct {
		Direct model.DirectPaths `json:"direct_paths"`
	}
	Query(t, &status, "status", "--node", node)
	return status[0].Direct
}

// AwaitPath waits until a node's path to the other one is in a state.
func AwaitPath(t testing.TB, node string, state model.PeerState) {
	t.Helper()
	testutil.Eventually(t, fmt.Sprintf("the direct path from %s to be %s", node, state), func() (bool, string) {
		d := DirectPaths(t, node)
		return d.Peers[state] == 1, fmt.Sprintf("%+v", d)
	})
}

// Spoil puts a table of nftables into a namespace of the lab until repair, or the end of the test.
func Spoil(t testing.TB, suffix, family, rules string) (repair func()) {
	t.Helper()
	table, there := family+" heddle-test", true
	Shell(t, Name+"-"+suffix, fmt.Sprintf("nft 'table %s {\n%s\n}'", table, rules))
	repair = func() {
		if there {
			there = false
			Shell(t, Name+"-"+suffix, "nft delete table "+table)
		}
	}
	t.Cleanup(func() {
		repair()
		if t.Failed() { // later tests need the direct path
			_ = Command("up")
		}
	})
	return repair
}

// ProbeWithoutAgent has n1 probe n2, whose agent does not run: the path must be found to work,
// because n2's programs are there. p is a peer on n1.
func ProbeWithoutAgent(t *testing.T, p *Peer) {
	t.Helper()
	probed := DirectPaths(t, "n1").Probes["answered"]
	p.Do(`connect(4, %q, %d)`, Address(t, "heddle", "n2/c1"), FreePort()) // is refused, and so asks for a probe
	testutil.Eventually(t, "n1 to probe n2", func() (bool, string) {
		d := DirectPaths(t, "n1")
		return d.Probes["answered"] > probed, fmt.Sprintf("%+v", d)
	})
	if d := DirectPaths(t, "n1"); d.Peers[model.PeerProven] != 1 {
		t.Errorf("without the agent the path is %+v", d)
	}
}
