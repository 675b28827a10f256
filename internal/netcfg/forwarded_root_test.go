package netcfg

import (
	"os/exec"
	"testing"

	"heddle.dev/heddle/internal/testutil"
)

// TestForwardRules: chains that may stop what is forwarded are named; those that translate, those
// that see other packets and Heddle's own are not.
func TestForwardRules(t *testing.T) {
	testutil.NeedRoot(t, "makes a network namespace")
	in(t, newNetns(t), func() error {
		for _, tc := range []struct{ rules, want string }{
			{"", ""},
			{"add table inet heddle; add chain inet heddle early-in { type filter hook prerouting priority -310; }; add rule inet heddle early-in drop", ""},
			{"add table ip a; add chain ip a in { type filter hook input priority 0; policy drop; }", ""},
			{"add table ip n; add chain ip n post { type nat hook postrouting priority 100; }; add rule ip n post masquerade", ""},
			{"add table ip f; add chain ip f FORWARD { type filter hook forward priority 0; policy accept; }", ""},
			{"add rule ip f FORWARD counter", "nftables chain ip f FORWARD"},
			{"delete table ip f; add table ip6 g; add chain ip6 g pre { type filter hook prerouting priority -300; policy drop; }", "nftables chain ip6 g pre"},
			{"delete table ip6 g", ""},
		} {
			if out, err := exec.Command("nft", tc.rules).CombinedOutput(); err != nil {
				t.Fatalf("nft %q: %v\n%s", tc.rules, err, out)
			}
			if got, err := ForwardRules(); got != tc.want || err != nil {
				t.Errorf("after %q: %q, %v, want %q", tc.rules, got, err, tc.want)
			}
		}
		return nil
	})
}
