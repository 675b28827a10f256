package model

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// Prefix6Bits is the length of a network's IPv6 prefix. The IPv6 address of an overlay address is
// the prefix followed by the 32 bits of its IPv4 address (the /96 form of RFC 6052, section 2.2),
// so either names both.
const Prefix6Bits = 96

// DefaultPrefix6 is the prefix of a dual-stack network that nobody chose another for: a unique
// local one (RFC 4193) made of the network id, so that networks on one underlay differ.
func DefaultPrefix6(id NetworkID) netip.Prefix {
	a := [16]byte{0: 0xfd, 1: 0x48, 2: 0x64, 3: 0x64}
	binary.BigEndian.PutUint16(a[4:], uint16(id))
	return netip.PrefixFrom(netip.AddrFrom16(a), Prefix6Bits)
}

// ValidatePrefix6 checks a network's IPv6 prefix: 96 bits of unicast addresses that routers carry.
func ValidatePrefix6(p netip.Prefix) error {
	a := p.Addr()
	switch {
	case !p.IsValid() || !a.Is6() || p.Bits() != Prefix6Bits:
		return fmt.Errorf("prefix %s: want an IPv6 prefix of %d bits such as %s", p, Prefix6Bits, DefaultPrefix6(1))
	case p != p.Masked():
		return fmt.Errorf("prefix %s: has bits beyond its length: write %s", p, p.Masked())
	// ::/96 has loopback and "unspecified" in it, ::ffff:0:0/96 stands for IPv4 itself.
	case a.IsUnspecified() || a.Is4In6() || a.IsMulticast() || a.IsLinkLocalUnicast():
		return fmt.Errorf("prefix %s: want unicast addresses that routers carry", p)
	}
	return nil
}

// Overlay6 gives the IPv6 form of overlay address a, or the zero Addr if prefix6 or a is of no use:
// a network without prefix6 is IPv4-only.
func Overlay6(prefix6 netip.Prefix, a netip.Addr) netip.Addr {
	if !prefix6.IsValid() || !a.Is4() {
		return netip.Addr{}
	}
	b, v4 := prefix6.Addr().As16(), a.As4()
	copy(b[12:], v4[:])
	return netip.AddrFrom16(b)
}

// OverlayAddrs gives the addresses of an endpoint that has the IPv4 address a: a, then its IPv6
// form if prefix6 is valid.
func OverlayAddrs(prefix6 netip.Prefix, a netip.Addr) []netip.Addr {
	if a6 := Overlay6(prefix6, a); a6.IsValid() {
		return []netip.Addr{a, a6}
	}
	return []netip.Addr{a}
}

// Overlay4 is the inverse of Overlay6; the zero Addr for what is not in prefix6.
func Overlay4(prefix6 netip.Prefix, a netip.Addr) netip.Addr {
	if !prefix6.IsValid() || !prefix6.Contains(a) {
		return netip.Addr{}
	}
	return embedded4(a)
}

// embedded4 gives the last 32 bits of an IPv6 address.
func embedded4(a netip.Addr) netip.Addr {
	b := a.As16()
	return netip.AddrFrom4([4]byte(b[12:]))
}

// Embeds reports whether a6 is the IPv6 form of a4 for some prefix.
func Embeds(a6, a4 netip.Addr) bool { return a6.Is6() && a4.Is4() && embedded4(a6) == a4 }

// OverlayPrefix6 gives the IPv6 prefix of all Overlay6 of p, or the zero Prefix where Overlay6
// gives none.
func OverlayPrefix6(prefix6, p netip.Prefix) netip.Prefix {
	a := Overlay6(prefix6, p.Addr())
	if !a.IsValid() {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(a, Prefix6Bits+p.Bits())
}

// OverlayPrefix4 is the inverse of OverlayPrefix6; the zero Prefix for what is not inside prefix6.
func OverlayPrefix4(prefix6, p netip.Prefix) netip.Prefix {
	a := Overlay4(prefix6, p.Addr())
	if !a.IsValid() || p.Bits() < Prefix6Bits {
		return netip.Prefix{}
	}
	return netip.PrefixFrom(a, p.Bits()-Prefix6Bits)
}

// WithOverlay6 gives IPv4 prefixes followed by their IPv6 forms, if there are any.
func WithOverlay6(prefix6 netip.Prefix, prefixes []netip.Prefix) []netip.Prefix {
	out := append([]netip.Prefix(nil), prefixes...)
	for _, p := range prefixes {
		if q := OverlayPrefix6(prefix6, p); q.IsValid() {
			out = append(out, q)
		}
	}
	return out
}
