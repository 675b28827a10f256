package test

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// translate has a node send what goes to these ports of its addresses, and of serviceAddr, to others, as
// docker's -p and kube-proxy do: what arrives, and what its own processes send.
func translate(t testing.TB, node string, to4, to6 map[int]string) {
	t.Helper()
	var rules strings.Builder
	for family, to := range map[string]map[int]string{"ip": to4, "ip6": to6} {
		for port, target := range to {
			for _, chain := range []string{"prerouting", "output"} {
				match := "fib daddr type local"
				if family == "ip" {
					fmt.Fprintf(&rules, "add rule inet translate %s ip daddr %s tcp dport %d dnat ip to %s\n", chain, serviceAddr, port, target)
				}
				fmt.Fprintf(&rules, "add rule inet translate %s meta nfproto %s %s tcp dport %d dnat %s to %s\n",
					chain, map[string]string{"ip": "ipv4", "ip6": "ipv6"}[family], match, port, family, target)
			}
		}
	}
	nft := func(text string) error {
		cmd := exec.Command("nsenter", "--net=/run/netns/"+labName+"-"+node, "nft", "-f", "-")
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

// serviceAddr is nobody's: it is there by translation only.
const serviceAddr = "198.51.100.80"

// translatedWorld are listeners of n1/c1, of both kinds, that are reached by translation on its node; each listens at
// a port that clients are allowed and at one that is forbidden.
type translatedWorld struct {
	t       *testing.T
	at      string
	inner   map[string][2]int // by the server's mode
	outer   map[int]int       // what inner ports are reached by
	allowed []int
	denied  []int
}

func newTranslatedWorld(t *testing.T) *translatedWorld {
	w := &translatedWorld{t: t, at: "n1/c1", inner: map[string][2]int{}, outer: map[int]int{}}
	to4, to6 := map[int]string{}, map[int]string{}
	for _, mode := range modes {
		w.inner[mode] = [2]int{freePort(), freePort()}
		w.allowed, w.denied = append(w.allowed, w.inner[mode][0]), append(w.denied, w.inner[mode][1])
		for _, p := range w.inner[mode] {
			w.outer[p] = freePort()
			to4[w.outer[p]] = fmt.Sprintf("%s:%d", address(t, "overlay", w.at), p)
			to6[w.outer[p]] = fmt.Sprintf("[%s]:%d", own6(t, w.at), p)
		}
		startPolicyPeer(t, mode, w.at).must("serve(%s)", quoted(t, w.inner[mode]))
	}
	translate(t, "n1", to4, to6)
	return w
}

// policy allows a client some ports and another one, whom it may be taken for, others.
func (w *translatedWorld) policy(client map[string]any, ports []int, other map[string]any, others []int) map[string]any {
	allow := func(peer map[string]any, ports []int) map[string]any {
		r := denyRule("", ports...)
		delete(r, "deny")
		r["action"], r["peers"] = "allow", []any{peer}
		return r
	}
	return map[string]any{"apiVersion": "heddle.dev/v1", "kind": "Policy", "name": "translated",
		"subject": map[string]any{"prefixes": []string{address(w.t, "overlay", w.at) + "/32"}},
		"ingress": map[string]any{"default": "deny", "rules": []any{allow(client, ports), allow(other, others)}}}
}

// TestPolicyTranslated reaches containers by translation of addresses on their node, as docker's -p and kube-proxy have it:
// policy is decided for the container and the true client, also on what is open when it changes.
func TestPolicyTranslated(t *testing.T) {
	w := newTranslatedWorld(t)
	underlay := address(t, "host", w.at)
	local := map[int][]string{4: {underlay, serviceAddr}, 6: {underlay6(t, "n1")}}
	own := map[string]any{"prefix": address(t, "overlay", "n1/c2") + "/32"}
	host, outside := map[string]any{"entity": "host"}, map[string]any{"entity": "outside"}
	for _, c := range []struct {
		mode, at    string
		self, other map[string]any // what rules call it, and what it must not pass for
		addrs       map[int][]string
	}{
		{"host", "outside", outside, host, map[int][]string{4: {underlay}, 6: {underlay6(t, "n1")}}},
		{"host", "n1/c1", host, outside, local},
		{"overlay", "n1/c2", own, host, local},
		{"heddle", "n1/c2", own, host, local},
	} {
		t.Run(c.at+", "+c.mode, func(t *testing.T) {
			client := startPolicyPeer(t, c.mode, c.at)
			applyDocument(t, w.policy(c.self, w.allowed, c.other, w.denied))
			var targets []policyTarget
			var want, got []string
			var live []string
			for family, addrs := range c.addrs {
				for _, addr := range addrs {
					for _, p := range w.allowed {
						targets, want = append(targets, policyTarget{family, addr, w.outer[p], false, ""}), append(want, "hi")
						live = append(live, fmt.Sprintf("opened(%d, %q, %d)", family, addr, w.outer[p]))
					}
					for _, p := range w.denied {
						targets, want = append(targets, policyTarget{family, addr, w.outer[p], false, ""}), append(want, "ECONNREFUSED")
					}
				}
			}
			answer(t, client, &got, "attempts(json.loads(%s), 0)", quoted(t, quoted(t, targets)))
			if !slices.Equal(got, want) {
				t.Errorf("connects to %v:\n%v, want\n%v", targets, got, want)
			}
			client.must("live = [%s]", strings.Join(live, ", "))
			changePolicy(t, w.policy(c.self, w.denied, c.other, w.allowed))
			for i, l := range live {
				// The end that only waits hears of it, too.
				if how := client.must("outcome(live[%d], False)", i); how != `"ECONNRESET"` && how != `"ECONNABORTED"` {
					t.Errorf("%s, forbidden afterwards: %s", l, how)
				}
			}
		})
	}
}

// TestPolicyTranslatedFar has a node lead its container's connects to another node's container: there they come from the
// node, which is allowed, so it is the container's own node that decides.
func TestPolicyTranslatedFar(t *testing.T) {
	open, closed := freePort(), freePort()
	outer := map[int]int{open: freePort(), closed: freePort()}
	at := address(t, "overlay", "n2/c1")
	startPolicyPeer(t, "heddle", "n2/c1").must("serve([%d, %d])", open, closed)
	translate(t, "n1", map[int]string{outer[open]: fmt.Sprintf("%s:%d", at, open), outer[closed]: fmt.Sprintf("%s:%d", at, closed)}, nil)
	for _, mode := range modes {
		client := startPolicyPeer(t, mode, "n1/c2")
		for deny, want := range map[string]string{"reject": "ECONNREFUSED", "drop": "hangs"} {
			rule := denyRule(deny, closed)
			rule["peers"] = []any{map[string]any{"prefix": address(t, "overlay", "n1/c2") + "/32"}}
			applyPolicy(t, "far", []map[string]any{rule}, nil)
			client.expect(fmt.Sprintf(`["hi", %q]`, want), "attempts([[4, %q, %d, False, ''], [4, %[1]q, %[3]d, %[4]s, '']], 0.5)",
				serviceAddr, outer[open], outer[closed], map[bool]string{true: "True", false: "False"}[deny == "drop"])
		}
	}
}
