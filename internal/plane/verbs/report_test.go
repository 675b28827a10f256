package verbs

import (
	"net/netip"
	"testing"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/layout"
	"heddle.dev/heddle/internal/plane/verbs/protocol"
)

// statisticsMessage is a router's STATISTICS with one record.
func statisticsMessage(tag, kind, cursor uint32, record []byte) []byte {
	m := protocol.Statistics{Head: protocol.Head{Type: protocol.TypeStatistics, Tag: tag}, Kind: kind, Cursor: cursor, Count: 1, Size: uint32(len(record))}
	return append(layout.Append(nil, &m), record...)
}

// answerStats answers the plane's STATS: with one endpoint's record, made by endpoint, and the same
// queue pair in two messages.
func (r *router) answerStats(asks int, endpoint func() []byte) {
	r.Helper()
	for range asks {
		message, _ := r.hear(protocol.TypeStats)
		asked, err := layout.Parse[protocol.Stats](message)
		if err != nil {
			r.Error(err)
			return
		}
		record, next := endpoint(), uint32(0)
		if asked.Kind == protocol.KindQPs {
			record = qpRecord()
			if asked.Cursor == 0 {
				next = 7
			}
		}
		if asked.Kind == protocol.KindIDs {
			record = idRecord()
		}
		r.say(statisticsMessage(asked.Head.Tag, asked.Kind, next, record))
	}
}

// endpointStatistics is a record of a later router, which is longer.
func endpointStatistics(reasonsOf map[int]uint64, memory api.RDMATraffic) []byte {
	r := protocol.EndpointRecord{Endpoint: 5_000_000_009, Errors: 4}
	r.Used[1], r.Limits[1] = 3, 1024
	r.Traffic = [3]protocol.Traffic{
		byMemory: {Requests: memory.Requests, Served: memory.Served, Sent: memory.BytesSent, Received: memory.BytesReceived},
		byTCP:    {Sent: 1000}, // which the TCP plane counts
		byCard:   {Sent: 70, Received: 5},
	}
	for i, v := range reasonsOf {
		r.Reasons[i] = v
	}
	return append(layout.Append(nil, &r), make([]byte, 8)...)
}

func idRecord() []byte {
	return layout.Append(nil, &protocol.IDRecord{
		Endpoint: 5_000_000_009, Number: 3, PID: 99, Source: netip.MustParseAddr("10.244.0.2").As16(), SourcePort: 7471, Space: 0x106, State: 4, QP: 17,
	})
}

func qpRecord() []byte {
	return layout.Append(nil, &protocol.QPRecord{
		Endpoint: 5_000_000_009, Number: 17, Peer: 18, GID: netip.MustParseAddr("10.244.0.2").As16(), PeerGid: netip.MustParseAddr("10.244.1.2").As16(),
		Service: 2, State: 3, Path: 2, LastError: 10, Traffic: protocol.Traffic{Sent: 99},
	})
}

// TestReports: what the router counts is reported, and its end takes nothing of it.
func TestReports(t *testing.T) {
	n := newNode(t)
	r := n.startRouter()
	limited := wanted
	limited.Limits = &model.Limits{Egress: 2_000_000, Verbs: model.VerbsLimits{QPs: 9}}
	n.plane = n.open(limited)
	r.meet()
	r.hear(protocol.TypeBegin)
	message, _ := r.hear(protocol.TypeEndpoint)
	r.hear(protocol.TypeEnd)
	told, err := layout.Parse[protocol.Endpoint](message)
	if l := told.Limits; err != nil || l.QPs != 9 || l.CQs != 77 || l.SpinUs != 3 || l.EgressKbit != 2000 || l.IngressKbit != 0 {
		t.Errorf("limits %+v, %v", l, err)
	}
	n.eventually("the router to be known", func() bool { return n.plane.Router().State == api.RouterRuns })

	moved := api.RDMATraffic{Requests: 1, Served: 2, BytesSent: 300, BytesReceived: 400}
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.answerStats(4, func() []byte {
			return endpointStatistics(map[int]uint64{12: 6, len(protocol.EndpointRecord{}.Reasons) - 1: 5}, moved)
		})
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
	next.hear(protocol.TypeBegin)
	next.hear(protocol.TypeEndpoint)
	next.hear(protocol.TypeEnd)
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
