package policy

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/test/lab"
)

// translatedListeners are listeners of n1/c1, of both kinds, that are reached by translation on its
// node; each listens at a port that clients are allowed and at one that is forbidden.
type translatedListeners struct {
	t       *testing.T
	at      string
	inner   map[string][2]int // by the server's mode
	outer   map[int]int       // what inner ports are reached by
	allowed []int
	denied  []int
}

func newTranslatedListeners(t *testing.T) *translatedListeners {
	w := &translatedListeners{t: t, at: "n1/c1", inner: map[string][2]int{}, outer: map[int]int{}}
	to4, to6 := map[int]string{}, map[int]string{}
	for _, mode := range lab.Modes {
		w.inner[mode] = [2]int{lab.FreePort(), lab.FreePort()}
		w.allowed, w.denied = append(w.allowed, w.inner[mode][0]), append(w.denied, w.inner[mode][1])
		for _, p := range w.inner[mode] {
			w.outer[p] = lab.FreePort()
			to4[w.outer[p]] = fmt.Sprintf("%s:%d", lab.Address(t, "overlay", w.at), p)
			to6[w.outer[p]] = fmt.Sprintf("[%s]:%d", lab.Overlay6(t, w.at), p)
		}
		startPolicyPeer(t, mode, w.at).Must("serve(%s)", lab.JSON(t, w.inner[mode]))
	}
	lab.TranslateTo(t, "n1", to4, to6)
	return w
}

// policy allows a client some ports and another one, whom it may be taken for, others.
func (w *translatedListeners) policy(client map[string]any, ports []int, other map[string]any, others []int) map[string]any {
	allow := func(peer map[string]any, ports []int) map[string]any {
		r := lab.DenyRule("", ports...)
		delete(r, "deny")
		r["action"], r["peers"] = "allow", []any{peer}
		return r
	}
	return map[string]any{"apiVersion": "heddle.dev/v1", "kind": "Policy", "name": "translated",
		"subject": map[string]any{"prefixes": []string{lab.Address(w.t, "overlay", w.at) + "/32"}},
		"ingress": map[string]any{"default": "deny", "rules": []any{allow(client, ports), allow(other, others)}}}
}

// TestPolicyTranslated reaches containers by translation of addresses on their node, as docker's -p
// and kube-proxy have it: policy is decided for the container and the true client, also on what is
// open when it changes, and where what the container receives waits in a queue.
func TestPolicyTranslated(t *testing.T) {
	w := newTranslatedListeners(t)
	t.Run("free", w.decided)
	lab.Limit(t, w.at, "--ingress", "200mbit")
	t.Run("limited", w.decided)
}

func (w *translatedListeners) decided(t *testing.T) {
	underlay := lab.Address(t, "host", w.at)
	local := map[int][]string{4: {underlay, lab.ServiceAddr}, 6: {lab.Underlay6(t, "n1")}}
	own := map[string]any{"prefix": lab.Address(t, "overlay", "n1/c2") + "/32"}
	host, outside := map[string]any{"entity": "host"}, map[string]any{"entity": "outside"}
	for _, c := range []struct {
		mode, at    string
		self, other map[string]any // what rules call it, and what it must not pass for
		addrs       map[int][]string
	}{
		{"host", "outside", outside, host, map[int][]string{4: {underlay}, 6: {lab.Underlay6(t, "n1")}}},
		{"host", "n1/c1", host, outside, local},
		{"overlay", "n1/c2", own, host, local},
		{"heddle", "n1/c2", own, host, local},
	} {
		t.Run(c.at+", "+c.mode, func(t *testing.T) {
			client := startPolicyPeer(t, c.mode, c.at)
			lab.ApplyDocument(t, w.policy(c.self, w.allowed, c.other, w.denied))
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
			answer(t, client, &got, "attempts(json.loads(%s), 0)", lab.JSON(t, lab.JSON(t, targets)))
			if !slices.Equal(got, want) {
				t.Errorf("connects to %v:\n%v, want\n%v", targets, got, want)
			}
			client.Must("live = [%s]", strings.Join(live, ", "))
			lab.ChangePolicy(t, w.policy(c.self, w.denied, c.other, w.allowed))
			for i, l := range live {
				// The end that only waits hears of it, too.
				if how := client.Must("outcome(live[%d], False)", i); how != `"ECONNRESET"` && how != `"ECONNABORTED"` {
					t.Errorf("%s, forbidden afterwards: %s", l, how)
				}
			}
		})
	}
}

// TestPolicyTranslatedFar has a node lead its container's connects to another node's container:
// there they come from the node, which is allowed, so it is the container's own node that decides.
func TestPolicyTranslatedFar(t *testing.T) {
	open, closed := lab.FreePort(), lab.FreePort()
	outer := map[int]int{open: lab.FreePort(), closed: lab.FreePort()}
	at := lab.Address(t, "overlay", "n2/c1")
	startPolicyPeer(t, "heddle", "n2/c1").Must("serve([%d, %d])", open, closed)
	lab.TranslateTo(t, "n1", map[int]string{outer[open]: fmt.Sprintf("%s:%d", at, open), outer[closed]: fmt.Sprintf("%s:%d", at, closed)}, nil)
	for _, mode := range lab.Modes {
		client := startPolicyPeer(t, mode, "n1/c2")
		for deny, want := range map[string]string{"reject": "ECONNREFUSED", "drop": "hangs"} {
			rule := lab.DenyRule(deny, closed)
			rule["peers"] = []any{map[string]any{"prefix": lab.Address(t, "overlay", "n1/c2") + "/32"}}
			lab.ApplyPolicy(t, "far", []map[string]any{rule}, nil)
			client.Expect(fmt.Sprintf(`["hi", %q]`, want), "attempts([[4, %q, %d, False, ''], [4, %[1]q, %[3]d, %[4]s, '']], 0.5)",
				lab.ServiceAddr, outer[open], outer[closed], map[bool]string{true: "True", false: "False"}[deny == "drop"])
		}
	}
}

// TestPolicyRefusesLimited: a container with a limit on what it receives hears at once that what it
// asks for is forbidden, although the answer waits in a queue.
func TestPolicyRefusesLimited(t *testing.T) {
	shut := lab.FreePort()
	lab.ApplyPolicy(t, "refused", []map[string]any{lab.DenyRule("reject", shut)}, nil)
	for _, at := range []string{"n1/c2", "n2/c1"} {
		startPolicyPeer(t, "overlay", at).Must("serve([%d])", shut)
	}
	client := startPolicyPeer(t, "overlay", "n1/c1")
	for _, limit := range [][]string{nil, {"--ingress", "200mbit"}} {
		if limit != nil {
			lab.Limit(t, "n1/c1", limit...)
		}
		for _, at := range []string{"n1/c2", "n2/c1"} {
			for _, addr := range []string{fmt.Sprintf("4, %q", lab.Address(t, "overlay", at)), fmt.Sprintf("6, %q", lab.Overlay6(t, at))} {
				client.Expect(`["ECONNREFUSED"]`, "attempts([[%s, %d, False, '']], 0)", addr, shut)
			}
		}
	}
}
