package datapath

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"
	"unsafe"

	"heddle.dev/heddle/internal/flow"
)

// observed gives what is told of a record, in words.
func observed(raw []byte, boot time.Time) (out []string) {
	eachObservation(raw, boot, func(o flow.Observation) {
		c := o.Connection
		out = append(out, fmt.Sprintf("%s %s %d %s>%s %s %s %s %s %v %d/%d %d %s", o.At.Sub(boot), o.Event, c.Endpoint, c.Local, c.Remote, c.Path, c.Protocol,
			c.Reason, o.Error, o.Accepted, c.BytesSent, c.BytesReceived, c.Retransmits, o.RTT))
	})
	return out
}

func bytesOf[T any](v *T) []byte {
	return slices.Clone(unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v)))
}

// TestWholeConnections: one record of a connection that ended soon is told of as two, an opening and
// an end, each at its time; a short one as a long one, of IPv6, as well.
func TestWholeConnections(t *testing.T) {
	boot := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	short := heddleWholeFlow{
		Time: 5_000_000_000, Cookie: 77, Local: fromAddr(netip.MustParseAddr("10.244.0.2")).Word[3], Remote: fromAddr(netip.MustParseAddr("10.244.1.2")).Word[3],
		LocalPort: toPort(4000), RemotePort: toPort(80), EndpointId: 5, BytesSent: 1000, BytesReceived: 300, Lasted: 1000, Rtt: 120, Retransmits: 2, Error: 104,
		Path: uint8(heddleHeddlePathPATH_DIRECT), Flags: uint8(heddleWholeFlowFlagsWHOLE_ACCEPTED | heddleWholeFlowFlagsWHOLE_RDMA),
	}
	long := wholeEvent(&short)
	long.Local, long.Remote = fromAddr(netip.MustParseAddr("fd48::2")), fromAddr(netip.MustParseAddr("fd48::3"))
	long.BytesSent, long.Accepted, long.Protocol, long.Reason = 5<<32, 0, 6, uint8(heddleHeddleReasonREASON_CUT_POLICY)
	earlier := long // of a version whose programs told of each opening
	earlier.Kind, earlier.Reason = uint8(heddleFlowEventKindFLOW_EVENT_ENDED), 0
	for name, c := range map[string]struct {
		raw  []byte
		want []string
	}{
		"short": {bytesOf(&short), []string{
			"4.998976s open 5 10.244.0.2:4000>10.244.1.2:80 direct rdma   true 0/0 0 120µs",
			"5s end 5 10.244.0.2:4000>10.244.1.2:80 direct rdma  ECONNRESET true 1000/300 2 120µs"}},
		"long": {bytesOf(&long), []string{
			"4.998976s open 5 [fd48::2]:4000>[fd48::3]:80 direct tcp   false 0/0 0 120µs",
			"5s cut 5 [fd48::2]:4000>[fd48::3]:80 direct tcp cut_policy ECONNRESET false 21474836480/300 2 120µs"}},
		"of an earlier version": {bytesOf(&earlier)[:88], []string{"5s end 5 [fd48::2]:4000>[fd48::3]:80 direct tcp  ECONNRESET false 21474836480/300 2 120µs"}},
		"of an unknown one":     {bytesOf(&long)[:80], nil},
	} {
		if got := observed(c.raw, boot); !slices.Equal(got, c.want) {
			t.Errorf("%s:\n%q, want\n%q", name, got, c.want)
		}
	}
	if n := unsafe.Sizeof(short) + 8; n != 64 {
		t.Errorf("with the ring's header a short record has %d bytes, want 64: a line of the cache", n)
	}
}
