package sockets

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// knownSemantics are what the cases of semantics.py may print otherwise in heddle mode, by case:
// rows of docs/differences.md. The function makes of a plain container's lines what is expected
// here.
var knownSemantics = map[string]func(string) string{
	// IP_TTL as the peer sees it: a direct path has no router of the overlay on it.
	"tos_ttl": func(plain string) string {
		for _, hops := range []string{"62", "63"} {
			plain = strings.ReplaceAll(plain, "(2, "+hops+")", "(2, 64)")
		}
		return plain
	},
}

// TestSemantics runs the cases of semantics.py against a peer on another node and one on the same
// node, in both modes: they must print the same.
func TestSemantics(t *testing.T) { compareSemantics(t) }

// TestFastOpen does so with a peer that gives out cookies and takes data from SYNs.
func TestFastOpen(t *testing.T) {
	for _, ns := range []string{"n1", "n2", "n1-c1", "n1-c2", "n2-c1"} {
		lab.SetSysctl(t, ns, "ipv4/tcp_fastopen", "3")
	}
	compareSemantics(t, "fastopen")
}

// TestUnprivilegedPorts does so where users without capabilities may bind ports from 80 on in the
// container: what the node's setting is does not matter.
func TestUnprivilegedPorts(t *testing.T) {
	lab.SetSysctl(t, "n1-c1", "ipv4/ip_unprivileged_port_start", "80")
	lab.SetSysctl(t, "n1", "ipv4/ip_unprivileged_port_start", "0")
	compareSemantics(t, "rights")
}

// compareSemantics runs cases (none: all) in both modes.
func compareSemantics(t *testing.T, cases ...string) {
	script := filepath.Join(t.TempDir(), "semantics.py")
	raw, err := os.ReadFile("testdata/semantics.py")
	testutil.NoError(t, err)
	testutil.NoError(t, os.WriteFile(script, raw, 0o755))
	for _, peer := range []string{"n2/c1", "n1/c2"} {
		plain, here := runSemantics(t, "overlay", peer, script, cases), runSemantics(t, "heddle", peer, script, cases)
		for name, want := range plain {
			t.Run(peer+"/"+name, func(t *testing.T) {
				if strings.Contains(want, "failed: ") || strings.Contains(want, "status ") {
					t.Fatalf("the case itself fails in a plain container:\n%s", want)
				}
				if known := knownSemantics[name]; known != nil {
					want = known(want)
				}
				if got := here[name]; got != want {
					t.Errorf("got:\n%swant:\n%s", got, want)
				}
			})
		}
		if len(here) != len(plain) || len(plain) == 0 {
			t.Errorf("%d cases, %d on a plain container", len(here), len(plain))
		}
	}
}

// runSemantics runs the cases in a container and gives what each printed.
func runSemantics(t *testing.T, mode, peer, script string, cases []string) map[string]string {
	t.Helper()
	port := strconv.Itoa(lab.FreePort())
	server := lab.Start(t, mode, peer, lab.Python, script, "serve", port)
	server.WaitFor("ready")
	client := lab.Start(t, mode, "n1/c1", append([]string{lab.Python, script, "run", lab.Address(t, mode, peer), port, lab.Address(t, mode, "n1/c1")}, cases...)...)
	client.WaitFor("== end\n")
	server.Stop()
	out := map[string]string{}
	for _, section := range strings.Split(client.Output(), "== ")[1:] {
		name, lines, _ := strings.Cut(section, "\n")
		if name != "end" {
			out[name] = lines
		}
	}
	return out
}
