package lifecycle

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// previousVersion is what the agents before the upgrade say they are, unless HEDDLE_PREVIOUS_BIN
// has those of a real earlier build: `make test-upgrade REV=COMMIT`.
const previousVersion = "previous-build"

// upgradeLoad is one client of TestUpgrade, and how far it is.
type upgradeLoad struct {
	*lab.Program
	name string
	now  struct {
		Connects, Exchanges int
		Connect, Exchange   float64
		Failed              []string
	}
	seen int // lines of output that were read
}

// ask gets how far the client is.
func (l *upgradeLoad) ask(t *testing.T) {
	t.Helper()
	if _, err := l.Stdin.Write([]byte("\n")); err != nil {
		t.Fatalf("%s: %v\n%s", l.name, err, l.Output())
	}
	l.read(t)
}

// read waits for the next report.
func (l *upgradeLoad) read(t *testing.T) {
	t.Helper()
	testutil.Eventually(t, l.name+" to report", func() (bool, string) {
		out := l.Output()
		lines := strings.SplitAfter(out, "\n")
		if len(lines)-1 <= l.seen {
			return false, out
		}
		if err := json.Unmarshal([]byte(lines[l.seen]), &l.now); err != nil {
			t.Fatalf("%s: %v\n%s", l.name, err, out)
		}
		return true, ""
	})
	l.seen++
	if len(l.now.Failed) > 0 {
		t.Fatalf("%s failed: %q", l.name, l.now.Failed)
	}
}

// startPrevious puts the agents of the previous build into the lab's nodes, until the end of the
// test.
func startPrevious(t *testing.T) {
	t.Helper()
	bin := os.Getenv("HEDDLE_PREVIOUS_BIN")
	if bin != "" {
		// A lab of its own making: fd keeper, containers and all.
		t.Cleanup(func() {
			if err := errors.Join(lab.Command("down"), lab.Command("up", "--nodes", "2", "--containers", "2")); err != nil {
				t.Error(err)
			}
		})
		testutil.NoError(t, lab.Command("down"))
	} else {
		bin = t.TempDir()
		build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-X heddle.dev/heddle/internal/version.release="+previousVersion,
			"-o", bin+"/", "../../cmd/heddle", "../../cmd/heddled", "../../cmd/heddle-runtime")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("go build: %v\n%s", err, out)
		}
		for _, node := range []string{"n1", "n2"} {
			lab.EndAgent(t, node, syscall.SIGTERM)
		}
	}
	args := []string{"lab", "up", "--lab", lab.Name, "--nodes", "2", "--containers", "2"}
	if out, err := exec.Command(filepath.Join(bin, "heddle"), args...).CombinedOutput(); err != nil {
		t.Fatalf("lab of the previous build: %v\n%s", err, out)
	}
}

// versions gives what the agents say they are.
func versions(t *testing.T) (out [2]string) {
	t.Helper()
	for i, node := range []string{"n1", "n2"} {
		var status []struct{ Version string }
		lab.Query(t, &status, "status", "--node", node)
		out[i] = status[0].Version
	}
	return out
}

// TestUpgrade replaces the agents of both nodes by those of another build, while a thousand
// connections on all paths have traffic and every container makes new ones. No connection ends, no
// call fails, and new connections are made all the time.
func TestUpgrade(t *testing.T) {
	current := versions(t)
	startPrevious(t)
	before := versions(t)
	if before == current && os.Getenv("HEDDLE_PREVIOUS_BIN") == "" { // a build of old may not know its own version
		t.Fatalf("agents are %q, before the upgrade as after it", before)
	}

	const each = 250
	script, err := filepath.Abs("testdata/upgrade.py")
	testutil.NoError(t, err)
	port := fmt.Sprint(lab.FreePort())
	for _, c := range []string{"n1/c1", "n2/c1"} {
		lab.Start(t, "heddle", c, "python3", script, "serve", port).WaitFor("listening")
	}
	var loads []*upgradeLoad
	for _, c := range [][2]string{{"n1/c1", "n2/c1"}, {"n1/c2", "n1/c1"}, {"n2/c1", "n1/c1"}, {"n2/c2", "n2/c1"}} {
		p := lab.Start(t, "heddle", c[0], "python3", script, "load", fmt.Sprint(each), lab.Address(t, "heddle", c[1]), port)
		loads = append(loads, &upgradeLoad{Program: p, name: c[0] + " to " + c[1]})
	}
	for _, l := range loads {
		l.read(t)
	}
	progress := func(what string, of func(*upgradeLoad) int, by int) {
		t.Helper()
		for _, l := range loads {
			l.ask(t)
			from := of(l)
			testutil.Eventually(t, fmt.Sprintf("%s: %d more %s", l.name, by, what), func() (bool, string) {
				l.ask(t)
				return of(l) >= from+by, fmt.Sprintf("%+v", l.now)
			})
		}
	}
	connects, exchanges := func(l *upgradeLoad) int { return l.now.Connects }, func(l *upgradeLoad) int { return l.now.Exchanges }
	progress("connects", connects, 20)

	for _, node := range []string{"n1", "n2"} {
		lab.EndAgent(t, node, syscall.SIGTERM)
		progress("exchanges without its agent", exchanges, each)
		if os.Getenv("HEDDLE_PREVIOUS_BIN") == "" && lab.SocketsWithoutAgent(t) { // else the fd keeper may be from before it could
			progress("connects without its agent", connects, 20)
		}
		testutil.NoError(t, lab.Command("up"))
		progress("connects", connects, 20)
	}
	if after := versions(t); after != current {
		t.Errorf("agents are %q, want %q", after, current)
	}
	for _, l := range loads {
		if err := l.Stdin.Close(); err != nil {
			t.Error(err)
		}
		l.read(t)
		t.Logf("%s: %d exchanges over %d live connections, %d at once in at most %.2f s; %d new connections, each in at most %.2f s",
			l.name, l.now.Exchanges, each, 50, l.now.Exchange, l.now.Connects, l.now.Connect)
	}
}
