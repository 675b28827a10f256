package model

import "net/netip"

// MirrorRange holds the mirror addresses: on a node they stand for the addresses that containers
// have in their own stacks. They are on no wire and must not be in use on the underlay or the
// overlay.
var MirrorRange = netip.PrefixFrom(netip.AddrFrom4([4]byte{250}), 8)

// MirrorPrefix gives the mirror addresses of endpoint id, which its node routes to its veth
// (bpf/include/mirror.h).
func MirrorPrefix(id EndpointID) netip.Prefix {
	n := uint32(id&MaxEndpointID) << 10
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{250, byte(n >> 16), byte(n >> 8), byte(n)}), 22)
}

// CrossingPrefix gives those of them that stand for addresses beyond the container
// (bpf/tc/crossing.h).
func CrossingPrefix(id EndpointID) netip.Prefix {
	b := MirrorPrefix(id).Addr().As4()
	b[2]++
	return netip.PrefixFrom(netip.AddrFrom4(b), 25)
}

// MirrorNames gives what programs see of the two ends of a connection between a container's own
// stack, at mirror address mirror, and one of its node sockets, at node address node. False if
// these are no such addresses of e.
func MirrorNames(e Endpoint, mirror, node netip.Addr) (plain, intercepted netip.Addr, ok bool) {
	const own6, own4, loopback6, wild = 509, 510, 511, 512
	if !MirrorPrefix(e.ID).Contains(mirror) {
		return plain, intercepted, false
	}
	b := mirror.As4()
	slot := int(b[2]&3)<<8 | int(b[3])
	usual := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	switch slot &^ wild {
	default:
		if slot&^wild > 255 {
			return plain, intercepted, false
		}
		plain = netip.AddrFrom4([4]byte{127, 0, 0, b[3]})
	case own4:
		plain, usual = e.Addr4(), e.Addr4()
	case own6:
		plain, usual = e.Addr6(), e.Addr6()
	case loopback6:
		plain, usual = netip.IPv6Loopback(), netip.IPv6Loopback()
	}
	shown, alias := LoopbackShown(e.ID, node)
	switch {
	case slot&wild != 0:
		return plain, usual, node == e.Addr4()
	case node == e.Addr4():
		return plain, node, plain.Is4()
	case node == LoopbackAlias(e.ID, netip.IPv6Loopback()).Prev(): // stands for the IPv6 overlay address
		return plain, e.Addr6(), plain.Is6()
	}
	return plain, shown, alias && plain.Is4() == shown.Is4()
}
