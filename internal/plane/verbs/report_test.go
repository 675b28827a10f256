package verbs

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// statisticsMessage is a router's STATISTICS with one record.
func statisticsMessage(tag uint32, kind statisticsKind, cursor uint32, record []byte) []byte {
	b := head{kind: typeStatistics, tag: tag}.append(nil)
	for _, n := range []uint32{uint32(kind), cursor, 1, uint32(len(record))} {
		b = binary.NativeEndian.AppendUint32(b, n)
	}
	return append(b, record...)
}

// answerStats answers the plane's STATS: with one endpoint's record, made by endpoint, and the same
// queue pair in two messages.
func (r *router) answerStats(asks int, endpoint func() []byte) {
	r.Helper()
	for range asks {
		message, _ := r.hear(typeStats)
		tag, kind := binary.NativeEndian.Uint32(message[4:]), statisticsKind(binary.NativeEndian.Uint32(message[headLen:]))
		cursor := binary.NativeEndian.Uint32(message[headLen+4:])
		record, next := endpoint(), uint32(0)
		if kind == kindQPs {
			record = qpRecord()
			if cursor == 0 {
				next = 7
			}
		}
		if kind == kindIDs {
			record = idRecord()
		}
		r.say(statisticsMessage(tag, kind, next, record))
	}
}

func endpointStatistics(reasonsOf map[int]uint64, memory api.RDMATraffic) []byte {
	n := make([]uint64, endpointLen/8+reasonNumbers-reasonsBefore+1) // a later router's record is longer
	n[0], n[1+1], n[1+quotas+1] = 5_000_000_009, 3, 1024
	at := 1 + 2*quotas
	n[at], n[at+1], n[at+2], n[at+3] = memory.Requests, memory.Served, memory.BytesSent, memory.BytesReceived
	n[at+6], n[at+10], n[at+11] = 1000, 70, 5 // sent by TCP, which its plane counts; sent and received by a card
	n[at+12] = 4
	for i, v := range reasonsOf {
		n[at+13+i] = v
	}
	var b []byte
	for _, v := range n {
		b = binary.NativeEndian.AppendUint64(b, v)
	}
	return b
}

func idRecord() []byte {
	b := make([]byte, idLen)
	binary.NativeEndian.PutUint64(b, 5_000_000_009)
	binary.NativeEndian.PutUint32(b[8:], 3)
	binary.NativeEndian.PutUint32(b[12:], 99)
	local := netip.MustParseAddr("10.244.0.2").As16()
	copy(b[16:], local[:])
	binary.NativeEndian.PutUint16(b[48:], 7471)
	binary.NativeEndian.PutUint16(b[52:], 0x106)
	b[54] = 4
	binary.NativeEndian.PutUint32(b[56:], 17)
	return b
}

func qpRecord() []byte {
	b := make([]byte, qpLen)
	binary.NativeEndian.PutUint64(b, 5_000_000_009)
	binary.NativeEndian.PutUint32(b[8:], 17)
	binary.NativeEndian.PutUint32(b[12:], 18)
	local, peer := netip.MustParseAddr("10.244.0.2").As16(), netip.MustParseAddr("10.244.1.2").As16()
	copy(b[16:], local[:])
	copy(b[32:], peer[:])
	b[52], b[53], b[54], b[55] = 2, 3, 2, 10
	binary.NativeEndian.PutUint64(b[72:], 99)
	return b
}

// TestReports: what the router counts is reported, and its end takes nothing of it.
func TestReports(t *testing.T) {
	n := newNode(t)
	r := n.startRouter()
	limited := wanted
	limited.Limits = &model.Limits{Egress: 2_000_000, Verbs: model.VerbsLimits{QPs: 9}}
	n.plane = n.open(limited)
	r.meet()
	r.hear(typeBegin)
	message, _ := r.hear(typeEndpoint)
	r.hear(typeEnd)
	for at, want := range map[int]uint32{1: 9, 2: 77, 10: 3, 11: 2000, 12: 0} {
		if got := binary.NativeEndian.Uint32(message[headLen+2*gidLen+4*at:]); got != want {
			t.Errorf("limit %d is %d, want %d", at, got, want)
		}
	}
	n.eventually("the router to be known", func() bool { return n.plane.Router().State == api.RouterRuns })

	moved := api.RDMATraffic{Requests: 1, Served: 2, BytesSent: 300, BytesReceived: 400}
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.answerStats(4, func() []byte { return endpointStatistics(map[int]uint64{12: 6, reasonNumbers - 1: 5}, moved) })
	}()
	state, err := n.plane.RDMA(t.Context())
	<-done
	if err != nil || len(state.Devices) != 1 || len(state.QueuePairs) != 2 {
		t.Fatalf("%+v, %v", state, err)
	}
	d := state.Devices[0]
	if d.Endpoint != "n1/c1" || d.Used["qps"] != 3 || d.Limits["qps"] != 1024 || d.Errors != 4 || d.Traffic[api.RDMAMemory] != moved {
		t.Errorf("device %+v", d)
	}
	want := api.QueuePair{Endpoint: "n1/c1", Number: 17, Type: "RC", State: "RTS", Local: netip.MustParseAddr("10.244.0.2"),
		Peer: netip.MustParseAddr("10.244.1.2"), PeerNumber: 18, Path: api.RDMATCP, LastError: "REM_ACCESS_ERR", RDMATraffic: api.RDMATraffic{BytesSent: 99}}
	if state.QueuePairs[0] != want {
		t.Errorf("queue pair %+v, want %+v", state.QueuePairs[0], want)
	}

	listening := api.CMID{Endpoint: "n1/c1", ID: 3, PID: 99, Space: "TCP", State: "listening", Local: netip.MustParseAddrPort("10.244.0.2:7471"), QPN: 17}
	if len(state.CMIDs) != 1 || state.CMIDs[0] != listening {
		t.Errorf("ids %+v, want %+v", state.CMIDs, listening)
	}

	// Another router begins at 0.
	r.end()
	n.eventually("the router to be missed", func() bool { return n.plane.Router().State == api.RouterDown })
	next := n.startRouter()
	next.meet()
	next.hear(typeBegin)
	next.hear(typeEndpoint)
	next.hear(typeEnd)
	n.eventually("the next router", func() bool { return n.plane.Router().State == api.RouterRuns })
	n.eventually("reports to be old", func() bool {
		n.plane.mu.Lock()
		defer n.plane.mu.Unlock()
		return time.Since(n.plane.reported) > pollAge
	})
	go next.answerStats(1, func() []byte { return endpointStatistics(map[int]uint64{12: 1}, moved) })
	counters, err := n.plane.Counters()
	if err != nil || len(counters) != len(reasons) || counters[12].Value != 7 || counters[len(reasons)-1].Value != 5 {
		t.Errorf("counters %+v, %v", counters, err)
	}
	traffic, err := n.plane.Traffic([]model.Endpoint{{ID: 3}, limited})
	if err != nil || traffic[1].BytesSent != 740 || traffic[1].BytesReceived != 810 || traffic[0].BytesSent != 0 {
		t.Errorf("traffic %+v, %v", traffic, err)
	}
	use, err := n.plane.LimitUse([]model.Endpoint{limited})
	if err != nil || use[0].Egress.Bytes != 740 || use[0].Ingress.Bytes != 0 {
		t.Errorf("limits %+v, %v", use, err)
	}
}
