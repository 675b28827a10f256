package datapath

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
)

// flowEventsEvery is how often events are looked for. The programs wake nobody for one
// (bpf/sock/flow_events.h), unless many wait.
const flowEventsEvery = 100 * time.Millisecond

// FollowFlows calls observe with each event of a connection until ctx ends, some 100 ms after it
// came about; first with those that came while no agent ran, as far as the ring had room.
func (d *Datapath) FollowFlows(ctx context.Context, observe func(flow.Observation)) error {
	r, err := ringbuf.NewReader(d.objs.FlowEvents)
	if err != nil {
		return fmt.Errorf("open ring buffer: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = r.Close() })
	defer func() {
		if stop() {
			_ = r.Close()
		}
	}()
	var rec ringbuf.Record
	boot := bootTime()
	for {
		r.SetDeadline(time.Now().Add(flowEventsEvery))
		for {
			err := r.ReadInto(&rec)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if errors.Is(err, ringbuf.ErrClosed) || errors.Is(err, os.ErrClosed) {
				return nil
			}
			if err != nil {
				return fmt.Errorf("read ring buffer: %w", err)
			}
			if o, ok := toObservation(rec.RawSample, boot); ok {
				observe(o)
			}
		}
		boot = bootTime() // the clock may have been set
	}
}

// bootTime gives the wall clock's time at which the monotonic clock was 0.
func bootTime() time.Time {
	var since unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &since) // fails for unknown clocks only
	return time.Now().Round(0).Add(-time.Duration(since.Nano()))
}

// toObservation reads an event; false: it is not to be told.
func toObservation(raw []byte, boot time.Time) (o flow.Observation, ok bool) {
	var e heddleFlowEvent
	if len(raw) != int(unsafe.Sizeof(e)) {
		return o, false // of another version, from before this one started
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&e)), unsafe.Sizeof(e)), raw)
	local, remote := toAddr(e.Local), toAddr(e.Remote)
	if remote.IsUnspecified() {
		return o, false // the end of one that was cut before it was there: that has been told
	}
	o = flow.Observation{
		At: boot.Add(time.Duration(e.Time)), Event: eventOf(&e), Accepted: e.Accepted != 0, Relayed: e.Cookie&relayCookie != 0, RTT: time.Duration(e.Rtt) * time.Microsecond,
		Connection: model.Connection{
			Endpoint: model.EndpointID(e.EndpointId), Remote: netip.AddrPortFrom(remote, toPort(e.RemotePort)), Path: names.PathOf(e.Path),
			Protocol: protocolName(e.Protocol), BytesSent: e.BytesSent, BytesReceived: e.BytesReceived, Retransmits: e.Retransmits, Cookie: e.Cookie,
		},
	}
	if !local.IsUnspecified() { // as it is of a connect that is denied
		o.Connection.Local = netip.AddrPortFrom(local, toPort(e.LocalPort))
	}
	if e.Reason != 0 {
		o.Connection.Reason = names.Reason(e.Reason).String()
	}
	if e.Error != 0 {
		o.Error = unix.ErrnoName(unix.Errno(e.Error))
	}
	return o, true
}

// relayCookie is RELAY_COOKIE of bpf/include/relay_events.h.
const relayCookie = 1 << 62

// protocolRDMA is FLOW_PROTOCOL_RDMA of bpf/include/abi/flow_event.h.
const protocolRDMA = 254

// protocolName says what flows call an event's protocol.
func protocolName(number uint8) string {
	switch p := model.Protocol(number); p {
	case protocolRDMA:
		return flow.RDMA
	case model.ProtocolICMP:
		return "icmp"
	case model.ProtocolUDP:
		return "udp"
	case model.ProtocolOther:
		return "other"
	}
	return "tcp"
}

// eventOf says what an event is to operators.
func eventOf(e *heddleFlowEvent) flow.Event {
	kind := kindOf(e.Reason)
	switch what := heddleFlowEventKind(e.Kind); {
	case what == heddleFlowEventKindFLOW_EVENT_DENIED, what == heddleFlowEventKindFLOW_EVENT_PACKET_DENIED:
		return flow.Deny
	case what == heddleFlowEventKindFLOW_EVENT_PACKET_PASSED:
		return flow.Open
	case kind == model.KindCut || unix.Errno(e.Error) == unix.ECONNABORTED: // that by which sockets are destroyed
		return flow.Cut
	case what == heddleFlowEventKindFLOW_EVENT_FAILED:
		return flow.Fail
	case what == heddleFlowEventKindFLOW_EVENT_ENDED:
		return flow.End
	case kind == model.KindFallback:
		return flow.Fallback
	}
	return flow.Open
}

func kindOf(reason uint8) model.Kind {
	if reason == 0 || int(reason) >= len(names.Reasons) {
		return ""
	}
	return names.Reasons[reason].Kind
}
