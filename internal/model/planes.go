package model

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
)

// EndpointPlanes is what each plane keeps in an endpoint's record.
type EndpointPlanes struct {
	TCP   TCPEndpoint `json:"tcp"`
	Verbs VerbsRecord `json:"verbs,omitzero"`
}

// VerbsRecord is what the verbs plane keeps of an endpoint.
type VerbsRecord struct {
	VerbsEndpoint
	// Groups are the multicast groups that its queue pairs have joined, sorted, as far as they are
	// known.
	Groups []netip.Addr `json:"groups,omitempty"`
}

// MaxVerbsGroups is the most groups that an endpoint can be in.
const MaxVerbsGroups = 256

// Validate checks what a node says of an endpoint.
func (v VerbsRecord) Validate() error {
	if v.SpinMicros > MaxSpinMicros {
		return fmt.Errorf("spin_us %d: want at most %d", v.SpinMicros, MaxSpinMicros)
	}
	if len(v.Groups) > MaxVerbsGroups {
		return fmt.Errorf("groups: %d, want at most %d", len(v.Groups), MaxVerbsGroups)
	}
	for _, g := range v.Groups {
		if !g.IsMulticast() || g.Is4In6() || g.Zone() != "" {
			return fmt.Errorf("groups: %s: want a multicast address", g)
		}
	}
	return nil
}

// VerbsEndpoint is what an endpoint is to have of the verbs plane.
type VerbsEndpoint struct {
	// Wanted says that the endpoint's containers are to have an RDMA device.
	Wanted bool `json:"wanted,omitempty"`
	// SpinMicros is for how many microseconds their programs, and the router for them, may look for
	// work before they sleep; 0: for as many as the node says.
	SpinMicros uint32 `json:"spin_us,omitempty"`
	// Outside says that they may have peers without Heddle, by the node's card.
	Outside bool `json:"outside,omitempty"`
}

// Validate checks the record of an endpoint whose TCP is intercepted or not.
func (v VerbsEndpoint) Validate(intercepted bool) error {
	switch {
	case v.SpinMicros > MaxSpinMicros:
		return fmt.Errorf("spin_us %d: want at most %d microseconds", v.SpinMicros, MaxSpinMicros)
	case v.SpinMicros > 0 && !v.Wanted:
		return fmt.Errorf("spin_us %d: want it with wanted only", v.SpinMicros)
	case v.Outside && !v.Wanted:
		return errors.New("outside: want it with wanted only")
	case v.Wanted && !intercepted:
		return errors.New("is for intercepted endpoints: queue pairs communicate by their TCP")
	}
	return nil
}

// MaxSpinMicros is the most that SpinMicros may be: a second.
const MaxSpinMicros = 1_000_000

// TCPEndpoint is what the TCP plane keeps of an endpoint.
type TCPEndpoint struct {
	// Intercepted says that the endpoint's TCP sockets are made in the node's network namespace.
	// Peers send connections for an endpoint that is not intercepted over the overlay.
	Intercepted bool `json:"intercepted"`
}

// NodePlanes is what each plane keeps in a node's record.
type NodePlanes struct {
	TCP   TCPNode   `json:"tcp"`
	Verbs VerbsNode `json:"verbs,omitzero"`
}

// VerbsNode is what the verbs plane keeps of a node.
type VerbsNode struct {
	// Card is the RDMA card that pairs of queues go by between nodes; nil: none, or nobody knows
	// where.
	Card *VerbsCard `json:"card,omitempty"`
}

// MaxCardGIDs is the most that are told of a card.
const MaxCardGIDs = 8

// VerbsCard is where other nodes reach a card. Pairs believe no other place.
type VerbsCard struct {
	GIDs []netip.Addr `json:"gids"`
	LID  uint16       `json:"lid,omitempty"`
}

// Validate checks what a node says of its card.
func (c VerbsCard) Validate() error {
	if len(c.GIDs) == 0 || len(c.GIDs) > MaxCardGIDs {
		return fmt.Errorf("%d gids: want 1 to %d", len(c.GIDs), MaxCardGIDs)
	}
	for _, gid := range c.GIDs {
		if !gid.Is6() || gid.Zone() != "" || gid.IsUnspecified() {
			return fmt.Errorf("gid %v: want an IPv6 address, also of IPv4", gid)
		}
	}
	return nil
}

// TCPNode is what the TCP plane keeps of a node.
type TCPNode struct {
	// DirectPorts is the node's direct port range. The zero range means that the node takes no
	// direct connections (no agent with a datapath); the overlay carries everything to it.
	DirectPorts PortRange `json:"direct_ports"`
	// AnswersProbes says that probes of the direct path are answered
	// (docs/protocols/syn-option.md). Nodes of earlier builds do not.
	AnswersProbes bool `json:"answers_probes,omitempty"`
	// Firewall says that the node's forward chains are to see connections of its containers. Nodes
	// of earlier builds do not heed it.
	Firewall bool `json:"firewall,omitempty"`
	// AnswersFirewall says that probes of the forward chains are answered here, and reach no
	// program (docs/protocols/syn-option.md). Nodes of earlier builds do not.
	AnswersFirewall bool `json:"answers_firewall,omitempty"`
}

// Records had the members of the TCP plane between those of the core before there were planes:
// revision 1 of docs/protocols/store-schema.md. They are written at both places and read at the old
// one where there is no "planes", so that builds of either revision read what the other wrote.

type (
	endpointCore Endpoint // without its methods
	nodeCore     Node
)

// EndpointMembers has the members of an endpoint as they are written. A type whose JSON has these
// and others embeds it, and not Endpoint, whose MarshalJSON would leave out the others.
type EndpointMembers struct {
	endpointCore
	TCPEndpoint
}

// Members gives them.
func (e Endpoint) Members() EndpointMembers { return EndpointMembers{endpointCore(e), e.Planes.TCP} }

// MarshalJSON writes TCP's members also where readers of revision 1 look for them.
func (e Endpoint) MarshalJSON() ([]byte, error) { return json.Marshal(e.Members()) }

// UnmarshalJSON reads an endpoint of either revision.
func (e *Endpoint) UnmarshalJSON(b []byte) error {
	var v struct {
		endpointCore
		TCPEndpoint
		Planes *EndpointPlanes `json:"planes"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	*e = Endpoint(v.endpointCore)
	e.Planes = EndpointPlanes{TCP: v.TCPEndpoint}
	if v.Planes != nil {
		e.Planes = *v.Planes
	}
	return nil
}

// NodeMembers has the members of a node as they are written, as EndpointMembers has an endpoint's.
type NodeMembers struct {
	nodeCore
	TCPNode
}

// Members gives them.
func (n Node) Members() NodeMembers { return NodeMembers{nodeCore(n), n.Planes.TCP} }

// MarshalJSON writes TCP's members also where readers of revision 1 look for them.
func (n Node) MarshalJSON() ([]byte, error) { return json.Marshal(n.Members()) }

// UnmarshalJSON reads a node of either revision.
func (n *Node) UnmarshalJSON(b []byte) error {
	var v struct {
		nodeCore
		TCPNode
		Planes *NodePlanes `json:"planes"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	*n = Node(v.nodeCore)
	n.Planes = NodePlanes{TCP: v.TCPNode}
	if v.Planes != nil {
		n.Planes = *v.Planes
	}
	return nil
}
