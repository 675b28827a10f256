package policy

import (
	"context"
	"encoding/json"
	"errors"
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

// TestPolicyBadInput: what is contradictory, empty, huge or malformed is refused whole, with the
// place and the reason, and the rules from before stay in force.
func TestPolicyBadInput(t *testing.T) {
	clearPolicy(t)
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		testutil.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	const head = "apiVersion: heddle.dev/v1\nkind: Policy\n"
	good := file("good.yaml", head+"name: bad-input\nsubject: {labels: {app: x}}\ningress: {default: deny, rules: [{action: allow, ports: [tcp/80]}]}\n")
	other := file("other.yaml", head+"name: another\nsubject: {}\ningress: {default: deny}\n")
	lab.Heddle(t, "policy", "apply", "-f", good)
	before := lab.Heddle(t, "policy", "list", "--output", "json")
	if again := lab.Heddle(t, "policy", "apply", "-f", good); again != "1 unchanged\n" {
		t.Errorf("applied again: %q", again)
	}
	bad := func(name, text string) []string { return []string{"apply", "-f", other, "-f", file(name, text)} }
	var rules strings.Builder
	for i := range 20000 {
		fmt.Fprintf(&rules, "  - {action: allow, ports: [tcp/%d]}\n", 1+i)
	}
	var wide strings.Builder // one file in order, more than one step takes
	for i := range 4000 {
		fmt.Fprintf(&wide, "%sname: wide-%d\nsubject: {}\ningress: {default: deny}\n---\n", head, i)
	}
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"malformed":        {bad("a.yaml", "a: [b"), "a.yaml: document 1: no YAML or JSON"},
		"empty":            {bad("b.yaml", "# nothing\n"), "b.yaml: no document in it"},
		"no such file":     {[]string{"apply", "-f", other, "-f", dir + "/none"}, "no such file"},
		"no file":          {[]string{"apply"}, "name one with -f"},
		"unknown field":    {bad("c.yaml", head+"name: c\nsubject: {}\ningres: {default: deny}\n"), `c.yaml:5: document 1: field "ingres" is not known`},
		"contradictory":    {bad("d.yaml", head+"name: d\nsubject: {}\ningress:\n  rules:\n  - {action: allow, ports: [tcp/1]}\n  - {action: deny, ports: [tcp/1]}\n"), "d.yaml:8: document 1: ingress.rules[1]: contradicts ingress.rules[0]"},
		"twice":            {bad("e.yaml", head+"name: bad-input\nsubject: {}\ningress: {default: deny}\n---\n"+head+"name: bad-input\nsubject: {}\ningress: {default: allow}\n"), "e.yaml:7: document 2: policy bad-input is described twice"},
		"named port":       {bad("f.yaml", "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: f}\nspec: {podSelector: {}, ingress: [{ports: [{port: http}]}]}\n"), "f.yaml:4: document 1: spec.ingress[0].ports[0].port: named ports are not supported"},
		"too many rules":   {bad("g.yaml", head+"name: g\nsubject: {}\ningress:\n  rules:\n"+rules.String()), "20000 rules, at most 10000"},
		"huge":             {bad("h.yaml", strings.Repeat("# comment\n", 200000)), "at most 1048576 are read"},
		"too many at once": {bad("i.yaml", wide.String()), "4001 changed documents in one step, at most 3600"},
		"delete an absent": {[]string{"delete", "bad-input", "absent"}, "policy absent is not there: nothing was deleted"},
		"delete nothing":   {[]string{"delete"}, "name policies to delete"},
		"explain nobody":   {[]string{"explain", "n9/c9", "n1/c1", "80"}, `no endpoint "n9/c9"`},
		"explain no port":  {[]string{"explain", "n1/c1", "n2/c1", "http"}, "no single port"},
		"get an absent":    {[]string{"get", "absent"}, "no policy absent"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), testutil.WaitTimeout)
		out, err := exec.CommandContext(ctx, lab.Bin, append(append([]string{"policy"}, c.args...), "--lab", lab.Name)...).CombinedOutput()
		cancel()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || !strings.Contains(string(out), c.says) {
			t.Errorf("%s: %v, %.600s, want %q", name, err, out, c.says)
		}
	}
	if after := lab.Heddle(t, "policy", "list", "--output", "json"); after != before {
		t.Errorf("rules have changed:\n%s\nbefore:\n%s", after, before)
	}
	for _, args := range [][]string{{"nolabel"}, {"=x"}, {"a=b", "a-"}, {"-"}} {
		if err := labHeddle(append([]string{"endpoints", "label", "--node", "n1", "n1/c1"}, args...)...); err == nil {
			t.Errorf("labels %q are taken", args)
		}
	}
}

// TestPolicyOutlivesTheAgent: rules hold while no agent runs, and a new agent takes them over.
func TestPolicyOutlivesTheAgent(t *testing.T) {
	clearPolicy(t)
	server := lab.StartPeer(t, "heddle", "n2/c1")
	client := lab.StartPeer(t, "heddle", "n1/c1")
	port, open := lab.FreePort(), lab.FreePort()
	server.Must(`l = [listen(4, "0.0.0.0", p) for p in (%d, %d)]`, port, open)
	target := lab.Address(t, "heddle", "n2/c1")
	lab.Heddle(t, "endpoints", "label", "--node", "n2", "n2/c1", "app=kept")
	path := filepath.Join(t.TempDir(), "kept.json")
	raw, err := json.Marshal(map[string]any{"apiVersion": "heddle.dev/v1", "kind": "Policy", "name": "kept", "subject": map[string]any{"labels": map[string]any{"app": "kept"}},
		"ingress": map[string]any{"default": "deny", "rules": []any{map[string]any{"action": "allow", "ports": []string{fmt.Sprintf("tcp/%d", open)}}}}})
	testutil.NoError(t, err)
	testutil.NoError(t, os.WriteFile(path, raw, 0o600))
	lab.Heddle(t, "policy", "apply", "-f", path)
	holds := func(when string) {
		t.Helper()
		if got := client.Do(`error_of(lambda: connect(4, "%s", %d).close())`, target, port); got != `"ECONNREFUSED"` {
			t.Errorf("%s: what is forbidden: %s", when, got)
		}
		if got := client.Do(`error_of(lambda: connect(4, "%s", %d).close())`, target, open); got != `"ok"` {
			t.Errorf("%s: what is allowed: %s", when, got)
		}
	}
	holds("before")
	client.Must("made = [tcp() for _ in range(2)]")
	for _, node := range []string{"n1", "n2"} {
		lab.EndAgent(t, node, syscall.SIGKILL)
	}
	for i, c := range []struct {
		port int
		want string
	}{{port, `"ECONNREFUSED"`}, {open, `"ok"`}} {
		if got := client.Do(`error_of(lambda: made[%d].connect(("%s", %d)))`, i, target, c.port); got != c.want {
			t.Errorf("without agents: port %d: %s, want %s", i, got, c.want)
		}
	}
	if lab.SocketsWithoutAgent(t) {
		holds("without agents, with sockets of the container's own stack")
	}
	testutil.NoError(t, lab.Command("up"))
	holds("with new agents")
	var status []api.Status
	testutil.NoError(t, json.Unmarshal([]byte(lab.Heddle(t, "status", "--output", "json")), &status))
	for _, st := range status {
		if st.Policy.Policies != 1 || st.Policy.Error != "" || st.Policy.Revision == 0 {
			t.Errorf("policy of %s: %+v", st.Node.Name, st.Policy)
		}
	}
}
