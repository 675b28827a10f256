package capture

import (
	"encoding/binary"
	"net/netip"
)

// The SYN option of docs/protocols/syn-option.md.
const (
	optionKind     = 253
	optionLength   = 16
	optionExID     = 0x4864
	optionVersion  = 1 // the ends are the addresses in the option
	optionVersion6 = 2 // the ends are the IPv6 forms of these
)

// option is what a direct SYN says of its connection.
type option struct {
	src     netip.Addr
	dst     netip.AddrPort
	network uint16
}

// findOption finds Heddle's option in a TCP header. It gives the offsets of its beginning and end;
// both are 0 if there is none.
func findOption(header []byte) (begin, end int) {
	const endOfList, noOperation = 0, 1
	for i := tcpHeader; i < len(header); {
		switch header[i] {
		case endOfList:
			return 0, 0
		case noOperation:
			i++
			continue
		}
		if i+1 >= len(header) {
			return 0, 0
		}
		n := int(header[i+1])
		if n < 2 || i+n > len(header) {
			return 0, 0
		}
		if header[i] == optionKind && n >= 4 && binary.BigEndian.Uint16(header[i+2:]) == optionExID {
			return i, i + n
		}
		i += n
	}
	return 0, 0
}

// option reads Heddle's option of a SYN. prefix6 makes the IPv6 form of an address. Other versions,
// and IPv6 in a network without it, are unknown here, and the agent is asked instead.
func (p *packet) option(prefix6 []byte) (o option, ok bool) {
	if !p.opens() {
		return o, false
	}
	header := p.tcp()
	begin, end := findOption(header)
	if end-begin != optionLength {
		return o, false
	}
	raw := header[begin:end]
	version := binary.BigEndian.Uint16(raw[4:])
	o.network = version & 0xfff
	var before []byte
	switch {
	case version>>12 == optionVersion:
	case version>>12 == optionVersion6 && prefix6 != nil:
		before = prefix6
	default:
		return o, false
	}
	address := func(b []byte) netip.Addr {
		a, _ := netip.AddrFromSlice(append(append([]byte(nil), before...), b...))
		return a
	}
	o.dst = netip.AddrPortFrom(address(raw[8:12]), binary.BigEndian.Uint16(raw[6:]))
	o.src = address(raw[12:16])
	return o, true
}
