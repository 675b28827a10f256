package capture

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// IP protocol numbers.
const (
	protoHopByHop = 0
	protoTCP      = 6
	protoUDP      = 17
	protoRouting  = 43
	protoFragment = 44
	protoDestOpts = 60
)

const (
	ipv4Header = 20
	ipv6Header = 40
	tcpHeader  = 20
	udpHeader  = 8
)

// TCP flags.
const (
	flagFIN = 1 << 0
	flagSYN = 1 << 1
	flagRST = 1 << 2
	flagACK = 1 << 4
)

// packet is one IP packet. Its slices are the frame's: nothing is changed in place.
type packet struct {
	raw   []byte // from the IP header on, without what the link added behind it
	v6    bool
	proto uint8
	// src and dst have ports if it is TCP or UDP and not a later fragment.
	src, dst netip.AddrPort
	l4       int   // offset of the transport header; 0 in a later fragment
	fragment bool  // the transport header does not tell of the whole packet
	flags    uint8 // of TCP
}

var (
	errVersion   = errors.New("neither IPv4 nor IPv6")
	errTruncated = errors.New("packet is shorter than its headers say")
)

// parse reads an IP packet. raw begins with the IP header.
func parse(raw []byte) (packet, error) {
	if len(raw) == 0 {
		return packet{}, errTruncated
	}
	var (
		p   packet
		err error
	)
	switch raw[0] >> 4 {
	case 4:
		p, err = parse4(raw)
	case 6:
		p, err = parse6(raw)
	default:
		return packet{}, errVersion
	}
	if err != nil || p.l4 == 0 {
		return p, err
	}
	return p, p.readPorts()
}

func parse4(raw []byte) (packet, error) {
	if len(raw) < ipv4Header {
		return packet{}, errTruncated
	}
	header := int(raw[0]&0xf) * 4
	total := int(binary.BigEndian.Uint16(raw[2:]))
	if total == 0 { // more than 64 KiB, not cut into segments yet
		total = len(raw)
	}
	if header < ipv4Header || header > total || total > len(raw) {
		return packet{}, errTruncated
	}
	p := packet{raw: raw[:total], proto: raw[9]}
	p.src = netip.AddrPortFrom(netip.AddrFrom4([4]byte(raw[12:16])), 0)
	p.dst = netip.AddrPortFrom(netip.AddrFrom4([4]byte(raw[16:20])), 0)
	const moreFragments, offset = 0x2000, 0x1fff
	frag := binary.BigEndian.Uint16(raw[6:])
	p.fragment = frag&(moreFragments|offset) != 0
	if frag&offset == 0 {
		p.l4 = header
	}
	return p, nil
}

func parse6(raw []byte) (packet, error) {
	if len(raw) < ipv6Header {
		return packet{}, errTruncated
	}
	total := ipv6Header + int(binary.BigEndian.Uint16(raw[4:]))
	if total == ipv6Header {
		total = len(raw)
	}
	if total > len(raw) {
		return packet{}, errTruncated
	}
	p := packet{raw: raw[:total], v6: true, proto: raw[6], l4: ipv6Header}
	p.src = netip.AddrPortFrom(netip.AddrFrom16([16]byte(raw[8:24])), 0)
	p.dst = netip.AddrPortFrom(netip.AddrFrom16([16]byte(raw[24:40])), 0)
	for {
		switch p.proto {
		case protoHopByHop, protoRouting, protoDestOpts, protoFragment:
		default:
			return p, nil
		}
		if p.l4+8 > total {
			return packet{}, errTruncated
		}
		extension, length := raw[p.l4:], 8
		if p.proto == protoFragment {
			const moreFragments, offset = 1, 0xfff8
			frag := binary.BigEndian.Uint16(extension[2:])
			p.fragment = p.fragment || frag&(moreFragments|offset) != 0
			if frag&offset != 0 {
				p.proto, p.l4 = extension[0], 0
				return p, nil
			}
		} else {
			length += int(extension[1]) * 8
		}
		p.proto = extension[0]
		if p.l4 += length; p.l4 > total {
			return packet{}, errTruncated
		}
	}
}

// readPorts reads ports and flags of the transport header.
func (p *packet) readPorts() error {
	segment := p.raw[p.l4:]
	switch p.proto {
	case protoTCP:
		if len(segment) < tcpHeader {
			return errTruncated
		}
		if n := int(segment[12]>>4) * 4; n < tcpHeader || n > len(segment) {
			return errTruncated
		}
		p.flags = segment[13]
	case protoUDP:
		if len(segment) < udpHeader {
			return errTruncated
		}
	default:
		return nil
	}
	p.src = netip.AddrPortFrom(p.src.Addr(), binary.BigEndian.Uint16(segment))
	p.dst = netip.AddrPortFrom(p.dst.Addr(), binary.BigEndian.Uint16(segment[2:]))
	return nil
}

// tcp gives the TCP header with its options; nil if the packet has none.
func (p *packet) tcp() []byte {
	if p.proto != protoTCP || p.l4 == 0 {
		return nil
	}
	segment := p.raw[p.l4:]
	return segment[:int(segment[12]>>4)*4]
}

// opens reports whether the packet is the first of a connection.
func (p *packet) opens() bool { return p.proto == protoTCP && p.flags&(flagSYN|flagACK) == flagSYN }
