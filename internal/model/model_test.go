package model

import (
	"net/netip"
	"strings"
	"testing"
)

func TestParsePortRange(t *testing.T) {
	for in, want := range map[string]PortRange{"80": {80, 80}, "17408-17471": {17408, 17471}, "1-65535": {1, 65535}} {
		if got, err := ParsePortRange(in); err != nil || got != want {
			t.Errorf("%q: got %v, %v; want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"", "0", "0-5", "9-3", "80-", "-80", "1-65536", "a-b", "80-90-100", " 80"} {
		if got, err := ParsePortRange(in); err == nil {
			t.Errorf("%q: got %v, want an error", in, got)
		}
	}
}

func TestValidateName(t *testing.T) {
	for _, ok := range []string{"n1", "a", "node-7", strings.Repeat("x", 32)} {
		if err := ValidateName("node name", ok); err != nil {
			t.Errorf("%q: %v", ok, err)
		}
	}
	for _, bad := range []string{"", "-a", "a-", "N1", "a_b", "a/b", "ä", strings.Repeat("x", 33)} {
		if err := ValidateName("node name", bad); err == nil || !strings.HasPrefix(err.Error(), "node name ") {
			t.Errorf("%q: got %v, want an error that names the field", bad, err)
		}
	}
}

func TestNetworkIDFitsTheOption(t *testing.T) {
	for id, ok := range map[NetworkID]bool{0: false, 1: true, 4095: true, 4096: false} {
		if err := id.Validate(); (err == nil) != ok {
			t.Errorf("%d: %v", id, err)
		}
	}
}

// TestLoopbackAliasesAreApart checks that no two endpoints, and no two common addresses of one,
// share an alias, and that none is an address that programs use.
func TestLoopbackAliasesAreApart(t *testing.T) {
	seen := map[netip.Addr]EndpointID{}
	for _, id := range []EndpointID{1, 2, 255, 256, 8191, 8192, MaxEndpointID - 1, MaxEndpointID} {
		for _, loopback := range []string{"127.0.0.0", "127.0.0.1", "127.0.0.2", "127.0.0.255", "127.0.1.0", "127.0.1.1", "::1"} {
			a := LoopbackAlias(id, netip.MustParseAddr(loopback))
			if other, taken := seen[a]; taken {
				t.Errorf("endpoints %d and %d share %s", id, other, a)
			}
			seen[a] = id
			want := netip.MustParseAddr(loopback)
			if !want.Is6() && want.As4()[2] != 0 {
				want = netip.MustParseAddr("127.0.0.1")
			}
			if shown, ok := LoopbackShown(id, a); !ok || shown != want {
				t.Errorf("endpoint %d: %s is shown as %s, want %s", id, a, shown, want)
			}
			if _, ok := LoopbackShown(id-1, a); ok {
				t.Errorf("%s is taken for endpoint %d's", a, id-1)
			}
			if !a.IsLoopback() || a.As4()[1] < 128 {
				t.Errorf("endpoint %d: %s is not in 127.128.0.0/9", id, a)
			}
		}
	}
}

func TestGateway(t *testing.T) {
	if got := Gateway(netip.MustParsePrefix("10.244.3.0/24")); got != netip.MustParseAddr("10.244.3.1") {
		t.Errorf("got %s", got)
	}
}
