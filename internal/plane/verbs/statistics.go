package verbs

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"heddle.dev/heddle/internal/api"
)

// Records of STATISTICS: docs/protocols/verbs-agent.md.

// statisticsKind is what a STATS asks for.
type statisticsKind uint32

const (
	kindEndpoints statisticsKind = 1
	kindQPs       statisticsKind = 2
	kindIDs       statisticsKind = 3
)

const (
	// statisticsMax is the longest message of a router.
	statisticsMax = 16 << 10
	// statisticsHead is what comes between a message's head and its records.
	statisticsHead = 16
	quotas         = 10
	reasonNumbers  = 64
	reasonsBefore  = 32 // of routers before there were more
	endpointLen    = 8 * (1 + 2*quotas + 3*4 + 1 + reasonsBefore)
	qpLen          = 96
	idLen          = 64
)

// statistics is a STATISTICS. size is that of a record, which may be longer than this build knows.
type statistics struct {
	kind         statisticsKind
	cursor, size uint32
	records      []byte
}

// statsMessage is STATS, for all endpoints.
func statsMessage(tag uint32, kind statisticsKind, cursor uint32) []byte {
	b := binary.NativeEndian.AppendUint32(head{kind: typeStats, tag: tag}.append(nil), uint32(kind))
	return binary.NativeEndian.AppendUint32(b, cursor)
}

// parseStatistics reads what follows the head of a STATISTICS.
func parseStatistics(b []byte) (s statistics, err error) {
	if len(b) < statisticsHead {
		return s, fmt.Errorf("%w: statistics of %d bytes", errMalformed, len(b))
	}
	s.kind = statisticsKind(binary.NativeEndian.Uint32(b))
	s.cursor = binary.NativeEndian.Uint32(b[4:])
	count := binary.NativeEndian.Uint32(b[8:])
	s.size = binary.NativeEndian.Uint32(b[12:])
	s.records = b[statisticsHead:]
	least := map[statisticsKind]uint32{kindEndpoints: endpointLen, kindQPs: qpLen, kindIDs: idLen}[s.kind]
	if uint64(count)*uint64(s.size) != uint64(len(s.records)) || count > 0 && (least == 0 || s.size < least) {
		return s, fmt.Errorf("%w: statistics %d, %d records of %d bytes in %d", errMalformed, s.kind, count, s.size, len(s.records))
	}
	return s, nil
}

// each calls f with each record.
func (s statistics) each(f func(record []byte)) {
	for at := 0; at < len(s.records); at += int(s.size) {
		f(s.records[at : at+int(s.size)])
	}
}

// longs takes numbers of 8 bytes off a record.
type longs struct{ b []byte }

func (l *longs) next() (n uint64) {
	n, l.b = binary.NativeEndian.Uint64(l.b), l.b[8:]
	return n
}

func (l *longs) traffic() api.RDMATraffic {
	return api.RDMATraffic{Requests: l.next(), Served: l.next(), BytesSent: l.next(), BytesReceived: l.next()}
}

// endpointRecord is what an endpoint has, and did since the router knows it.
type endpointRecord struct {
	number                uint64
	used, limits          [quotas]uint64
	memory, network, card api.RDMATraffic
	errors                uint64
	reasons               [reasonNumbers]uint64
}

// parseEndpoint reads a record, which has at least endpointLen bytes.
func parseEndpoint(b []byte) (r endpointRecord) {
	l := longs{b}
	r.number = l.next()
	for i := range r.used {
		r.used[i] = l.next()
	}
	for i := range r.limits {
		r.limits[i] = l.next()
	}
	r.memory, r.network, r.card = l.traffic(), l.traffic(), l.traffic()
	r.errors = l.next()
	for i := range min(len(r.reasons), len(l.b)/8) {
		r.reasons[i] = l.next()
	}
	return r
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

// parseQP reads a record, which has at least qpLen bytes. number is its endpoint's.
func parseQP(b []byte) (number uint64, q api.QueuePair) {
	number = binary.NativeEndian.Uint64(b)
	q.Number, q.PeerNumber = binary.NativeEndian.Uint32(b[8:]), binary.NativeEndian.Uint32(b[12:])
	q.Local = netip.AddrFrom16([gidLen]byte(b[16:])).Unmap()
	if peer := netip.AddrFrom16([gidLen]byte(b[32:])); !peer.IsUnspecified() {
		q.Peer = peer.Unmap()
	}
	q.PID = int(binary.NativeEndian.Uint32(b[48:]))
	var known bool
	if q.Type, known = qpTypes[b[52]]; !known {
		q.Type = fmt.Sprint(b[52])
	}
	q.State, q.Path, q.LastError = nameOf(qpStates, b[53]), nameOf(paths, b[54]), nameOf(statuses, b[55])
	l := longs{b[56:]}
	q.RDMATraffic = l.traffic()
	q.Errors = l.next()
	return number, q
}

// parseID reads a record, which has at least idLen bytes. number is its endpoint's.
func parseID(b []byte) (number uint64, id api.CMID) {
	end := func(addr, port []byte) netip.AddrPort {
		if a := netip.AddrFrom16([gidLen]byte(addr)).Unmap(); !a.IsUnspecified() || binary.NativeEndian.Uint16(port) != 0 {
			return netip.AddrPortFrom(a, binary.NativeEndian.Uint16(port))
		}
		return netip.AddrPort{}
	}
	number = binary.NativeEndian.Uint64(b)
	id.ID, id.PID = binary.NativeEndian.Uint32(b[8:]), int(binary.NativeEndian.Uint32(b[12:]))
	id.Local, id.Peer = end(b[16:], b[48:]), end(b[32:], b[50:])
	space := binary.NativeEndian.Uint16(b[52:])
	var known bool
	if id.Space, known = idSpaces[space]; !known {
		id.Space = fmt.Sprint(space)
	}
	id.State = nameOf[string](idStates, b[54])
	id.QPN, id.PeerQPN = binary.NativeEndian.Uint32(b[56:]), binary.NativeEndian.Uint32(b[60:])
	return number, id
}
