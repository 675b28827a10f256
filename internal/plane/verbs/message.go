package verbs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// The messages between agent and router: docs/protocols/verbs-agent.md. Numbers are in the
// machine's own byte order.

const protocolVersion = 3

type messageType uint32

const (
	typeHello     messageType = 1
	typeBegin     messageType = 2
	typeEnd       messageType = 3
	typeEndpoint  messageType = 4
	typeRemove    messageType = 5
	typeConnect   messageType = 6
	typeConnected messageType = 7
	typeAccepted  messageType = 8
	typeRefused   messageType = 9
	typeStats     messageType = 10
	// typeStatistics answers a STATS.
	typeStatistics messageType = 11
	// typeDrain has a router give endpoints back; it is the router's answer, too.
	typeDrain    messageType = 12
	typeReleased messageType = 13
	// typeGroups says what multicast groups an endpoint is in: to the agent one of the router's, to
	// the router one elsewhere.
	typeGroups messageType = 14
	// typeAsk asks whether an endpoint may speak to a peer without Heddle; typeAnswer says so, and
	// typeAskAnew has all asked for again.
	typeAsk     messageType = 18
	typeAnswer  messageType = 15
	typeAskAnew messageType = 16
	// typeCard tells of the card at the other end of the connection that follows.
	typeCard messageType = 17
)

// Bytes of a message's parts.
const (
	headLen   = 16
	gidLen    = 16
	limitsLen = 16 * 4
	nameLen   = 64
	// messageLen is that of an ENDPOINT.
	messageLen = headLen + 2*gidLen + limitsLen + nameLen
)

// head begins every message.
type head struct {
	kind     messageType
	tag      uint32
	endpoint uint64
}

func (h head) append(b []byte) []byte {
	b = binary.NativeEndian.AppendUint32(b, uint32(h.kind))
	b = binary.NativeEndian.AppendUint32(b, h.tag)
	return binary.NativeEndian.AppendUint64(b, h.endpoint)
}

// helloMessage is the agent's HELLO.
func helloMessage() []byte {
	b := head{kind: typeHello}.append(nil)
	return append(binary.NativeEndian.AppendUint32(b, protocolVersion), 0, 0, 0, 0)
}

// limitBytes are the limits of e, where it has none those of defaults.
func limitBytes(e model.Endpoint, defaults model.VerbsLimits) []byte {
	var l model.Limits
	if e.Limits != nil {
		l = *e.Limits
	}
	v := l.Verbs.Or(defaults)
	limits := make([]byte, limitsLen)
	for i, n := range map[int]uint32{
		1: v.QPs, 2: v.CQs, 3: v.MRs, 8: v.MemoryMiB, 9: v.Messages, 10: e.Planes.Verbs.SpinMicros, 11: kilobits(l.Egress), 12: kilobits(l.Ingress),
	} {
		binary.NativeEndian.PutUint32(limits[4*i:], n)
	}
	if e.Planes.Verbs.Outside {
		binary.NativeEndian.PutUint32(limits[4*13:], 1)
	}
	return limits
}

// kilobits gives a rate in the router's unit; model.MaxRate fits.
func kilobits(r model.Rate) uint32 { return uint32(r / 1000) }

// endpointMessage is ENDPOINT: number is e's at the router.
func endpointMessage(number uint64, e model.Endpoint, defaults model.VerbsLimits) []byte {
	b := head{kind: typeEndpoint, endpoint: number}.append(make([]byte, 0, messageLen))
	b = appendGIDs(b, [2]netip.Addr{e.Addr4(), e.Addr6()})
	b = append(b, limitBytes(e, defaults)...)
	var name [nameLen]byte
	copy(name[:], e.Name) // names are ASCII: cut anywhere, they are UTF-8
	return append(b, name[:]...)
}

// appendGIDs adds those of an endpoint with these addresses.
func appendGIDs(b []byte, addrs [2]netip.Addr) []byte {
	for _, addr := range addrs {
		gid := [gidLen]byte{} // of an address that the endpoint has not
		if addr.IsValid() {
			gid = addr.As16()
		}
		b = append(b, gid[:]...)
	}
	return b
}

// groupsMessage says what groups an endpoint that is elsewhere is in.
func groupsMessage(addrs [2]netip.Addr, groups []netip.Addr) []byte {
	b := appendGIDs(head{kind: typeGroups}.append(nil), addrs)
	for _, g := range groups {
		gid := g.As16()
		b = append(b, gid[:]...)
	}
	return b
}

// connectedMessage answers a CONNECT.
func connectedMessage(asked heard, errno unix.Errno) []byte {
	b := head{kind: typeConnected, tag: asked.tag, endpoint: asked.endpoint}.append(nil)
	return append(binary.NativeEndian.AppendUint32(b, uint32(errno)), 0, 0, 0, 0)
}

// answerMessage answers an ASK.
func answerMessage(asked heard, errno unix.Errno) []byte {
	b := head{kind: typeAnswer, tag: asked.tag, endpoint: asked.endpoint}.append(nil)
	to := asked.to.As16()
	b = append(b, to[:]...)
	return append(binary.NativeEndian.AppendUint32(b, uint32(errno)), 0, 0, 0, 0)
}

// acceptedMessage tells of a connection that an endpoint has got.
func acceptedMessage(number uint64, from, to netip.Addr) []byte {
	b := head{kind: typeAccepted, endpoint: number}.append(nil)
	source, destination := from.As16(), to.As16()
	return append(append(b, source[:]...), destination[:]...)
}

// cardMessage tells of a card.
func cardMessage(number uint64, card model.VerbsCard) []byte {
	b := head{kind: typeCard, endpoint: number}.append(nil)
	b = binary.NativeEndian.AppendUint32(b, uint32(card.LID))
	b = binary.NativeEndian.AppendUint32(b, uint32(len(card.GIDs)))
	for _, gid := range card.GIDs {
		bytes := gid.As16()
		b = append(b, bytes[:]...)
	}
	return b
}

// heard is a message of the router's.
type heard struct {
	head
	// number is the version of a HELLO or the errno of a REFUSED.
	number uint32
	// to is whom a CONNECT is to reach, or an ASK is about.
	to netip.Addr
	// groups is a GROUPS.
	groups []netip.Addr
	// statistics is a STATISTICS.
	statistics statistics
	// file is what came with a RELEASED: the endpoint's listening socket.
	file *os.File
}

var errMalformed = errors.New("malformed message")

// parse reads a message that a router may send.
func parse(b []byte) (m heard, err error) {
	if len(b) < headLen {
		return heard{}, fmt.Errorf("%w: %d bytes", errMalformed, len(b))
	}
	m.kind = messageType(binary.NativeEndian.Uint32(b))
	m.tag = binary.NativeEndian.Uint32(b[4:])
	m.endpoint = binary.NativeEndian.Uint64(b[8:])
	if (m.kind == typeConnect || m.kind == typeAsk) && len(b) == headLen+2*gidLen && m.endpoint != 0 {
		m.to = netip.AddrFrom16([gidLen]byte(b[headLen+gidLen:])).Unmap()
		return m, nil
	}
	if (m.kind == typeDrain || m.kind == typeReleased) && len(b) == headLen && m.tag == 0 && (m.kind == typeReleased) == (m.endpoint != 0) {
		return m, nil
	}
	if m.kind == typeGroups && m.tag == 0 && m.endpoint != 0 {
		return m, m.parseGroups(b[headLen:])
	}
	if m.kind == typeStatistics {
		m.statistics, err = parseStatistics(b[headLen:])
		return m, err
	}
	if m.kind != typeHello && m.kind != typeRefused {
		return heard{}, fmt.Errorf("%w: type %d", errMalformed, m.kind)
	}
	if len(b) != headLen+8 || m.tag != 0 || (m.kind == typeRefused) != (m.endpoint != 0) || binary.NativeEndian.Uint32(b[headLen+4:]) != 0 {
		return heard{}, fmt.Errorf("%w: type %d, %d bytes", errMalformed, m.kind, len(b))
	}
	m.number = binary.NativeEndian.Uint32(b[headLen:])
	return m, nil
}

// refusal gives the error of a REFUSED.
func (m heard) refusal() error { return fmt.Errorf("the router refuses it: %w", unix.Errno(m.number)) }

// parseGroups reads what follows the head of a GROUPS: the GIDs, which are none, and those of
// groups.
func (m *heard) parseGroups(b []byte) error {
	if len(b) < 2*gidLen || len(b)%gidLen != 0 || len(b) > (2+model.MaxVerbsGroups)*gidLen {
		return fmt.Errorf("%w: type %d, %d bytes", errMalformed, m.kind, headLen+len(b))
	}
	for b = b[2*gidLen:]; len(b) > 0; b = b[gidLen:] {
		m.groups = append(m.groups, netip.AddrFrom16([gidLen]byte(b)).Unmap())
	}
	slices.SortFunc(m.groups, netip.Addr.Compare)
	return nil
}
