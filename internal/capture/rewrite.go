package capture

import (
	"encoding/binary"
	"math"
	"net/netip"
)

// rewrite gives the packet from src to dst instead, with right checksums. Heddle's option is taken
// out of a SYN unless keepOption is set. Where the addresses are of another family than the
// packet's, so is the new one. Checksums are computed from the content: on the node most are not
// filled in before the device does it.
func (p *packet) rewrite(src, dst netip.AddrPort, keepOption bool) []byte {
	if p.l4 == 0 { // a later fragment: there is nothing to rewrite but the addresses
		return p.withAddresses(src.Addr(), dst.Addr(), p.raw[p.headerLength():])
	}
	segment := append([]byte(nil), p.raw[p.l4:]...)
	if p.proto == protoTCP || p.proto == protoUDP {
		binary.BigEndian.PutUint16(segment, src.Port())
		binary.BigEndian.PutUint16(segment[2:], dst.Port())
	}
	if p.opens() && !keepOption {
		segment = withoutOption(segment)
	}
	if !p.fragment {
		setTransportChecksum(p.proto, src.Addr(), dst.Addr(), segment)
	}
	return p.withAddresses(src.Addr(), dst.Addr(), segment)
}

// headerLength is the length of the IP header alone.
func (p *packet) headerLength() int {
	if p.v6 {
		return ipv6Header
	}
	return int(p.raw[0]&0xf) * 4
}

// withAddresses puts an IP header in front of segment: the packet's own with other addresses, or
// one of the other family.
func (p *packet) withAddresses(src, dst netip.Addr, segment []byte) []byte {
	toV6 := src.Is6()
	if toV6 != p.v6 {
		if toV6 {
			return p.header6(src, dst, segment)
		}
		return p.header4(src, dst, segment)
	}
	headers := p.l4
	if headers == 0 {
		headers = p.headerLength()
	}
	out := append(append([]byte(nil), p.raw[:headers]...), segment...)
	if p.v6 {
		if length := len(out) - ipv6Header; length <= math.MaxUint16 {
			binary.BigEndian.PutUint16(out[4:], uint16(length))
		}
		copy(out[8:], src.AsSlice())
		copy(out[24:], dst.AsSlice())
		return out
	}
	if len(out) <= math.MaxUint16 {
		binary.BigEndian.PutUint16(out[2:], uint16(len(out)))
	}
	copy(out[12:], src.AsSlice())
	copy(out[16:], dst.AsSlice())
	setHeaderChecksum(out[:p.headerLength()])
	return out
}

// header6 puts an IPv6 header in front of a segment that travelled in IPv4: a container's ::1 does.
func (p *packet) header6(src, dst netip.Addr, segment []byte) []byte {
	out := make([]byte, ipv6Header, ipv6Header+len(segment))
	trafficClass := p.raw[1]
	binary.BigEndian.PutUint32(out, 6<<28|uint32(trafficClass)<<20)
	if len(segment) <= math.MaxUint16 {
		binary.BigEndian.PutUint16(out[4:], uint16(len(segment)))
	}
	out[6], out[7] = p.proto, p.raw[8] // hop limit from the time to live
	copy(out[8:], src.AsSlice())
	copy(out[24:], dst.AsSlice())
	return append(out, segment...)
}

// header4 is the opposite of header6.
func (p *packet) header4(src, dst netip.Addr, segment []byte) []byte {
	const version4NoOptions, dontFragment = 0x45, 0x4000
	out := make([]byte, ipv4Header, ipv4Header+len(segment))
	out[0], out[1] = version4NoOptions, byte(binary.BigEndian.Uint32(p.raw)>>20)
	if total := len(out) + len(segment); total <= math.MaxUint16 {
		binary.BigEndian.PutUint16(out[2:], uint16(total))
	}
	binary.BigEndian.PutUint16(out[6:], dontFragment)
	out[8], out[9] = p.raw[7], p.proto
	copy(out[12:], src.AsSlice())
	copy(out[16:], dst.AsSlice())
	setHeaderChecksum(out)
	return append(out, segment...)
}

// withoutOption takes Heddle's option out of a TCP segment. What follows it moves up.
func withoutOption(segment []byte) []byte {
	const word, endOfList = 4, 0
	header := segment[:int(segment[12]>>4)*4]
	begin, end := findOption(header)
	if end == 0 {
		return segment
	}
	out := append([]byte(nil), header[:begin]...)
	out = append(out, header[end:]...)
	for len(out)%word != 0 {
		out = append(out, endOfList)
	}
	out[12] = byte(len(out)/word)<<4 | out[12]&0xf
	return append(out, segment[len(header):]...)
}

func setHeaderChecksum(header []byte) {
	binary.BigEndian.PutUint16(header[10:], 0)
	binary.BigEndian.PutUint16(header[10:], ^fold(sum(0, header)))
}

// setTransportChecksum sets the checksum of TCP and UDP. UDP over IPv4 may go without one.
func setTransportChecksum(proto uint8, src, dst netip.Addr, segment []byte) {
	const tcpAt, udpAt = 16, 6
	at := tcpAt
	switch proto {
	case protoTCP:
	case protoUDP:
		if at = udpAt; src.Is4() && segment[at] == 0 && segment[at+1] == 0 {
			return
		}
	default:
		return
	}
	binary.BigEndian.PutUint16(segment[at:], 0)
	check := ^transportSum(proto, src, dst, segment)
	if check == 0 && proto == protoUDP { // 0 means none
		check = math.MaxUint16
	}
	binary.BigEndian.PutUint16(segment[at:], check)
}

// transportSum is the one's complement sum over pseudo header and segment: 0xffff if its checksum
// is right.
func transportSum(proto uint8, src, dst netip.Addr, segment []byte) uint16 {
	s := sum(0, src.AsSlice())
	s = sum(s, dst.AsSlice())
	var rest [8]byte
	binary.BigEndian.PutUint32(rest[:], uint32(len(segment)))
	rest[7] = proto
	return fold(sum(sum(s, rest[:]), segment))
}

// sum adds b, in words of 16 bits, to a one's complement sum that is not folded yet. Only the last
// part may be of odd length.
func sum(s uint64, b []byte) uint64 {
	for ; len(b) >= 4; b = b[4:] {
		s += uint64(binary.BigEndian.Uint32(b))
	}
	for ; len(b) >= 2; b = b[2:] {
		s += uint64(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		s += uint64(b[0]) << 8
	}
	return s
}

func fold(s uint64) uint16 {
	for s > math.MaxUint16 {
		s = s>>16 + s&math.MaxUint16
	}
	return uint16(s)
}
