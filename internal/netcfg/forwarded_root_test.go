package netcfg

import (
	"net/netip"
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

// TestTunnelRules: chains that may stop what the node sends and receives itself, and IPsec, are
// named; those of what it forwards are not.
func TestTunnelRules(t *testing.T) {
	testutil.NeedRoot(t, "makes a network namespace")
	in(t, newNetns(t), func() error {
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

// TestNarrowRoute: a route's MTU counts where it is smaller than the device's.
func TestNarrowRoute(t *testing.T) {
	testutil.NeedRoot(t, "makes a network namespace")
	ns := newNetns(t)
	run(t, ns, "ip link add under type veth peer name fabric\nip addr add 192.0.2.1/24 dev under\nip link set fabric up\nip link set under up")
	run(t, ns, "ip route add 198.51.100.0/24 via 192.0.2.9 mtu 1400\nip route add 203.0.113.0/24 via 192.0.2.9 mtu 1500")
	near, far, wide, nowhere := netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("10.0.0.1")
	in(t, ns, func() error {
		for _, tc := range []struct {
			nodes []netip.Addr
			want  string
		}{
			{nil, ""},
			{[]netip.Addr{near, nowhere, wide}, ""},
			{[]netip.Addr{near, far}, "the route to 198.51.100.1 has MTU 1400"},
		} {
			if got, err := NarrowRoute(tc.nodes); got != tc.want || err != nil {
				t.Errorf("%v: %q, %v, want %q", tc.nodes, got, err, tc.want)
			}
		}
		return nil
	})
}
