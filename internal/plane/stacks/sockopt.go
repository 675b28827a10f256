package stacks

import (
	"bytes"
	"context"
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/stacks/socket"
)

// longestOption bounds what is read of an option's value, in bytes.
const longestOption = 64

// congestions are the names of the module's congestion controls, by enum stack_congestion.
var congestions = []string{protocol.CongestionReno: "reno", protocol.CongestionCubic: "cubic", protocol.CongestionBBR: "bbr", protocol.CongestionNone: "none"}

// setsockopt notes what a program sets, and tells the module.
func (c *call) setsockopt() {
	d := c.Data()
	level, name, length := int(int32(d.Args[1])), int(int32(d.Args[2])), int(int32(d.Args[4]))
	if length < 0 {
		c.end(0, unix.EINVAL)
		return
	}
	value, err := c.read(d.Args[3], min(length, longestOption))
	if err == nil && len(value) < min(length, longestOption) {
		err = unix.EFAULT
	}
	if err != nil {
		c.end(0, err)
		return
	}
	unlock, ok := c.lock()
	if !ok {
		return
	}
	defer unlock()
	c.resolve()
	c.end(0, c.setOption(level, name, value))
}

func (c *call) setOption(level, name int, value []byte) error {
	if level == unix.SOL_IPV6 && c.n.Family != unix.AF_INET6 {
		return unix.ENOPROTOOPT // before the kernel looks at the value
	}
	if level == unix.SOL_TCP && name == unix.TCP_CONGESTION && len(value) > 0 {
		return c.setCongestion(string(value[:min(len(value), 15)]))
	}
	number, err := socket.ParseOption(level, name, value)
	if err != nil {
		return err
	}
	flag := func(f socket.Flags) error {
		if c.n.State != socket.Fresh && f == socket.V6Only {
			return unix.EINVAL
		}
		if c.n.Flags &^= f; number != 0 {
			c.n.Flags |= f
		}
		c.write()
		return nil
	}
	switch {
	case level == unix.SOL_SOCKET && name == unix.SO_REUSEPORT:
		return flag(socket.ReusePort)
	case level == unix.SOL_IPV6 && name == unix.IPV6_V6ONLY:
		return flag(socket.V6Only)
	case level == unix.SOL_SOCKET && name == unix.SO_SNDBUF:
		return socket.SetSendBufferTo(c.fd, number)
	}
	place, known := socket.OptionAt(level, name)
	if !known {
		return unix.ENOPROTOOPT
	}
	told, errno := c.n.SetOption(place, number)
	if errno != 0 {
		return errno
	}
	return c.applyOptions(told)
}

// setCongestion chooses a congestion control of the module's.
func (c *call) setCongestion(name string) error {
	name, _, _ = cut(name)
	i := slices.Index(congestions, name)
	if name == "" || i < 0 {
		return unix.ENOENT
	}
	before := c.n.Congestion
	c.n.Congestion = uint32(i)
	if err := c.applyOptions(protocol.Options{Mask: protocol.SetCongestion, Congestion: uint32(i)}); err != nil {
		c.n.Congestion = before
		return err
	}
	return nil
}

func cut(name string) (before, after string, found bool) {
	b, a, found := bytes.Cut([]byte(name), []byte{0})
	return string(b), string(a), found
}

// applyOptions has the module do what was noted, if it knows the socket.
func (c *call) applyOptions(told protocol.Options) error {
	if told.Mask != 0 && c.n.State != socket.Fresh && c.n.State != socket.Failed && c.n.State != socket.Bound {
		err := c.ask(func(ctx context.Context, l *module.Link) error {
			m := protocol.Set{Head: c.t.head(protocol.TypeSet, c.n.ID), Options: told}
			_, _, err := module.Request[protocol.Set, protocol.Plain](ctx, l, &m, &m.Head, -1)
			return err
		})
		if err != nil && err != unix.ENOENT { // of a connection that is over it means nothing
			return err
		}
	}
	c.write()
	c.t.mu.Lock()
	h := c.t.held[c.n.ID]
	if h != nil {
		h.note.Set, h.note.Options, h.note.Congestion, h.note.Flags = c.n.Set, c.n.Options, c.n.Congestion, c.n.Flags
	}
	c.t.mu.Unlock()
	if h != nil {
		c.p.keepAgain(c.t, h)
	}
	return nil
}

// getsockopt tells what a program set, or what the module says of the connection.
func (c *call) getsockopt() {
	d := c.Data()
	unlock, ok := c.lock()
	if !ok {
		return
	}
	c.resolve()
	level := int(int32(d.Args[1]))
	value, err := c.option(level, int(int32(d.Args[2])))
	unlock()
	if err == nil && level == unix.SOL_IP && isByte(value) {
		var room int
		if room, err = c.readLength(d.Args[4]); room > 0 && room < len(value) {
			value = []byte{byte(binary.NativeEndian.Uint32(value))} // as the kernel does for options of IP
		}
	}
	if err == nil {
		err = c.writeValue(d.Args[3], d.Args[4], value, false)
	}
	c.end(0, err)
}

// isByte reports whether an option's value is a number that fits in a byte.
func isByte(value []byte) bool {
	return len(value) == 4 && binary.NativeEndian.Uint32(value) <= 255
}

func (c *call) option(level, name int) ([]byte, error) {
	is := func(v bool) ([]byte, error) {
		if v {
			return integer(1), nil
		}
		return integer(0), nil
	}
	switch level {
	case unix.SOL_SOCKET:
		switch name {
		case unix.SO_ERROR:
			return c.takeError()
		case unix.SO_DOMAIN:
			return integer(int32(c.n.Family)), nil
		case unix.SO_PROTOCOL:
			if c.n.Flags&socket.MPTCP != 0 {
				return integer(unix.IPPROTO_MPTCP), nil
			}
			return integer(unix.IPPROTO_TCP), nil
		case unix.SO_ACCEPTCONN:
			return is(c.n.State == socket.Listening)
		case unix.SO_REUSEPORT:
			return is(c.n.Flags&socket.ReusePort != 0)
		case unix.SO_LINGER:
			seconds := c.n.Option(socket.LingerOption)
			if seconds < 0 {
				return append(integer(0), integer(0)...), nil
			}
			return append(integer(1), integer(seconds)...), nil
		}
	case unix.SOL_IPV6:
		if c.n.Family != unix.AF_INET6 {
			return nil, unix.EOPNOTSUPP
		}
		if name == unix.IPV6_V6ONLY {
			return is(c.n.Flags&socket.V6Only != 0)
		}
	case unix.SOL_TCP:
		switch name {
		case unix.TCP_INFO:
			return c.tcpInfo()
		case unix.TCP_MAXSEG:
			info, err := c.info()
			if err != nil || info.MSS == 0 {
				return integer(536), nil
			}
			return integer(int32(info.MSS)), nil
		case unix.TCP_CONGESTION:
			return c.congestion(), nil
		}
	}
	place, known := socket.OptionAt(level, name)
	if !known {
		return nil, unix.ENOPROTOOPT
	}
	return integer(c.n.Option(place)), nil
}

func integer(v int32) []byte { return binary.NativeEndian.AppendUint32(nil, uint32(v)) }

// takeError gives the error that the socket has, once: why it was not connected, or what the pair
// says.
func (c *call) takeError() ([]byte, error) {
	pending, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return nil, err
	}
	if c.n.Error != 0 {
		pending = int(c.n.Error)
		c.n.Error = 0
		c.write()
	}
	return integer(int32(pending)), nil
}

// info asks the module what it knows of the socket.
func (c *call) info() (info protocol.Info, err error) {
	if c.n.ID == 0 {
		return info, unix.ENOENT
	}
	err = c.ask(func(ctx context.Context, l *module.Link) (err error) {
		info, err = l.Info(ctx, c.t.number(), c.n.ID)
		return err
	})
	return info, err
}

func (c *call) congestion() []byte {
	name := congestions[protocol.CongestionCubic]
	if n := int(c.n.Congestion); n > 0 && n < len(congestions) {
		name = congestions[n]
	} else if info, err := c.info(); err == nil && int(info.Options.Congestion) < len(congestions) && info.Options.Congestion > 0 {
		name = congestions[info.Options.Congestion]
	}
	out := make([]byte, 16) // TCP_CA_NAME_MAX
	copy(out, name)
	return out
}

// tcpInfo is TCP_INFO with what the module knows; the rest is 0.
func (c *call) tcpInfo() ([]byte, error) {
	var out [unix.SizeofTCPInfo]byte
	const closed, listen = 7, 10
	out[0] = closed
	if c.n.State == socket.Listening {
		out[0] = listen
	}
	info, err := c.info()
	if err != nil {
		return out[:], nil
	}
	out[0] = byte(info.State)
	put32 := func(at int, v uint32) { binary.NativeEndian.PutUint32(out[at:], v) }
	put64 := func(at int, v uint64) { binary.NativeEndian.PutUint64(out[at:], v) }
	// Offsets of struct tcp_info.
	put32(16, info.MSS) // tcpi_snd_mss
	put32(20, info.MSS)
	put32(68, info.RTT)
	put32(72, info.RTTVariation)
	put32(100, uint32(info.Retransmits)) // tcpi_total_retrans
	put64(120, info.BytesSent)           // tcpi_bytes_acked
	put64(128, info.BytesReceived)
	put32(136, uint32(info.SegmentsSent))
	put32(140, uint32(info.SegmentsReceived))
	put32(144, info.SendQueue) // tcpi_notsent_bytes
	return out[:], nil
}
