package netcfg

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

func TestNodeConfigValidate(t *testing.T) {
	good := nodeConfig(0)
	if err := good.validate(); err != nil {
		t.Fatal(err)
	}
	if good.VXLANPort != DefaultVXLANPort {
		t.Errorf("vxlan port %d", good.VXLANPort)
	}
	p := netip.MustParsePrefix
	for want, change := range map[string]func(*NodeConfig){
		"underlay":                func(c *NodeConfig) { c.Underlay = netip.Addr{} },
		"underlay 0.0.0.0":        func(c *NodeConfig) { c.Underlay = netip.IPv4Unspecified() },
		"vni 0":                   func(c *NodeConfig) { c.VNI = 0 },
		"vni 16777216":            func(c *NodeConfig) { c.VNI = 1 << 24 },
		"marks [0x0":              func(c *NodeConfig) { c.Mark = 0 },
		"marks [0x51 0x51":        func(c *NodeConfig) { c.OverlayMark = c.Mark },
		"table 254":               func(c *NodeConfig) { c.Table = 254 },
		"table 0":                 func(c *NodeConfig) { c.Table = 0 },
		"rule priority 32766":     func(c *NodeConfig) { c.RulePref = 32766 },
		"at least one":            func(c *NodeConfig) { c.Prefixes = nil },
		"prefix 10.99.1.1/24":     func(c *NodeConfig) { c.Prefixes = []netip.Prefix{p("10.99.1.1/24")} },
		"prefix 10.99.1.0/31":     func(c *NodeConfig) { c.Prefixes = []netip.Prefix{p("10.99.1.0/31")} },
		"one a family":            func(c *NodeConfig) { c.Prefixes = []netip.Prefix{p("10.99.1.0/24"), p("10.99.2.0/24")} },
		"not inside the pool":     func(c *NodeConfig) { c.Prefixes = []netip.Prefix{p("10.98.1.0/24")} },
		"contains the underlay":   func(c *NodeConfig) { c.Underlay = netip.MustParseAddr("10.99.1.9") },
		"10.0.0.0/8: not inside":  func(c *NodeConfig) { c.Prefixes = []netip.Prefix{p("10.0.0.0/8")} },
		"prefix invalid Prefix: ": func(c *NodeConfig) { c.Prefixes = []netip.Prefix{{}} },
	} {
		c := nodeConfig(0)
		change(&c)
		if err := c.validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
		if _, err := SetupNode(c); err == nil {
			t.Errorf("%s: SetupNode takes it", want)
		}
	}
}

func TestEndpointConfigValidate(t *testing.T) {
	good := EndpointConfig{ID: 1, Addrs: []netip.Addr{c1}, Gateways: gateways(prefixes[:1]), Table: testTable}
	if err := good.validate(); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*EndpointConfig){
		"endpoint id 0":     func(c *EndpointConfig) { c.ID = 0 },
		"endpoint id 16384": func(c *EndpointConfig) { c.ID = model.MaxEndpointID + 1 },
		"at least one":      func(c *EndpointConfig) { c.Addrs = nil },
		"one address":       func(c *EndpointConfig) { c.Addrs = []netip.Addr{c1, c2} },
		"mapped":            func(c *EndpointConfig) { c.Addrs = []netip.Addr{netip.MustParseAddr("::ffff:10.99.1.2")} },
		"gateway":           func(c *EndpointConfig) { c.Gateways = []netip.Addr{netip.MustParseAddr("fd00::1")} },
		"another address":   func(c *EndpointConfig) { c.Gateways = c.Addrs },
		"mtu 100":           func(c *EndpointConfig) { c.MTU = 100 },
		"table 0":           func(c *EndpointConfig) { c.Table = 0 },
	} {
		c := good
		change(&c)
		if err := c.validate(); err == nil || want != "mapped" && !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
		if _, err := AddEndpoint(c); err == nil {
			t.Errorf("%s: AddEndpoint takes it", want)
		}
	}
}

func TestHardwareAddresses(t *testing.T) {
	if got := vtepMAC(netip.MustParseAddr("192.168.50.1")).String(); got != "02:48:c0:a8:32:01" {
		t.Errorf("vtepMAC = %s", got)
	}
	a, b := vtepMAC(netip.MustParseAddr("fd00::1")), vtepMAC(netip.MustParseAddr("fd00::2"))
	if len(a) != 6 || a[0] != 0x02 || a[1] != 0x48 || a.String() == b.String() {
		t.Errorf("vtepMAC of IPv6: %v, %v", a, b)
	}
}

func TestRouteRoundTrip(t *testing.T) {
	p, a := netip.MustParsePrefix, netip.MustParseAddr
	for _, r := range []route{
		{table: 254, dst: p("10.99.2.0/24"), kind: unix.RTN_UNICAST, link: 3, gw: a("10.99.2.1"), src: a("10.99.1.1"), onlink: true},
		{table: 51, dst: p("10.99.1.2/32"), kind: unix.RTN_LOCAL, link: 1},
		{table: 254, dst: p("fd99:1::/64"), kind: unix.RTN_UNREACHABLE},
		{table: 254, dst: p("0.0.0.0/0"), kind: unix.RTN_UNICAST, link: 2, gw: a("10.99.1.1")},
		{table: 254, dst: p("::/0"), kind: unix.RTN_UNICAST, link: 2, gw: a("fd99:1::1")},
	} {
		n := *r.netlink()
		if got := parseRoute(n); got != r {
			t.Errorf("got %+v, want %+v", got, r)
		}
		if n.Protocol != routeProtocol {
			t.Errorf("%v: protocol %d", r, n.Protocol)
		}
	}
	if got := parseRoute(netlink.Route{Family: netlink.FAMILY_V6}).dst; got != p("::/0") {
		t.Errorf("no destination: %v", got)
	}
}

// diagSocket is an inet_diag_msg as the kernel writes it.
func diagSocket(family, state byte, at netip.AddrPort) []byte {
	b := make([]byte, 72)
	b[0], b[1] = family, state
	binary.BigEndian.PutUint16(b[4:], at.Port())
	copy(b[8:], at.Addr().AsSlice())
	return b
}

func TestParseDiagSocket(t *testing.T) {
	four, six := netip.MustParseAddrPort("10.1.2.3:17440"), netip.MustParseAddrPort("[fd00::9]:80")
	for family, want := range map[byte]netip.AddrPort{unix.AF_INET: four, unix.AF_INET6: six} {
		if got, ok := parseDiagSocket(diagSocket(family, tcpListen, want)); !ok || got != want {
			t.Errorf("got %v %v, want %v", got, ok, want)
		}
	}
	for name, m := range map[string][]byte{
		"empty": nil, "short": diagSocket(unix.AF_INET, tcpListen, four)[:20],
		"connected": diagSocket(unix.AF_INET, 1, four), "other family": diagSocket(unix.AF_UNIX, tcpListen, four),
	} {
		if got, ok := parseDiagSocket(m); ok {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func FuzzParseDiagSocket(f *testing.F) {
	f.Add(diagSocket(unix.AF_INET, tcpListen, netip.MustParseAddrPort("10.1.2.3:17440")))
	f.Add([]byte{unix.AF_INET6, tcpListen})
	f.Fuzz(func(t *testing.T, m []byte) {
		if ap, ok := parseDiagSocket(m); ok != ap.IsValid() {
			t.Errorf("%v, %v", ap, ok)
		}
	})
}
