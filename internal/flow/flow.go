// Package flow says what is told of connections as they come and go: what planes observe, what
// operators see of it, and the filter by which they choose. It is the same in the agent's API, on a
// command line and in a page's address line. No I/O.
package flow

import (
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/model"
)

// Event says what happened to a connection.
type Event string

// The events.
const (
	Open     Event = "open"     // it is established
	Fallback Event = "fallback" // the same, and not on the best path: Reason says why
	End      Event = "end"      // it is over; Error says by what, if not by its programs
	Fail     Event = "fail"     // connect() came to none: refused by the peer, no answer, given up
	Deny     Event = "deny"     // Heddle did not let it be: Reason says why
	Cut      Event = "cut"      // Heddle ended it: Reason says why
)

// Events lists them.
var Events = []Event{Open, Fallback, End, Fail, Deny, Cut}

// RDMA is Flow.Protocol of the connection of a pair of queue pairs, of RDMA-CM, or for datagrams: a
// TCP connection, by which policy judges it.
const RDMA = "rdma"

// Verdict is an event seen from who asks whether somebody may connect.
type Verdict string

// The verdicts.
const (
	Allowed Verdict = "allowed" // open, fallback, end
	Denied  Verdict = "denied"  // deny
	WasCut  Verdict = "cut"     // cut
	Failed  Verdict = "failed"  // fail: allowed, but there was no answer, or the peer refused
)

// Verdicts lists them.
var Verdicts = []Verdict{Allowed, Denied, WasCut, Failed}

// Verdict gives the event's.
func (e Event) Verdict() Verdict {
	switch e {
	case Deny:
		return Denied
	case Cut:
		return WasCut
	case Fail:
		return Failed
	}
	return Allowed
}

// Observation is what a plane saw of a connection of one of the node's endpoints: no names yet.
type Observation struct {
	At    time.Time
	Event Event
	// Connection has the endpoint whose socket it is, addresses as its program sees them, the path,
	// the reason and what was carried. Of a connect that is denied the local address is zero.
	Connection model.Connection
	// Accepted: the peer opened the connection.
	Accepted bool
	// Relayed: it is passed on to the container's own stack, so that what it carried is not known.
	Relayed bool
	// RTT is the smoothed round trip time; 0: none was measured.
	RTT time.Duration
	// Error is the name of the errno by which the kernel ended it, or empty.
	Error string
}

// Flow is an event of a connection as operators see it.
type Flow struct {
	Time    time.Time `json:"time"`
	Node    string    `json:"node"` // where it was seen
	Event   Event     `json:"event"`
	Verdict Verdict   `json:"verdict"`
	// Protocol is "tcp", RDMA, or of packets "udp", "icmp" or "other".
	Protocol string `json:"protocol"`
	// From opened the connection, or tried to.
	From Peer `json:"from"`
	To   Peer `json:"to"`
	// SeenBy says whose socket was observed. Both ends of a connection between intercepted
	// endpoints report it, each on its own node.
	SeenBy Side       `json:"seen_by"`
	Path   model.Path `json:"path,omitempty"`
	// Reason is the name of a model.Reason, ReasonKind its kind.
	Reason     string     `json:"reason,omitempty"`
	ReasonKind model.Kind `json:"reason_kind,omitempty"`
	// Policy is the one that decided, Rule says by which of its rules; both empty without one.
	Policy string `json:"policy,omitempty"`
	Rule   string `json:"rule,omitempty"`
	Error  string `json:"error,omitempty"`
	// Relayed: it was seen between the wire and a container's own stack, so that its counts are not
	// known here. The other end's node tells of them.
	Relayed bool `json:"relayed,omitempty"`
	// BytesSent went from From to To, BytesReceived came back: payload, up to this event.
	BytesSent     uint64 `json:"bytes_sent"`
	BytesReceived uint64 `json:"bytes_received"`
	// Retransmits are segments that the observed socket sent again.
	Retransmits uint32        `json:"retransmits"`
	RTT         time.Duration `json:"rtt_ns,omitempty"`
	// Duration is how long the connection was there; of an end or a cut, and 0 if its opening was
	// not seen.
	Duration time.Duration `json:"duration_ns,omitempty"`
	// Socket is the kernel's cookie of the observed socket: events of one connection on one node
	// share it.
	Socket uint64 `json:"socket,omitempty"`
}

// Side is one end of a flow.
type Side string

// The sides.
const (
	SideFrom Side = "from"
	SideTo   Side = "to"
)

// Peer is one end of a connection.
type Peer struct {
	// Endpoint is its name, empty if the address is no endpoint's.
	Endpoint string `json:"endpoint,omitempty"`
	// Node is that of the endpoint, or whose address it is.
	Node   string            `json:"node,omitempty"`
	Addr   netip.Addr        `json:"addr,omitzero"`
	Port   uint16            `json:"port,omitempty"` // 0: not known
	Labels map[string]string `json:"labels,omitempty"`
}

// AddrPort gives the address and port.
func (p Peer) AddrPort() netip.AddrPort { return netip.AddrPortFrom(p.Addr, p.Port) }

// String gives "name:port" of an endpoint, "node NAME:port" of a node, or the address and port.
func (p Peer) String() string {
	name := p.Endpoint
	if name == "" && p.Node != "" {
		name = "node " + p.Node
	}
	switch {
	case name == "" && !p.Addr.IsValid():
		return "?"
	case name == "" && p.Port != 0:
		return p.AddrPort().String()
	case name == "":
		return p.Addr.String()
	case p.Port == 0:
		return name
	}
	return name + ":" + itoa(p.Port)
}
