package verbs

import (
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/layout"
	"heddle.dev/heddle/internal/plane/verbs/protocol"
)

// The messages between agent and router: docs/protocols/verbs-agent.md.

// plain is a message that is its head: of an endpoint, or with 0 of none.
func plain(kind uint32, endpoint uint64) []byte {
	return layout.Append(nil, &protocol.Head{Type: kind, Endpoint: endpoint})
}

// helloMessage is the agent's HELLO.
func helloMessage() []byte {
	return layout.Append(nil, &protocol.Number{Head: protocol.Head{Type: protocol.TypeHello}, Number: protocol.Version})
}

// limitsOf are the limits of e, where it has none those of the node.
func limitsOf(e model.Endpoint, node Config) protocol.Limits {
	var l model.Limits
	if e.Limits != nil {
		l = *e.Limits
	}
	v := l.Verbs.Or(node.Limits)
	limits := protocol.Limits{
		QPs: v.QPs, CQs: v.CQs, MRs: v.MRs, MemoryMib: v.MemoryMiB, SendsPerSecond: v.Messages, SpinUs: spinOf(e, node),
		EgressKbit: kilobits(l.Egress), IngressKbit: kilobits(l.Ingress),
	}
	if e.Planes.Verbs.Outside {
		limits.Outside = 1
	}
	return limits
}

// spinOf is for how many microseconds e's programs look for work before they sleep.
func spinOf(e model.Endpoint, node Config) uint32 {
	return cmp.Or(e.Planes.Verbs.SpinMicros, node.SpinMicros)
}

// kilobits gives a rate in the router's unit; model.MaxRate fits.
func kilobits(r model.Rate) uint32 { return uint32(r / 1000) }

// endpointMessage is ENDPOINT: number is e's at the router.
func endpointMessage(number uint64, e model.Endpoint, node Config) []byte {
	m := protocol.Endpoint{
		Head: protocol.Head{Type: protocol.TypeEndpoint, Endpoint: number}, GIDs: gidsOf(e.Addr4(), e.Addr6()), Limits: limitsOf(e, node),
	}
	copy(m.Name[:], e.Name) // names are ASCII: cut anywhere, they are UTF-8
	return layout.Append(nil, &m)
}

// gidsOf are those of an endpoint with these addresses, which it may not have.
func gidsOf(addr4, addr6 netip.Addr) (gids [2][16]byte) {
	for i, addr := range []netip.Addr{addr4, addr6} {
		if addr.IsValid() {
			gids[i] = addr.As16()
		}
	}
	return gids
}

// appendAddrs appends addresses as GIDs.
func appendAddrs(b []byte, addrs []netip.Addr) []byte {
	for _, a := range addrs {
		gid := a.As16()
		b = append(b, gid[:]...)
	}
	return b
}

// groupsMessage says what groups an endpoint that is elsewhere is in.
func groupsMessage(addrs [2]netip.Addr, groups []netip.Addr) []byte {
	m := protocol.Groups{Head: protocol.Head{Type: protocol.TypeGroups}, GIDs: gidsOf(addrs[0], addrs[1])}
	return appendAddrs(layout.Append(nil, &m), groups)
}

// connectedMessage answers a CONNECT.
func connectedMessage(asked protocol.Head, errno unix.Errno) []byte {
	asked.Type = protocol.TypeConnected
	return layout.Append(nil, &protocol.Number{Head: asked, Number: uint32(errno)})
}

// answerMessage answers an ASK.
func answerMessage(asked heard, errno unix.Errno, marks uint32) []byte {
	m := protocol.Answer{Head: asked.Head, Destination: asked.to.As16(), Number: uint32(errno), Marks: marks}
	m.Head.Type = protocol.TypeAnswer
	return layout.Append(nil, &m)
}

// marksOf are what of e's packets is the operator's, and not its programs'.
func marksOf(e model.Endpoint) (marks uint32) {
	if e.Limits == nil {
		return 0
	}
	if dscp := e.Limits.DSCP; dscp != nil {
		marks |= protocol.MarkDSCP | uint32(*dscp)
	}
	if e.Limits.Priority != model.PriorityOwn {
		marks |= protocol.MarkPriority
	}
	return marks
}

// acceptedMessage tells of a connection that an endpoint has got.
func acceptedMessage(number uint64, from, to netip.Addr) []byte {
	m := protocol.Ends{Head: protocol.Head{Type: protocol.TypeAccepted, Endpoint: number}, Source: from.As16(), Destination: to.As16()}
	return layout.Append(nil, &m)
}

// cardMessage tells of a card.
func cardMessage(number uint64, card model.VerbsCard) []byte {
	m := protocol.Card{Head: protocol.Head{Type: protocol.TypeCard, Endpoint: number}, LID: uint32(card.LID), Count: uint32(len(card.GIDs))}
	return appendAddrs(layout.Append(nil, &m), card.GIDs)
}

// heard is a message of the router's.
type heard struct {
	protocol.Head
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

// parse reads a message that a router may send.
func parse(b []byte) (m heard, err error) {
	var rest []byte
	if m.Head, rest, err = layout.Take[protocol.Head](b); err != nil {
		return heard{}, err
	}
	ofOne, asks := m.Endpoint != 0, false // whether it is of an endpoint, and whether it is to be answered
	switch m.Type {
	case protocol.TypeConnect, protocol.TypeAsk:
		var ends protocol.Ends
		ends, err = layout.Parse[protocol.Ends](b)
		m.to, asks = netip.AddrFrom16(ends.Destination).Unmap(), true
	case protocol.TypeGroups:
		err = m.parseGroups(b)
	case protocol.TypeStatistics:
		m.statistics, err = parseStatistics(b)
		return m, err
	case protocol.TypeHello, protocol.TypeRefused:
		var n protocol.Number
		n, err = layout.Parse[protocol.Number](b)
		if m.number = n.Number; n.Reserved != 0 {
			err = fmt.Errorf("%w: type %d, with what is reserved", layout.ErrMalformed, m.Type)
		}
		ofOne = ofOne == (m.Type == protocol.TypeRefused)
	case protocol.TypeDrain, protocol.TypeReleased:
		ofOne = ofOne == (m.Type == protocol.TypeReleased) && len(rest) == 0
	default:
		return heard{}, fmt.Errorf("%w: type %d", layout.ErrMalformed, m.Type)
	}
	if err == nil && (!ofOne || m.Tag != 0 && !asks) {
		err = fmt.Errorf("%w: type %d of endpoint %d with tag %d, %d bytes", layout.ErrMalformed, m.Type, m.Endpoint, m.Tag, len(b))
	}
	return m, err
}

// refusal gives the error of a REFUSED.
func (m heard) refusal() error { return fmt.Errorf("the router refuses it: %w", unix.Errno(m.number)) }

// parseGroups reads a GROUPS: GIDs, which are none, and those of groups.
func (m *heard) parseGroups(b []byte) error {
	_, rest, err := layout.Take[protocol.Groups](b)
	if err != nil {
		return err
	}
	if len(rest)%16 != 0 || len(rest) > protocol.GroupsMax*16 {
		return fmt.Errorf("%w: type %d, %d bytes", layout.ErrMalformed, m.Type, len(b))
	}
	for ; len(rest) > 0; rest = rest[16:] {
		m.groups = append(m.groups, netip.AddrFrom16([16]byte(rest)).Unmap())
	}
	slices.SortFunc(m.groups, netip.Addr.Compare)
	return nil
}
