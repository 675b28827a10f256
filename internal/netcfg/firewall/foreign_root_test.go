package firewall

import (
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

// inNew runs fn in a network namespace of its own, and fails the test on its error.
func inNew(t *testing.T, fn func() error) {
	t.Helper()
	testutil.NeedRoot(t, "makes a network namespace")
	testutil.NoError(t, netns.OnDiscardedThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return fn()
	}))
}

// TestForwardRules: chains that may stop what is forwarded are named; those that translate, those
// that see other packets and Heddle's own are not.
func TestForwardRules(t *testing.T) {
	inNew(t, func() error {
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

// TestTunnelRules: chains that may stop what the node sends and receives itself, and IPsec, are
// named; those of what it forwards are not.
func TestTunnelRules(t *testing.T) {
	inNew(t, func() error {
		for _, tc := range []struct{ command, want string }{
			{"true", ""},
			{"nft 'add table ip f; add chain ip f c { type filter hook forward priority 0; policy drop; }'", ""},
			{"nft 'add table ip n; add chain ip n post { type nat hook output priority -100; }; add rule ip n post accept'", ""},
			{"nft 'add table ip a; add chain ip a in { type filter hook input priority 0; policy drop; }'", "nftables chain ip a in"},
			{"nft 'delete table ip a; add table inet b; add chain inet b out { type filter hook output priority 0; }; add rule inet b out counter'", "nftables chain inet b out"},
			{"nft 'delete table inet b'", ""},
			{"nft 'add table netdev d; add chain netdev d c { type filter hook ingress device lo priority 0; }; add rule netdev d c drop'", "nftables chain netdev d c"},
			{"nft 'delete table netdev d'", ""},
			{"nft 'add table inet i; add chain inet i c { type filter hook ingress device lo priority 0; }; add rule inet i c drop'", "nftables chain inet i c"},
			{"nft 'delete table inet i'", ""},
			{"ip xfrm policy add src 192.0.2.1 dst 192.0.2.2 dir out tmpl proto esp mode transport", "IPsec"},
			{"ip xfrm policy flush", ""},
		} {
			if out, err := exec.Command("sh", "-c", tc.command).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", tc.command, err, out)
			}
			if got, err := TunnelRules(); got != tc.want || err != nil {
				t.Errorf("after %q: %q, %v, want %q", tc.command, got, err, tc.want)
			}
		}
		return nil
	})
}
