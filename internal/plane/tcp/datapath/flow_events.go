package datapath

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"slices"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
)

const (
	// flowEventsEvery is how often events are looked for. The programs wake nobody for one
	// (bpf/sock/flow_events.h), unless many wait.
	flowEventsEvery = 100 * time.Millisecond
	// flowEventsSettle is how long an event may take from its time until it can be read: a tick of
	// the kernel's, 10 ms at most, and as much again. What is younger is told of the next time,
	// behind what came before it by another way.
	flowEventsSettle = 20 * time.Millisecond
)

// FollowFlows calls observe with each event of a connection until ctx ends, some 100 ms after it
// came about; first with those that came while no agent ran, as far as lanes and ring had room.
func (d *Datapath) FollowFlows(ctx context.Context, observe func(flow.Observation)) error {
	lanes, err := openFlowLanes(d.objs.FlowLanes)
	if err != nil {
		return err
	}
	defer lanes.close()
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
	var waiting flowEvents
	for {
		open, err := waiting.readRing(r)
		if err != nil {
			return fmt.Errorf("read ring buffer: %w", err)
		}
		lanes.take(waiting.add)
		boot := bootTime() // the clock may have been set
		before := uint64(time.Since(boot) - flowEventsSettle)
		if !open {
			before = math.MaxUint64
		}
		for _, e := range waiting.until(before) {
			if o, ok := toObservation(&e, boot); ok {
				observe(o)
			}
		}
		if !open {
			return nil
		}
	}
}

// flowEvents are events that were read, and not told yet.
type flowEvents []heddleFlowEvent

func (w *flowEvents) add(e *heddleFlowEvent) { *w = append(*w, *e) }

// readRing waits for a record, flowEventsEvery at most, and adds all that are there. open is false
// when the reader is closed.
func (w *flowEvents) readRing(r *ringbuf.Reader) (open bool, err error) {
	var rec ringbuf.Record
	r.SetDeadline(time.Now().Add(flowEventsEvery))
	for first := true; ; first = false {
		switch err := r.ReadInto(&rec); {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return true, nil
		case errors.Is(err, ringbuf.ErrClosed) || errors.Is(err, os.ErrClosed):
			return false, nil
		case err != nil:
			return true, err
		}
		if first {
			r.SetDeadline(time.Now()) // no more waiting: lanes may be half full
		}
		// Others are of another version, from before this one started, or woke this one.
		if e := (heddleFlowEvent{}); len(rec.RawSample) == int(unsafe.Sizeof(e)) {
			copy(unsafe.Slice((*byte)(unsafe.Pointer(&e)), unsafe.Sizeof(e)), rec.RawSample)
			w.add(&e)
		}
	}
}

// until takes out those before a time of the monotonic clock, in their order: they came by several
// ways.
func (w *flowEvents) until(before uint64) []heddleFlowEvent {
	byTime := func(a, b heddleFlowEvent) int {
		return cmp.Or(cmp.Compare(a.Time, b.Time), cmp.Compare(a.Kind, b.Kind))
	}
	slices.SortStableFunc(*w, byTime)
	n, _ := slices.BinarySearchFunc(*w, heddleFlowEvent{Time: before}, byTime)
	told := (*w)[:n]
	*w = slices.Clone((*w)[n:])
	return told
}

// bootTime gives the wall clock's time at which the monotonic clock was 0.
func bootTime() time.Time {
	var since unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &since) // fails for unknown clocks only
	return time.Now().Round(0).Add(-time.Duration(since.Nano()))
}

// toObservation reads an event; false: it is not to be told.
func toObservation(e *heddleFlowEvent, boot time.Time) (o flow.Observation, ok bool) {
	local, remote := toAddr(e.Local), toAddr(e.Remote)
	if remote.IsUnspecified() {
		return o, false // the end of one that was cut before it was there: that has been told
	}
	o = flow.Observation{
		At: boot.Add(time.Duration(e.Time)), Event: eventOf(e), Accepted: e.Accepted != 0, Relayed: e.Cookie&relayCookie != 0, RTT: time.Duration(e.Rtt) * time.Microsecond,
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
