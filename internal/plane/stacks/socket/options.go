package socket

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// optionCount is how many options a note keeps; their order is that of options.
const optionCount = 24

// option is a socket option that a program may set to a number, and which the pair cannot have.
type option struct {
	level, name int
	// least and most are what it may be set to; a value beyond is EINVAL.
	least, most int32
	unset       int32 // what it is if no program has set it
	// module writes it into what the module is told; nil: the module has no such option, and what
	// the program set is read back.
	module func(o *protocol.Options, value int32)
}

// Numbers of options that x/sys has no name for.
const (
	ipBindAddressNoPort = 24
	tcpFastOpenConnect  = 30
)

// LingerOption is the place of SO_LINGER: its seconds, or less than 0.
const LingerOption = 1

// options are those that notes keep. The order must not change: agents of other builds have written
// notes. An option that ends stays as a place.
var options = [...]option{
	{unix.SOL_SOCKET, unix.SO_KEEPALIVE, minInt, maxInt, 0, func(o *protocol.Options, v int32) { o.Mask |= protocol.SetKeepalive; o.Keepalive = truth(v) }},
	{unix.SOL_SOCKET, unix.SO_LINGER, minInt, maxInt, -1, func(o *protocol.Options, v int32) {
		if o.Mask, o.Linger = o.Mask|protocol.SetLinger, protocol.LingerOff; v >= 0 {
			o.Linger = uint32(v)
		}
	}},
	{unix.SOL_TCP, unix.TCP_NODELAY, minInt, maxInt, 0, func(o *protocol.Options, v int32) { o.Mask |= protocol.SetNoDelay; o.NoDelay = truth(v) }},
	{unix.SOL_TCP, unix.TCP_KEEPIDLE, 1, 32767, 7200, func(o *protocol.Options, v int32) { o.Mask |= protocol.SetKeepaliveIdle; o.KeepaliveIdle = uint32(v) }},
	{unix.SOL_TCP, unix.TCP_KEEPINTVL, 1, 32767, 75, func(o *protocol.Options, v int32) {
		o.Mask |= protocol.SetKeepaliveIntv
		o.KeepaliveInterval = uint32(v)
	}},
	{unix.SOL_TCP, unix.TCP_KEEPCNT, 1, 127, 9, func(o *protocol.Options, v int32) { o.Mask |= protocol.SetKeepaliveCnt; o.KeepaliveCount = uint32(v) }},
	{unix.SOL_TCP, unix.TCP_USER_TIMEOUT, 0, maxInt, 0, func(o *protocol.Options, v int32) { o.Mask |= protocol.SetUserTimeout; o.UserTimeout = uint32(v) }},
	{unix.SOL_IP, unix.IP_TTL, -1, 255, 64, func(o *protocol.Options, v int32) {
		if v > 0 {
			o.Mask, o.HopLimit = o.Mask|protocol.SetHopLimit, uint32(v)
		}
	}},
	{unix.SOL_IPV6, unix.IPV6_UNICAST_HOPS, -1, 255, 64, func(o *protocol.Options, v int32) {
		if v > 0 {
			o.Mask, o.HopLimit = o.Mask|protocol.SetHopLimit, uint32(v)
		}
	}},
	{unix.SOL_TCP, unix.TCP_CORK, minInt, maxInt, 0, nil},
	{unix.SOL_TCP, unix.TCP_QUICKACK, minInt, maxInt, 1, nil},
	{unix.SOL_TCP, unix.TCP_DEFER_ACCEPT, minInt, maxInt, 0, nil},
	{unix.SOL_TCP, unix.TCP_SYNCNT, 1, 127, 6, nil},
	{unix.SOL_TCP, unix.TCP_LINGER2, minInt, maxInt, 60, nil},
	{unix.SOL_TCP, unix.TCP_WINDOW_CLAMP, 0, maxInt, 0, nil},
	{unix.SOL_TCP, unix.TCP_NOTSENT_LOWAT, minInt, maxInt, 0, nil},
	{unix.SOL_TCP, unix.TCP_FASTOPEN, 0, maxInt, 0, nil},
	{unix.SOL_TCP, tcpFastOpenConnect, 0, 1, 0, nil},
	{unix.SOL_IP, unix.IP_TOS, 0, 255, 0, nil},
	{unix.SOL_IPV6, unix.IPV6_TCLASS, -1, 255, 0, nil},
	{unix.SOL_IP, unix.IP_MTU_DISCOVER, 0, 5, 1, nil},
	{unix.SOL_IP, unix.IP_RECVERR, minInt, maxInt, 0, nil},
	{unix.SOL_IP, ipBindAddressNoPort, 0, 1, 0, nil},
	{unix.SOL_TCP, unix.TCP_MAXSEG, 0, 32767, 0, nil},
}

var _ = [1]int{}[len(options)-optionCount]

const (
	minInt = -1 << 31
	maxInt = 1<<31 - 1
)

func truth(v int32) uint32 {
	if v != 0 {
		return 1
	}
	return 0
}

// OptionAt finds an option's place, by which notes know it.
func OptionAt(level, name int) (place int, ok bool) {
	for i, o := range options {
		if o.level == level && o.name == name {
			return i, true
		}
	}
	return 0, false
}

// SetOption notes what a program set, and says what the module is to be told of it.
func (n *Note) SetOption(place int, value int32) (told protocol.Options, errno unix.Errno) {
	o := options[place]
	noHops := o.level == unix.SOL_IP && o.name == unix.IP_TTL && value == 0
	if value < o.least || value > o.most || noHops {
		return told, unix.EINVAL
	}
	n.Set |= 1 << place
	n.Options[place] = value
	if o.module != nil {
		o.module(&told, value)
	}
	return told, 0
}

// Option gives what an option is set to.
func (n *Note) Option(place int) int32 {
	if n.Set&(1<<place) == 0 {
		return options[place].unset
	}
	return n.Options[place]
}

// Told gives all that the module is to be told of what the program set.
func (n *Note) Told() (all protocol.Options) {
	for i, o := range options {
		if n.Set&(1<<i) != 0 && o.module != nil {
			o.module(&all, n.Options[i])
		}
	}
	if n.Congestion != 0 {
		all.Mask, all.Congestion = all.Mask|protocol.SetCongestion, n.Congestion
	}
	return all
}

// BindFlags are those of BIND and LISTEN; reuseAddress is what the kernel keeps of the pair.
func (n *Note) BindFlags(reuseAddress bool) (flags uint32) {
	if reuseAddress {
		flags |= protocol.ReuseAddress
	}
	if n.Flags&ReusePort != 0 {
		flags |= protocol.ReusePort
	}
	if n.Flags&V6Only != 0 {
		flags |= protocol.V6Only
	}
	return flags
}

// ParseOption reads the value of an option that is one.
func ParseOption(level, name int, value []byte) (int32, error) {
	if level == unix.SOL_SOCKET && name == unix.SO_LINGER {
		if len(value) < 8 {
			return 0, unix.EINVAL
		}
		if binary.NativeEndian.Uint32(value) == 0 {
			return -1, nil
		}
		return max(0, int32(binary.NativeEndian.Uint32(value[4:]))), nil
	}
	v := int32(0)
	switch {
	case len(value) >= 4:
		v = int32(binary.NativeEndian.Uint32(value))
	case level == unix.SOL_IP && len(value) >= 1:
		v = int32(value[0]) // as the kernel does for options of IP
	default:
		return 0, unix.EINVAL
	}
	if level == unix.SOL_IP && name == unix.IP_TOS {
		v &= 0xfc // a byte, of which TCP keeps the bits of congestion notification
	}
	return v, nil
}
