package netstack

import (
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

const (
	userTimeout    = 924_600           // milliseconds that data may stay unacknowledged: Linux's tcp_retries2
	connectTimeout = 127 * time.Second // and a SYN: Linux's tcp_syn_retries

	bufferMin = 4 << 10
	bufferMax = 64 << 20
)

// congestions are netstack's, by number.
var congestions = map[uint32]string{
	protocol.CongestionDefault: "cubic", protocol.CongestionReno: "reno", protocol.CongestionCubic: "cubic",
}

// defaults are the options of a connection for which nobody has asked for others.
func defaults() protocol.Options {
	return protocol.Options{
		Mask: protocol.SetAll, Congestion: protocol.CongestionCubic, KeepaliveIdle: 7200, KeepaliveInterval: 75, KeepaliveCount: 9,
		UserTimeout: userTimeout, Linger: protocol.LingerOff, AckDelay: 10, SendBuffer: 1 << 20, ReceiveBuffer: 1 << 20, HopLimit: 64,
	}
}

// with gives options changed as o's mask says. netstack chooses itself when it acknowledges: a
// delay is kept, and has no effect.
func with(s protocol.Options, o *protocol.Options) (protocol.Options, error) {
	set := func(bit uint32, to *uint32, value, least, most uint32) error {
		if o.Mask&bit == 0 {
			return nil
		}
		if value < least || value > most {
			return unix.EINVAL
		}
		*to = value
		return nil
	}
	if o.Mask&protocol.SetCongestion != 0 {
		switch {
		case o.Congestion > protocol.CongestionBBR:
			return s, unix.EINVAL
		case congestions[o.Congestion] == "":
			return s, unix.ENOENT
		}
		if s.Congestion = o.Congestion; s.Congestion == protocol.CongestionDefault {
			s.Congestion = protocol.CongestionCubic
		}
	}
	user := o.UserTimeout
	if user == 0 {
		user = userTimeout
	}
	const any = 1<<32 - 1
	for _, err := range []error{
		set(protocol.SetNoDelay, &s.NoDelay, o.NoDelay, 0, 1),
		set(protocol.SetKeepalive, &s.Keepalive, o.Keepalive, 0, 1),
		set(protocol.SetKeepaliveIdle, &s.KeepaliveIdle, o.KeepaliveIdle, 1, 32767),
		set(protocol.SetKeepaliveIntv, &s.KeepaliveInterval, o.KeepaliveInterval, 1, 32767),
		set(protocol.SetKeepaliveCnt, &s.KeepaliveCount, o.KeepaliveCount, 1, 127),
		set(protocol.SetUserTimeout, &s.UserTimeout, user, 0, any),
		set(protocol.SetLinger, &s.Linger, o.Linger, 0, any),
		set(protocol.SetAckDelay, &s.AckDelay, o.AckDelay, 0, 500),
		set(protocol.SetSendBuffer, &s.SendBuffer, o.SendBuffer, bufferMin, bufferMax),
		set(protocol.SetReceiveBuffer, &s.ReceiveBuffer, o.ReceiveBuffer, bufferMin, bufferMax),
		set(protocol.SetHopLimit, &s.HopLimit, o.HopLimit, 1, 255),
	} {
		if err != nil {
			return s, err
		}
	}
	return s, nil
}

// apply brings options into force, but for the buffers.
func apply(ep tcpip.Endpoint, s *protocol.Options) {
	so := ep.SocketOptions()
	so.SetDelayOption(s.NoDelay == 0)
	idle, interval := tcpip.KeepaliveIdleOption(seconds(s.KeepaliveIdle)), tcpip.KeepaliveIntervalOption(seconds(s.KeepaliveInterval))
	user := tcpip.TCPUserTimeoutOption(time.Duration(s.UserTimeout) * time.Millisecond)
	congestion := tcpip.CongestionControlOption(congestions[s.Congestion])
	for _, o := range []tcpip.SettableSocketOption{&idle, &interval, &user, &congestion} {
		_ = ep.SetSockOpt(o) // netstack knows them all, or its tests fail
	}
	_ = ep.SetSockOptInt(tcpip.KeepaliveCountOption, int(s.KeepaliveCount))
	_ = ep.SetSockOptInt(tcpip.IPv4TTLOption, int(s.HopLimit))
	_ = ep.SetSockOptInt(tcpip.IPv6HopLimitOption, int(s.HopLimit))
	so.SetKeepAlive(s.Keepalive != 0) // it arms the timer with what is set by now
}

// applyBuffers gives an endpoint its buffers. netstack offers half of a receive buffer as window.
func applyBuffers(ep tcpip.Endpoint, s *protocol.Options) {
	so := ep.SocketOptions()
	so.SetSendBufferSize(int64(s.SendBuffer), true)
	so.SetReceiveBufferSize(2*int64(s.ReceiveBuffer), true)
}

func seconds(n uint32) time.Duration { return time.Duration(n) * time.Second }
