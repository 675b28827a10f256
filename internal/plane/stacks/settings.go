package stacks

import (
	"slices"
	"time"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/stack"
)

// toldOf gives what the module is told of a profile.
func toldOf(s stack.Settings) (o protocol.Options, l protocol.Limits) {
	if i := slices.Index(congestions, s.Congestion); s.Congestion != "" && i >= 0 {
		o.Mask, o.Congestion = o.Mask|protocol.SetCongestion, uint32(i)
	}
	if s.ReceiveBuffer != 0 {
		o.Mask, o.ReceiveBuffer = o.Mask|protocol.SetReceiveBuffer, s.ReceiveBuffer
	}
	if s.SendBuffer != 0 {
		o.Mask, o.SendBuffer = o.Mask|protocol.SetSendBuffer, s.SendBuffer
	}
	if k := s.Keepalive; k != nil {
		o.Mask |= protocol.SetKeepalive | protocol.SetKeepaliveIdle | protocol.SetKeepaliveIntv | protocol.SetKeepaliveCnt
		o.Keepalive, o.KeepaliveCount = 1, k.Count
		o.KeepaliveIdle, o.KeepaliveInterval = seconds(k.Idle), seconds(k.Interval)
	}
	if s.UserTimeout != 0 {
		o.Mask, o.UserTimeout = o.Mask|protocol.SetUserTimeout, milliseconds(s.UserTimeout)
	}
	if s.DelayedACK != 0 {
		o.Mask, o.AckDelay = o.Mask|protocol.SetAckDelay, milliseconds(s.DelayedACK)
	}
	l.Memory, l.Connections = s.Memory, s.Connections
	l.Processor = uint32(s.Processors * 1000)
	return o, l
}

func seconds(d stack.Duration) uint32      { return uint32(time.Duration(d) / time.Second) }
func milliseconds(d stack.Duration) uint32 { return uint32(time.Duration(d) / time.Millisecond) }
