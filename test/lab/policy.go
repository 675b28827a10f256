package lab

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
)

// TranslateTo has a node send what goes to these ports of its addresses, and of ServiceAddr, to
// others, as docker's -p and kube-proxy do: what arrives, and what its own processes send.
func TranslateTo(t testing.TB, node string, to4, to6 map[int]string) {
	t.Helper()
	var rules strings.Builder
	for family, to := range map[string]map[int]string{"ip": to4, "ip6": to6} {
		for port, target := range to {
			for _, chain := range []string{"prerouting", "output"} {
				match := "fib daddr type local"
				if family == "ip" {
					fmt.Fprintf(&rules, "add rule inet translate %s ip daddr %s tcp dport %d dnat ip to %s\n", chain, ServiceAddr, port, target)
				}
				fmt.Fprintf(&rules, "add rule inet translate %s meta nfproto %s %s tcp dport %d dnat %s to %s\n",
					chain, map[string]string{"ip": "ipv4", "ip6": "ipv6"}[family], match, port, family, target)
			}
		}
	}
	nft := func(text string) error {
		cmd := exec.Command("nsenter", "--net=/run/netns/"+Name+"-"+node, "nft", "-f", "-")
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("nft: %w\n%s\n%s", err, out, text)
		}
		return nil
	}
	t.Cleanup(func() {
		if err := nft("add table inet translate\ndelete table inet translate\n"); err != nil {
			t.Error(err)
		}
	})
	if err := nft(`add table inet translate
add chain inet translate prerouting { type nat hook prerouting priority dstnat; }
add chain inet translate output { type nat hook output priority -100; }
` + rules.String()); err != nil {
		t.Fatal(err)
	}
}

// ServiceAddr is nobody's: it is there by translation only.
const ServiceAddr = "198.51.100.80"

// JSON gives v as JSON, which is Python, too, but for its constants.
func JSON(t testing.TB, v any) string {
	t.Helper()
	raw, err := json.Marshal(v)
	testutil.NoError(t, err)
	return string(raw)
}

// DenyRule denies these TCP ports; deny says how.
func DenyRule(deny string, ports ...int) map[string]any {
	var names []string
	for _, p := range ports {
		names = append(names, fmt.Sprintf("tcp/%d", p))
	}
	return map[string]any{"action": "deny", "deny": deny, "ports": names}
}

// ApplyPolicy puts a policy about every endpoint in force on all nodes, until the end of the test.
func ApplyPolicy(t testing.TB, name string, ingress, egress []map[string]any) {
	t.Helper()
	ApplyDocument(t, EverybodyPolicy(name, ingress, egress))
}

// EverybodyPolicy is a policy about every endpoint.
func EverybodyPolicy(name string, ingress, egress []map[string]any) map[string]any {
	doc := map[string]any{"apiVersion": "heddle.dev/v1", "kind": "Policy", "name": name, "subject": map[string]any{}}
	if ingress != nil {
		doc["ingress"] = map[string]any{"rules": ingress}
	}
	if egress != nil {
		doc["egress"] = map[string]any{"rules": egress}
	}
	return doc
}

// ApplyDocument puts a policy in force on all nodes, until the end of the test.
func ApplyDocument(t testing.TB, doc map[string]any) {
	t.Helper()
	t.Cleanup(func() { // the test's context is over by then
		if out, err := exec.Command(Bin, "policy", "delete", "--all", "--lab", Name).CombinedOutput(); err != nil {
			t.Errorf("delete policies: %v\n%s", err, out)
		}
	})
	ChangePolicy(t, doc)
}

// ChangePolicy is ApplyDocument for one that is in force already.
func ChangePolicy(t testing.TB, doc map[string]any) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "policy.json")
	testutil.NoError(t, os.WriteFile(file, []byte(JSON(t, doc)), 0o600))
	Heddle(t, "policy", "apply", "-f", file)
}
