package datapath

import (
	"encoding/binary"
	"net/netip"
)

// fromAddr gives an address in the maps' form: IPv4 is v4-mapped, words keep network byte order.
func fromAddr(a netip.Addr) heddleAddress {
	b := a.As16()
	var out heddleAddress
	for i := range out.Word {
		out.Word[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return out
}

// toAddr is the inverse of fromAddr; v4-mapped addresses come out as IPv4.
func toAddr(a heddleAddress) netip.Addr {
	var b [16]byte
	for i, w := range a.Word {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	return netip.AddrFrom16(b).Unmap()
}

// toPort converts a port as the kernel stores it (network byte order) to host byte order, and back.
func toPort(be uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], be)
	return binary.BigEndian.Uint16(b[:])
}

func routeKey(p netip.Prefix) heddleRouteKey {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	return heddleRouteKey{Prefixlen: uint32(bits), Addr: fromAddr(p.Masked().Addr())}
}

// mapped gives the IPv4 address be, in network byte order, in the maps' form.
func mapped(be uint32) heddleAddress {
	a := fromAddr(netip.AddrFrom4([4]byte{}))
	a.Word[3] = be
	return a
}
