package capture

import (
	"encoding/binary"
	"net/netip"
)

// The SYN option of docs/protocols/syn-option.md.
const (
	optionKind    = 253
	optionLength  = 16
	optionExID    = 0x4864
	optionVersion = 1
)

// option is what a direct SYN says of its connection.
type option struct {
	src     netip.Addr
	dst     netip.AddrPort
	network uint16
}

// findOption finds Heddle's option in a TCP header. It gives the offsets of its beginning and end; both are 0
// if there is none.
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

// option reads Heddle's option of a SYN. Other versions are unknown here, and the agent is asked instead.
func (p *packet) option() (o option, ok bool) {
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
	if version>>12 != optionVersion {
		return o, false
	}
	o.network = version & 0xfff
	o.dst = netip.AddrPortFrom(netip.AddrFrom4([4]byte(raw[8:12])), binary.BigEndian.Uint16(raw[6:]))
	o.src = netip.AddrFrom4([4]byte(raw[12:16]))
	return o, true
}
