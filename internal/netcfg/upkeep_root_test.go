package netcfg

import (
	"context"
	"strings"
	"testing"
)

// TestRestoreRouting: rules and routes that somebody removes are noticed, and added again; changes of
// others are not followed by anything.
func TestRestoreRouting(t *testing.T) {
	top, _ := whole(t)
	node, want := top.node[0], dumpState(t, top.node[0])
	in(t, node, func() error {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		looks := 0
		err := FollowRouting(ctx, func() error {
			looks++
			restored, err := RestoreRouting(nodeConfig(0))
			expected := ""
			switch looks {
			case 1: // at once
				run(t, node, "ip rule del pref 51")
			case 2:
				expected = "rule IPv4: fwmark 0x51 lookup 51"
				run(t, node, "ip route del unreachable 10.99.1.0/24\nip route del unreachable 250.0.0.0/8")
			case 3:
				expected = "route unreachable 250.0.0.0/8, route unreachable 10.99.1.0/24"
				run(t, node, `ip route add 198.51.100.0/24 dev under0
ip route add unreachable 198.51.101.0/24
ip route del unreachable 198.51.101.0/24
ip route del 198.51.100.0/24
ip route del 10.99.1.2 dev hd1
ip route add 10.99.1.2 dev hd1 proto 72 src 10.99.1.1 advmss 65496
ip rule add pref 99 lookup 99`)
				// The next look is by this alone.
				run(t, node, "ip rule del pref 99")
			default:
				cancel()
			}
			if got := strings.Join(restored, ", "); got != expected {
				t.Errorf("look %d restored %q, want %q", looks, got, expected)
			}
			return err
		})
		if looks != 4 {
			t.Errorf("%d looks", looks)
		}
		return err
	})
	sameState(t, node, "restored", want)
}
