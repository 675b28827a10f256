package netcfg

import (
	"net/netip"
	"testing"

	"heddle.dev/heddle/internal/testutil"
)

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
