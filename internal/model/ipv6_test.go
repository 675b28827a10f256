package model

import (
	"net/netip"
	"testing"
)

func TestOverlay6IsThePrefixAndTheIPv4Address(t *testing.T) {
	prefix6 := DefaultPrefix6(0xabc)
	for v4, v6 := range map[string]string{
		"10.244.1.2":      "fd48:6464:abc::af4:102",
		"0.0.0.1":         "fd48:6464:abc::1",
		"255.255.255.255": "fd48:6464:abc::ffff:ffff",
	} {
		a4, a6 := netip.MustParseAddr(v4), netip.MustParseAddr(v6)
		if got := Overlay6(prefix6, a4); got != a6 {
			t.Errorf("%s: %s, want %s", v4, got, v6)
		}
		if got := Overlay4(prefix6, a6); got != a4 {
			t.Errorf("%s: %s, want %s", v6, got, v4)
		}
		if got := OverlayAddrs(prefix6, a4); len(got) != 2 || got[0] != a4 || got[1] != a6 {
			t.Errorf("addresses with %s: %v", v4, got)
		}
		if got := OverlayAddrs(netip.Prefix{}, a4); len(got) != 1 || got[0] != a4 {
			t.Errorf("addresses with %s in an IPv4-only network: %v", v4, got)
		}
		if !Embeds(a6, a4) || Embeds(a6, a4.Prev()) || Embeds(a4, a4) || Embeds(a6, a6) {
			t.Errorf("Embeds of %s and %s", v6, v4)
		}
	}
	for v4, v6 := range map[string]string{
		"10.244.3.0/24": "fd48:6464:abc::af4:300/120", "10.1.2.4/30": "fd48:6464:abc::a01:204/126", "0.0.0.0/0": "fd48:6464:abc::/96",
	} {
		p4, p6 := netip.MustParsePrefix(v4), netip.MustParsePrefix(v6)
		if got := OverlayPrefix6(prefix6, p4); got != p6 {
			t.Errorf("%s: %s, want %s", v4, got, v6)
		}
		if got := OverlayPrefix4(prefix6, p6); got != p4 {
			t.Errorf("%s: %s, want %s", v6, got, v4)
		}
		if g4, g6 := Gateway(p4), Gateway(p6); Overlay6(prefix6, g4) != g6 {
			t.Errorf("gateways %s and %s do not belong together", g4, g6)
		}
	}
}

// TestOverlay6OfNothing: an IPv4-only network has the zero prefix, and asks the same questions.
func TestOverlay6OfNothing(t *testing.T) {
	a, p := netip.MustParseAddr("10.1.2.3"), netip.MustParsePrefix("10.1.2.0/24")
	a6, p6 := netip.MustParseAddr("fd00::1"), netip.MustParsePrefix("fd00::/120")
	own := DefaultPrefix6(1)
	for what, got := range map[string]bool{
		"address in no network":   Overlay6(netip.Prefix{}, a).IsValid(),
		"IPv6 address":            Overlay6(own, a6).IsValid(),
		"no address":              Overlay6(own, netip.Addr{}).IsValid(),
		"prefix in no network":    OverlayPrefix6(netip.Prefix{}, p).IsValid(),
		"IPv6 prefix":             OverlayPrefix6(own, p6).IsValid(),
		"back, in no network":     Overlay4(netip.Prefix{}, a6).IsValid(),
		"back, of another prefix": Overlay4(own, a6).IsValid(),
		"back, IPv4":              Overlay4(own, a).IsValid(),
		"back, short prefix":      OverlayPrefix4(own, netip.PrefixFrom(own.Addr(), 64)).IsValid(),
		"back, foreign prefix":    OverlayPrefix4(own, p6).IsValid(),
	} {
		if got {
			t.Errorf("%s: valid", what)
		}
	}
	if got := WithOverlay6(netip.Prefix{}, []netip.Prefix{p}); len(got) != 1 || got[0] != p {
		t.Errorf("prefixes of an IPv4-only network: %v", got)
	}
	if got := WithOverlay6(own, []netip.Prefix{p}); len(got) != 2 || got[1] != OverlayPrefix6(own, p) {
		t.Errorf("prefixes of a dual-stack network: %v", got)
	}
}

func TestValidatePrefix6(t *testing.T) {
	for _, ok := range []string{"fd48:6464:1::/96", "2001:db8:1:2:3:4::/96"} {
		if err := ValidatePrefix6(netip.MustParsePrefix(ok)); err != nil {
			t.Errorf("%s: %v", ok, err)
		}
	}
	if err := ValidatePrefix6(DefaultPrefix6(MaxNetworkID)); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{
		"fd00::/64", "fd00::/97", "10.0.0.0/8", "fd00::1/96", "::/96", "::ffff:0:0/96", "ff02::/96", "fe80::/96",
	} {
		if err := ValidatePrefix6(netip.MustParsePrefix(bad)); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
	if err := ValidatePrefix6(netip.Prefix{}); err == nil {
		t.Error("the zero prefix was accepted")
	}
}

func TestAddrsByFamily(t *testing.T) {
	a4, a6 := netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("fd00::a01:203")
	if e := (Endpoint{Addrs: []netip.Addr{a4, a6}}); e.Addr4() != a4 || e.Addr6() != a6 {
		t.Errorf("dual stack: %s, %s", e.Addr4(), e.Addr6())
	}
	if e := (Endpoint{Addrs: []netip.Addr{a4}}); e.Addr4() != a4 || e.Addr6().IsValid() {
		t.Errorf("IPv4 only: %s, %s", e.Addr4(), e.Addr6())
	}
}
