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
// came about; first with those that came while no agent ran, as far as the ring had room. The
// opening of one that neither failed nor fell back it tells with its end, or after a pass.
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
	passes := openingPasses{again: true}
	defer func() { _ = d.objs.PassesUntil.Set(uint64(0)) }() // or they lapse
	for {
		passes.run(d, time.Now())
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
			eachObservation(rec.RawSample, boot, observe)
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

// eachObservation gives observe what an event says: two things if it is of a whole connection, and
// nothing if it is not to be told.
func eachObservation(raw []byte, boot time.Time, observe func(flow.Observation)) {
	e, ok := readEvent(raw)
	if !ok {
		return
	}
	local, remote := toAddr(e.Local), toAddr(e.Remote)
	if remote.IsUnspecified() {
		return // the end of one that was cut before it was there: that has been told
	}
	o := flow.Observation{
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
	if heddleFlowEventKind(e.Kind) == heddleFlowEventKindFLOW_EVENT_WHOLE {
		observe(openingOf(o, boot.Add(time.Duration(e.Opened))))
	}
	observe(o)
}

// readEvent reads a record of the ring; false: it is of another version, from before this one
// started. One of those had no Opened.
func readEvent(raw []byte) (e heddleFlowEvent, ok bool) {
	var w heddleWholeFlow
	switch len(raw) {
	case int(unsafe.Sizeof(w)):
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&w)), unsafe.Sizeof(w)), raw)
		return wholeEvent(&w), true
	case int(unsafe.Sizeof(e)), int(unsafe.Offsetof(e.Opened)):
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&e)), unsafe.Sizeof(e)), raw)
		return e, true
	}
	return e, false
}

// wholeEvent gives the event that a whole_flow is short for.
func wholeEvent(w *heddleWholeFlow) heddleFlowEvent {
	e := heddleFlowEvent{
		Time: w.Time, Cookie: w.Cookie, BytesSent: uint64(w.BytesSent), BytesReceived: uint64(w.BytesReceived), Local: mapped(w.Local), Remote: mapped(w.Remote),
		LocalPort: w.LocalPort, RemotePort: w.RemotePort, EndpointId: w.EndpointId, Retransmits: uint32(w.Retransmits), Rtt: w.Rtt, Error: uint16(w.Error),
		Kind: uint8(heddleFlowEventKindFLOW_EVENT_WHOLE), Path: w.Path, Reason: w.Reason, Protocol: uint8(model.ProtocolTCP),
		Opened: w.Time - uint64(w.Lasted)<<10,
	}
	flags := heddleWholeFlowFlags(w.Flags)
	if flags&heddleWholeFlowFlagsWHOLE_ACCEPTED != 0 {
		e.Accepted = 1
	}
	if flags&heddleWholeFlowFlagsWHOLE_RDMA != 0 {
		e.Protocol = protocolRDMA
	}
	return e
}

// openingOf gives the opening of a connection that was over when it was told of: a usual one, with
// the round trip time that it had in the end.
func openingOf(o flow.Observation, at time.Time) flow.Observation {
	o.At, o.Event, o.Error, o.Connection.Reason = at, flow.Open, "", ""
	o.Connection.BytesSent, o.Connection.BytesReceived, o.Connection.Retransmits = 0, 0, 0
	return o
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
	case what == heddleFlowEventKindFLOW_EVENT_ENDED, what == heddleFlowEventKindFLOW_EVENT_WHOLE:
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
