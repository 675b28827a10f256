package programs

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// verbsLab is a lab whose containers have RDMA devices, beside the others.
type verbsLab struct {
	*testing.T
	name string
}

func newVerbsLab(t *testing.T) verbsLab {
	t.Helper()
	l := verbsLab{t, lab.Name + "v"}
	t.Cleanup(func() {
		if out, err := l.heddle(context.Background(), "lab", "down").CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
	l.up()
	return l
}

// heddle is a command of Heddle's for the lab: what follows on "--" is a program's.
func (l verbsLab) heddle(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, lab.Bin, append(args, "--lab", l.name)...)
}

func (l verbsLab) up() {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), 4*testutil.WaitTimeout)
	defer cancel()
	if out, err := l.heddle(ctx, "lab", "up", "--nodes", "2", "--containers", "2", "--verbs").CombinedOutput(); err != nil {
		l.Fatalf("%v\n%s", err, out)
	}
}

func (l verbsLab) exec(ctx context.Context, container string, words []string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, lab.Bin, append([]string{"lab", "exec", "--lab", l.name, container, "--"}, words...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // passed on, which KILL is not
	return cmd
}

// pair runs a program of two ends, which waits for its client without a word, in n1/c1 and in
// client.
func (l verbsLab) pair(client string, words ...string) (served, said string, err error) {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), testutil.WaitTimeout)
	defer cancel()
	server := l.exec(ctx, "n1/c1", words)
	var out strings.Builder
	server.Stdout, server.Stderr = &out, &out
	testutil.NoError(l, server.Start())
	addr, err := l.heddle(ctx, "lab", "ip", "n1/c1").Output()
	testutil.NoError(l, err)
	words = append(words, strings.TrimSpace(string(addr)))
	for {
		answer, err := l.exec(ctx, client, words).CombinedOutput()
		said = string(answer)
		if err == nil || ctx.Err() != nil || !strings.Contains(strings.ToLower(said), "couldn't connect") {
			cancelled := server.Wait()
			if err == nil {
				err = cancelled
			}
			return out.String(), said, err
		}
	}
}

func (l verbsLab) mustPair(client string, words ...string) {
	l.Helper()
	if served, said, err := l.pair(client, words...); err != nil {
		l.Errorf("%s between n1/c1 and %s: %v\n--- n1/c1\n%s\n--- %s\n%s", words[0], client, err, served, client, said)
	}
}

// noVerbs forbids the connections of queue pairs, and no others.
const noVerbs = `apiVersion: heddle.dev/v1
kind: Policy
name: no-verbs
subject: {}
ingress:
  rules:
  - {action: deny, ports: [tcp/4791]}
`

// policyHolds wants pairs of endpoints that policy forbids to fail, on one node, too.
func (l verbsLab) policyHolds() {
	l.Helper()
	file := filepath.Join(l.TempDir(), "policy.yaml")
	testutil.NoError(l, os.WriteFile(file, []byte(noVerbs), 0o600))
	policy := func(args ...string) {
		l.Helper()
		if out, err := l.heddle(l.Context(), append([]string{"policy"}, args...)...).CombinedOutput(); err != nil {
			l.Fatalf("heddle policy %v: %v\n%s", args, err, out)
		}
	}
	policy("apply", "--node", "n1", "-f", file)
	served, said, err := l.pair("n1/c2", "timeout", "10", "ibv_rc_pingpong", "-g", "0")
	if err == nil || strings.Contains(served+said, "usec/iter") {
		l.Errorf("queue pairs communicate that policy forbids: %v\n%s\n%s", err, served, said)
	}
	policy("delete", "--node", "n1", "no-verbs")
}

// router gives the state of n1's router.
func (l verbsLab) router() (api.Router, error) {
	out, err := l.heddle(l.Context(), "status", "--node", "n1", "--output", "json").Output()
	if err != nil {
		return api.Router{}, err
	}
	var status []struct{ Router *api.Router }
	if err := json.Unmarshal(out, &status); err != nil || len(status) != 1 || status[0].Router == nil {
		return api.Router{}, fmt.Errorf("status %s: %w", out, err)
	}
	return *status[0].Router, nil
}

// TestVerbs: Debian's own programs, as they are, on one node and between two, and after the ends of
// agent and router.
func TestVerbs(t *testing.T) {
	l := newVerbsLab(t)
	for _, client := range []string{"n1/c2", "n2/c1"} {
		l.mustPair(client, "ibv_rc_pingpong", "-g", "0")
		l.mustPair(client, "ib_send_bw", "-x", "0", "-n", "200")
	}
	l.policyHolds()
	before, err := l.router()
	if err != nil || before.State != api.RouterRuns || before.Endpoints != 2 {
		t.Fatalf("router %+v, %v", before, err)
	}

	out, err := l.heddle(t.Context(), "status", "--node", "n1", "--output", "json").Output()
	testutil.NoError(t, err)
	var status []struct{ PID int }
	testutil.NoError(t, json.Unmarshal(out, &status))
	testutil.NoError(t, lab.KillAgent(status[0].PID, syscall.SIGKILL))
	l.up()
	testutil.Eventually(t, "the next agent to have the router", func() (bool, string) {
		now, err := l.router()
		return err == nil && now.PID == before.PID, fmt.Sprintf("%+v, %v; before %+v", now, err, before)
	})
	l.mustPair("n1/c2", "ibv_rc_pingpong", "-g", "0")

	testutil.NoError(t, syscall.Kill(before.PID, syscall.SIGKILL))
	testutil.Eventually(t, "another router", func() (bool, string) {
		now, err := l.router()
		return err == nil && now.State == api.RouterRuns && now.PID != before.PID && now.Ended == 1, fmt.Sprintf("%+v, %v", now, err)
	})
	l.mustPair("n1/c2", "ibv_rc_pingpong", "-g", "0")
	l.mustPair("n2/c1", "ibv_rc_pingpong", "-g", "0")
}
