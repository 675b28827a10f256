package attack

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// attack is one thing that a hostile program tries, and the one protection that keeps it from
// success. TestAttacks tries each twice: with all protections, when it must gain nothing, and
// without that one, when it must succeed, or it would prove nothing. docs/howto/attack-suite.md
// says how to add one.
type attack struct {
	name       string
	protection model.Protection
	// node is the one whose agent does without the protection: "n1" or "n2". The attacker is mostly
	// in n1/c1.
	node string
	// try reports what the attack gained: "" is nothing. What is neither that nor the success of
	// the attack fails the test.
	try func(t *testing.T) (gained string)
}

// attacks is the suite. Each file of attacks appends its own in an init function.
var attacks []attack

// besides are protections that keep an attack from success although they are meant against others:
// they are off with the one that is tried.
var besides = map[model.Protection][]model.Protection{
	model.ProtectPorts: {model.ProtectPortQuota}, // all of the node's ports are more than one endpoint may hold
}

// attackBin is the program that make attack built beside Bin.
func attackBin() string { return filepath.Join(filepath.Dir(lab.Bin), "attack", "heddle") }

// weakNode is a node whose agent can be one of make attack.
type weakNode struct {
	node string
	pid  int    // of its agent
	file string // where it is told what to do without
}

// judgedOnce are protections that are judged when an agent starts, or when a socket is made, which
// may be long before a program gets it; after the attack on probes the agent believes what is not
// so. Without the others an agent can do from one moment to the next.
var judgedOnce = map[model.Protection]bool{
	model.ProtectSocketOptions: true, model.ProtectStore: true, model.ProtectStoreCertificates: true, model.ProtectOverlay: true,
	model.ProtectUser: true, model.ProtectPorts: true, model.ProtectProbes: true, model.ProtectPortQuota: true, model.ProtectFlowMemory: true,
	model.ProtectBatches: true, model.ProtectOverlayPort: true, model.ProtectPeerKeys: true,
}

// weaken takes a node of the lab; it gets its own agent back at the end of the test.
func weaken(t *testing.T, node string) *weakNode {
	t.Helper()
	if _, err := os.Stat(attackBin()); err != nil {
		t.Fatalf("%v: run `make attack` first", err)
	}
	w := &weakNode{node, lab.AgentPID(t, node), filepath.Join(t.TempDir(), "without")}
	own := w.pid
	t.Cleanup(func() {
		if w.pid == own {
			return
		}
		if w.pid != 0 {
			if err := lab.KillAgent(w.pid, syscall.SIGTERM); err != nil {
				t.Error(err)
			}
		}
		if err := lab.Command("up"); err != nil {
			t.Error(err)
		}
	})
	return w
}

// without gives the node an agent without protections. Programs that run in containers go on, with
// their sockets.
func (w *weakNode) without(t *testing.T, protections ...model.Protection) {
	t.Helper()
	testutil.NoError(t, lab.KillAgent(w.pid, syscall.SIGTERM))
	w.pid = 0
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, attackBin(), "lab", "up", "--lab", lab.Name)
	cmd.Env = append(os.Environ(), withoutEnv(protections...), "HEDDLE_WITHOUT_FILE="+w.file)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s lab up: %v\n%s", attackBin(), err, out)
	}
	w.pid = lab.AgentPID(t, w.node)
	// The first thread, which /proc shows, must be where the others are: what asks /proc about
	// itself believes it.
	var own, node syscall.Stat_t
	testutil.NoError(t, errors.Join(syscall.Stat(fmt.Sprintf("/proc/%d/ns/net", w.pid), &own), syscall.Stat("/run/netns/"+lab.Name+"-"+w.node, &node)))
	if own.Ino != node.Ino {
		t.Errorf("the agent's first thread is in network namespace %d, the node is %d", own.Ino, node.Ino)
	}
	lab.AwaitPath(t, w.node, model.PeerProven)
}

// switchOff has the node's agent, which without made one of the suite's, do without a protection,
// and with all others.
func (w *weakNode) switchOff(t *testing.T, p model.Protection) {
	t.Helper()
	testutil.NoError(t, os.WriteFile(w.file, []byte(p.String()), 0o600))
	testutil.NoError(t, syscall.Kill(w.pid, syscall.SIGUSR1))
	testutil.Eventually(t, "the agent to do without "+p.String(), func() (bool, string) {
		said, err := os.ReadFile(w.file + ".done")
		return string(said) == p.String(), fmt.Sprint(string(said), err)
	})
}

// withoutEnv is the setting of the environment by which programs of make attack do without
// protections.
func withoutEnv(protections ...model.Protection) string {
	var names []string
	for _, p := range protections {
		names = append(names, p.String())
	}
	return "HEDDLE_WITHOUT=" + strings.Join(names, ",")
}

// TestAttacks runs the suite.
func TestAttacks(t *testing.T) {
	t.Run("protected", func(t *testing.T) {
		for _, a := range attacks {
			t.Run(a.protection.String()+"/"+a.name, func(t *testing.T) {
				if gained := a.try(t); gained != "" {
					t.Errorf("the attack gained: %s", gained)
				}
			})
		}
	})
	for _, node := range []string{"n1", "n2"} {
		weak := weaken(t, node)
		for _, once := range []bool{true, false} {
			own := weak.pid
			for _, p := range model.Protections {
				var mine []attack
				for _, a := range attacks {
					if a.protection == p.Protection && a.node == node && judgedOnce[p.Protection] == once {
						mine = append(mine, a)
					}
				}
				if len(mine) == 0 {
					continue
				}
				t.Run("without "+p.Name+" on "+node, func(t *testing.T) {
					// The first of those that need no agent of their own begins with one that never
					// did without another.
					if once || weak.pid == own {
						weak.without(t, append([]model.Protection{p.Protection}, besides[p.Protection]...)...)
					} else {
						weak.switchOff(t, p.Protection)
					}
					succeed(t, mine)
				})
			}
		}
	}
}

// tries is how often an attack without its protection may be made: some are races, which a thread
// now and then does not win.
const tries = 5

// succeed demands that attacks succeed: the node's agent does without what keeps them from it.
func succeed(t *testing.T, mine []attack) {
	for _, a := range mine {
		t.Run(a.name, func(t *testing.T) {
			for range tries {
				if a.try(t) != "" {
					return
				}
			}
			t.Errorf("the attack gains nothing without the protection either, tried %d times: it does not show that the protection works", tries)
		})
	}
}

// TestEveryProtectionIsAttacked: a protection that no attack fails without could as well be
// missing.
func TestEveryProtectionIsAttacked(t *testing.T) {
	for _, p := range model.Protections {
		if !slices.ContainsFunc(attacks, func(a attack) bool { return a.protection == p.Protection }) && attackedElsewhere[p.Protection] == "" {
			t.Errorf("no attack tries protection %s (%s)", p.Name, p.Help)
		}
	}
	for _, a := range attacks {
		if a.node != "n1" && a.node != "n2" {
			t.Errorf("%s: node %q", a.name, a.node)
		}
	}
}

// TestProductHasNoSwitch: the programs for use hold neither the name of the variable that switches
// protections off nor the set of those that are off; the suite's agent holds both.
func TestProductHasNoSwitch(t *testing.T) {
	product := filepath.Dir(lab.Bin)
	for path, want := range map[string]bool{
		filepath.Join(product, "heddle"): false, filepath.Join(product, "heddled"): false, filepath.Join(product, "heddle-runtime"): false,
		filepath.Join(product, "attack", "heddled"): true,
	} {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatalf("%v: run `make build attack` first", err)
		}
		if got := bytes.Contains(raw, []byte("HEDDLE_WITHOUT")); got != want {
			t.Errorf("%s contains the name of the switch: %v, want %v", path, got, want)
		}
		out, err := exec.Command("go", "tool", "nm", path).CombinedOutput()
		if err != nil {
			t.Fatalf("go tool nm %s: %v\n%s", path, err, out)
		}
		if got := bytes.Contains(out, []byte("internal/model.without")); got != want {
			t.Errorf("%s contains the set of switched-off protections: %v, want %v", path, got, want)
		}
	}
}

// gained describes what an attack got: "" if want is what the hostile program was told, or the
// answer if it is success.
func gained(t *testing.T, what, got, refused, success string) string {
	t.Helper()
	switch got {
	case refused:
		return ""
	case success:
		return fmt.Sprintf("%s: %s", what, got)
	}
	t.Errorf("%s: %s, want %s, or %s if the attack succeeds", what, got, refused, success)
	return ""
}

// netip4 is an IPv4 address as packets have it, in hexadecimal.
func netip4(t *testing.T, addr string) string {
	t.Helper()
	a, err := netip.ParseAddr(addr)
	testutil.NoError(t, err)
	return hex.EncodeToString(a.AsSlice())
}
