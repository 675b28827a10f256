package lab

import (
	_ "embed"
	"encoding/json"
	"net/netip"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

// Address6 is Address for IPv6.
func Address6(t testing.TB, mode, container string) netip.Addr {
	t.Helper()
	return netip.MustParseAddr(strings.TrimSpace(Heddle(t, "lab", "ip", "--mode", mode, "--family", "6", container)))
}

// Outside6 is the IPv6 address of the host outside the overlay.
func Outside6(t testing.TB) netip.Addr {
	t.Helper()
	var links []struct {
		AddrInfo []struct {
			Local netip.Addr
			Scope string
		} `json:"addr_info"`
	}
	raw := InNode(t, "outside", "ip", "-6", "-json", "address", "show", "dev", "eth0", "scope", "global")
	if err := json.Unmarshal([]byte(raw), &links); err != nil || len(links) != 1 || len(links[0].AddrInfo) == 0 {
		t.Fatalf("addresses of the outside: %v\n%s", err, raw)
	}
	return links[0].AddrInfo[0].Local
}

// Address gives the address a peer dials to reach container in mode.
func Address(t testing.TB, mode, container string) string {
	t.Helper()
	return strings.TrimSpace(Heddle(t, "lab", "ip", "--mode", mode, container))
}

// LoopbackAliases are node addresses that stand for loopback addresses of endpoint id.
func LoopbackAliases(id model.EndpointID) []netip.Addr {
	return []netip.Addr{
		model.LoopbackAlias(id, netip.MustParseAddr("127.0.0.1")), model.LoopbackAlias(id, netip.IPv6Loopback()),
	}
}

// Overlay6 is the IPv6 overlay address of a container.
func Overlay6(t testing.TB, container string) string {
	return Address6(t, "overlay", container).String()
}

// Overlay6Of is Overlay6 for a place, whose addresses are known once the lab is up.
func Overlay6Of(container string) func(testing.TB) string {
	return func(t testing.TB) string { return Overlay6(t, container) }
}

// Gateway6Of is the IPv6 form of the overlay address of a container's node.
func Gateway6Of(container string) func(testing.TB) string {
	return func(t testing.TB) string {
		gateway := netip.MustParseAddr(GatewayOf(container)(t))
		prefix, err := netip.MustParseAddr(Overlay6(t, container)).Prefix(model.Prefix6Bits)
		testutil.NoError(t, err)
		return model.Overlay6(prefix, gateway).String()
	}
}

// lastPort is the last port that FreePort gave.
var lastPort atomic.Int32

func init() { lastPort.Store(20000) }

// FreePort gives a port that no test used before: below the ephemeral ports, outside the direct
// ones.
func FreePort() int {
	return int(lastPort.Add(1))
}

// OverlayOf is the IPv4 overlay address of a container.
func OverlayOf(container string) func(testing.TB) string {
	return func(t testing.TB) string { return Address(t, "overlay", container) }
}

func underlayOf(container string) func(testing.TB) string {
	return func(t testing.TB) string { return Address(t, "host", container) }
}

// GatewayOf is the overlay address of a container's node.
func GatewayOf(container string) func(testing.TB) string {
	return func(t testing.TB) string {
		p, err := netip.MustParseAddr(Address(t, "overlay", container)).Prefix(24)
		testutil.NoError(t, err)
		return model.Gateway(p).String()
	}
}

// OutsideTarget is the IPv4 address of the host outside the overlay.
func OutsideTarget(t testing.TB) string {
	// 172.31.N.x is the fabric of the lab whose outside host is 198.18.N.1.
	n := netip.MustParseAddr(Address(t, "host", "n1/c1")).As4()[2]
	return netip.AddrFrom4([4]byte{198, 18, n, 1}).String()
}

// OutsideTargets gives the host outside routes to a container, until the end of the test, and its
// addresses by family.
func OutsideTargets(t testing.TB, container string) map[int]string {
	t.Helper()
	node, _, _ := strings.Cut(container, "/")
	out := map[int]string{4: Address(t, "overlay", container), 6: Overlay6(t, container)}
	for to, via := range map[string]string{out[4] + "/32": Address(t, "host", container), out[6] + "/128": Underlay6(t, node)} {
		if out, err := exec.Command("ip", "-n", Name+"-outside", "route", "replace", to, "via", via).CombinedOutput(); err != nil {
			t.Fatalf("route of the outside: %v\n%s", err, out)
		}
		t.Cleanup(func() { _ = exec.Command("ip", "-n", Name+"-outside", "route", "del", to).Run() })
	}
	return out
}

// Underlay6 is a node's IPv6 address on the underlay.
func Underlay6(t testing.TB, node string) string {
	t.Helper()
	out, err := exec.Command("ip", "-n", Name+"-"+node, "-6", "-json", "addr", "show", "dev", "eth0", "scope", "global").Output()
	var links []struct {
		Addrs []struct{ Local string } `json:"addr_info"`
	}
	if err == nil {
		err = json.Unmarshal(out, &links)
	}
	if err != nil || len(links) != 1 || len(links[0].Addrs) == 0 {
		t.Fatalf("IPv6 address of %s: %s %v", node, out, err)
	}
	return links[0].Addrs[0].Local
}
