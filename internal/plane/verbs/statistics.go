package verbs

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/plane/layout"
	"heddle.dev/heddle/internal/plane/verbs/protocol"
)

// Records of STATISTICS: docs/protocols/verbs-agent.md.

// statistics is a STATISTICS. A record may be longer than this build knows.
type statistics struct {
	protocol.Statistics
	records []byte
}

// statsMessage is STATS, for all endpoints.
func statsMessage(tag, kind, cursor uint32) []byte {
	return layout.Append(nil, &protocol.Stats{Head: protocol.Head{Type: protocol.TypeStats, Tag: tag}, Kind: kind, Cursor: cursor})
}

// leastRecord is how long a record of a kind is, in bytes: routers of before have fewer reasons.
var leastRecord = map[uint32]int{
	protocol.KindEndpoints: binary.Size(protocol.EndpointRecord{}) - 8*(len(protocol.EndpointRecord{}.Reasons)-protocol.ReasonsBefore),
	protocol.KindQPs:       binary.Size(protocol.QPRecord{}),
	protocol.KindIDs:       binary.Size(protocol.IDRecord{}),
}

// parseStatistics reads a STATISTICS.
func parseStatistics(b []byte) (s statistics, err error) {
	if s.Statistics, s.records, err = layout.Take[protocol.Statistics](b); err != nil {
		return s, err
	}
	least := leastRecord[s.Kind]
	if uint64(s.Count)*uint64(s.Size) != uint64(len(s.records)) || s.Count > 0 && (least == 0 || int(s.Size) < least) {
		return s, fmt.Errorf("%w: statistics %d, %d records of %d bytes in %d", layout.ErrMalformed, s.Kind, s.Count, s.Size, len(s.records))
	}
	return s, nil
}

// each calls f with the bytes of each record.
func (s statistics) each(f func(b []byte)) {
	for at := 0; at < len(s.records); at += int(s.Size) {
		f(s.records[at : at+int(s.Size)])
	}
}

// record reads a record, which has at least leastRecord bytes of its kind: what is missing is 0.
func record[T any](b []byte) T {
	var v T
	whole := make([]byte, binary.Size(v))
	copy(whole, b)
	v, _ = layout.Parse[T](whole) // it is as long
	return v
}

// Places in the traffic of an endpoint's record.
const (
	byMemory = iota
	byTCP
	byCard
)

func trafficOf(t protocol.Traffic) api.RDMATraffic {
	return api.RDMATraffic{Requests: t.Requests, Served: t.Served, BytesSent: t.Sent, BytesReceived: t.Received}
}

// Names of numbers in the record of a queue pair, as libibverbs has them.
var (
	paths    = []api.RDMAPath{api.RDMANone, api.RDMAMemory, api.RDMATCP, api.RDMACard}
	qpTypes  = map[uint8]string{2: "RC", 3: "UC", 4: "UD"}
	qpStates = []string{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"}
	idSpaces = map[uint16]string{0x0002: "IPOIB", 0x0106: "TCP", 0x0111: "UDP", 0x013F: "IB"}
	idStates = []string{
		"idle", "bound", "address-resolved", "route-resolved", "listening", "connecting", "requested", "answered", "accepted", "connected", "disconnecting", "ended",
	}
	statuses = []string{
		"", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR", "MW_BIND_ERR", "BAD_RESP_ERR", "LOC_ACCESS_ERR",
		"REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR", "RETRY_EXC_ERR", "RNR_RETRY_EXC_ERR", "LOC_RDD_VIOL_ERR", "REM_INV_RD_REQ_ERR",
		"REM_ABORT_ERR", "INV_EECN_ERR", "INV_EEC_STATE_ERR", "FATAL_ERR", "RESP_TIMEOUT_ERR", "GENERAL_ERR",
	}
)

// nameOf gives the name of a number; of one without a name the number.
func nameOf[T ~string](names []T, n uint8) T {
	if int(n) < len(names) {
		return names[n]
	}
	return T(fmt.Sprint(n))
}

// parseQP reads a record. number is its endpoint's.
func parseQP(b []byte) (number uint64, q api.QueuePair) {
	r := record[protocol.QPRecord](b)
	q.Number, q.PeerNumber, q.PID = r.Number, r.Peer, int(r.PID)
	q.Local = netip.AddrFrom16(r.GID).Unmap()
	if peer := netip.AddrFrom16(r.PeerGid); !peer.IsUnspecified() {
		q.Peer = peer.Unmap()
	}
	var known bool
	if q.Type, known = qpTypes[r.Service]; !known {
		q.Type = fmt.Sprint(r.Service)
	}
	q.State, q.Path, q.LastError = nameOf(qpStates, r.State), nameOf(paths, r.Path), nameOf(statuses, r.LastError)
	q.RDMATraffic, q.Errors = trafficOf(r.Traffic), r.Errors
	return r.Endpoint, q
}

// parseID reads a record. number is its endpoint's.
func parseID(b []byte) (number uint64, id api.CMID) {
	end := func(gid [16]byte, port uint16) netip.AddrPort {
		if a := netip.AddrFrom16(gid).Unmap(); !a.IsUnspecified() || port != 0 {
			return netip.AddrPortFrom(a, port)
		}
		return netip.AddrPort{}
	}
	r := record[protocol.IDRecord](b)
	id.ID, id.PID = r.Number, int(r.PID)
	id.Local, id.Peer = end(r.Source, r.SourcePort), end(r.Destination, r.DestinationPort)
	var known bool
	if id.Space, known = idSpaces[r.Space]; !known {
		id.Space = fmt.Sprint(r.Space)
	}
	id.State = nameOf[string](idStates, r.State)
	id.QPN, id.PeerQPN = r.QP, r.PeerQp
	return r.Endpoint, id
}
