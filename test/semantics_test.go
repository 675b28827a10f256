package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// knownSemantics are what the cases of semantics.py may print otherwise in heddle mode, by case: rows of
// docs/differences.md. The function makes of a plain container's lines what is expected here.
var knownSemantics = map[string]func(string) string{
	// IP_TTL as the peer sees it: a direct path has no router of the overlay on it.
	"tos_ttl": func(plain string) string {
		for _, hops := range []string{"62", "63"} {
			plain = strings.ReplaceAll(plain, "(2, "+hops+")", "(2, 64)")
		}
		return plain
	},
	// SOL_MPTCP of a socket that listens.
}

// TestSemantics runs the cases of semantics.py against a peer on another node and one on the same node, in both modes: they
// must print the same.
func TestSemantics(t *testing.T) {
	script := filepath.Join(t.TempDir(), "semantics.py")
	raw, err := os.ReadFile("testdata/semantics.py")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(script, raw, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, peer := range []string{"n2/c1", "n1/c2"} {
		plain, here := runSemantics(t, "overlay", peer, script), runSemantics(t, "heddle", peer, script)
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
func runSemantics(t *testing.T, mode, peer, script string) map[string]string {
	t.Helper()
	port := strconv.Itoa(freePort())
	server := start(t, mode, peer, python, script, "serve", port)
	server.waitFor("ready")
	client := start(t, mode, "n1/c1", python, script, "run", address(t, mode, peer), port, address(t, mode, "n1/c1"))
	client.waitFor("== end\n")
	server.stop()
	out := map[string]string{}
	for _, section := range strings.Split(client.output(), "== ")[1:] {
		name, lines, _ := strings.Cut(section, "\n")
		if name != "end" {
			out[name] = strings.ReplaceAll(lines, fmt.Sprintf(", %s)", port), ", PORT)")
		}
	}
	return out
}
