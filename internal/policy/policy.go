// Package policy says which connections a network's rules allow: the documents' model, a plain
// evaluator (Decide, Explain) and a compiler that keeps the tables of one node (model.PolicyTables)
// in step with endpoints and rules. It does no I/O. What the rules mean is written for operators in
// docs/howto/policy.md.
package policy

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"heddle.dev/heddle/internal/model"
)

// Policy is one document: what endpoints that it selects may receive and send. Policies are
// independent of each other and of any order. For one endpoint and direction, of all rules of all
// policies that select it and speak of the direction: a deny that matches beats every allow, an
// allow that matches beats every default, and of the defaults deny beats allow. An endpoint that no
// policy selects for a direction is open in it.
type Policy struct {
	// Name is unique in the network: see ValidateName.
	Name string `json:"name"`
	// Source is who keeps it: SourceKubernetes, or empty for an operator. It has no influence on
	// traffic.
	Source string `json:"source,omitempty"`
	// Subject says whom the policy is about.
	Subject Subject `json:"subject"`
	// Ingress is about connections to the subject, Egress about its own. Nil: the policy does not
	// speak of them.
	Ingress *Direction `json:"ingress,omitempty"`
	Egress  *Direction `json:"egress,omitempty"`
}

// SourceKubernetes is the Source of policies and namespaces that heddle-kube keeps as the API
// server has them. It changes and deletes no others.
const SourceKubernetes = "kubernetes"

// Subject selects endpoints. All that is set has to hold; without anything set it selects every
// endpoint.
type Subject struct {
	Selector
	// Prefixes: one of the endpoint's addresses is in one of them. Empty: any address.
	Prefixes []netip.Prefix `json:"prefixes,omitempty"`
}

// Selector selects endpoints by their labels and by their namespace. The zero Selector selects
// every endpoint.
type Selector struct {
	Requirements
	Namespace *NamespaceSelector `json:"namespace,omitempty"`
}

// NamespaceSelector selects namespaces by name and by labels. Every namespace has the label
// NamespaceNameLabel.
type NamespaceSelector struct {
	// Name is the namespace's; empty: any.
	Name string `json:"name,omitempty"`
	Requirements
}

// Requirements are what a set of labels has to meet: all of them.
type Requirements struct {
	// Labels have to be there with exactly these values.
	Labels      map[string]string `json:"labels,omitempty"`
	Expressions []Expression      `json:"expressions,omitempty"`
}

// Expression is one requirement on one label.
type Expression struct {
	Key      string   `json:"key"`
	Operator Operator `json:"operator"`
	// Values are what In and NotIn compare with; none for the others.
	Values []string `json:"values,omitempty"`
}

// Operator is how an Expression compares.
type Operator string

// Operators, with the meaning that Kubernetes gives them: NotIn holds for a label that is not
// there, too.
const (
	In        Operator = "in"
	NotIn     Operator = "not_in"
	Exists    Operator = "exists"
	NotExists Operator = "not_exists"
)

// Direction is what a policy says of one direction of its subject's connections.
type Direction struct {
	// Default holds where no rule of any policy matches; DefaultNone leaves that to other policies.
	Default Default `json:"default,omitempty"`
	// Deny is what a denied sender is told: Reject if empty.
	Deny  Deny   `json:"deny,omitempty"`
	Rules []Rule `json:"rules,omitempty"`
}

// Default is the verdict on what no rule matches.
type Default string

// Defaults.
const (
	DefaultNone  Default = ""
	DefaultAllow Default = "allow"
	DefaultDeny  Default = "deny"
)

// Deny says what becomes of what is denied.
type Deny string

// Denials. Where several deny, Drop beats Reject.
const (
	Reject Deny = "reject" // the sender is told: ECONNREFUSED, or an ICMP error
	Drop   Deny = "drop"   // the sender hears nothing
)

func (d Deny) verdict() model.Verdict {
	if d == Drop {
		return model.VerdictDrop
	}
	return model.VerdictReject
}

// Action is what a rule does with what it matches.
type Action string

// Actions.
const (
	Allow Action = "allow"
	Block Action = "deny"
)

// Rule matches connections with one of its peers on one of its ports.
type Rule struct {
	// Name is for people, in Explain; may be empty.
	Name   string `json:"name,omitempty"`
	Action Action `json:"action"`
	// Deny overrides the direction's for a rule that denies.
	Deny Deny `json:"deny,omitempty"`
	// Peers are the other end. Empty: any.
	Peers []Peer `json:"peers,omitempty"`
	// Ports are destination ports, in both directions. Empty: any port of any protocol.
	Ports []Ports `json:"ports,omitempty"`
}

// Peer is a set of addresses: exactly one of Endpoints, Prefix and Entity is set.
type Peer struct {
	// Endpoints are endpoints of the network.
	Endpoints *Selector `json:"endpoints,omitempty"`
	// Prefix is all of its addresses, whosoever they are, but for those in Except. Of an overlay
	// address both forms, IPv4 and IPv6, are in a prefix if one is.
	Prefix netip.Prefix   `json:"prefix,omitzero"`
	Except []netip.Prefix `json:"except,omitempty"`
	Entity Entity         `json:"entity,omitempty"`
}

// Entity is a set of addresses with a name.
type Entity string

// Entities.
const (
	EntityNodes     Entity = "node"      // every node's own addresses: underlay, gateways, and what else the own node has; see EntityHost
	EntityHost      Entity = "host"      // those of the node that the subject lives on, multicast and broadcast, which it alone hears
	EntityEndpoints Entity = "endpoints" // every endpoint of the network
	EntityOutside   Entity = "outside"   // none of these, and outside the overlay's pool
)

// Ports is a range of destination ports of a protocol, in host byte order. A protocol without
// ports, or all of its ports, is 0-65535.
type Ports struct {
	Protocol    model.Protocol
	First, Last uint16
}

const lastPort = 1<<16 - 1

var protocolNames = map[string]model.Protocol{"tcp": model.ProtocolTCP, "udp": model.ProtocolUDP, "icmp": model.ProtocolICMP}

// ProtocolName gives the name that documents use for p: "tcp", "udp", "icmp" or "other".
func ProtocolName(p model.Protocol) string {
	for name, q := range protocolNames {
		if p == q {
			return name
		}
	}
	return "other"
}

// ParsePorts reads "tcp/80", "udp/1000-2000", "tcp" or "icmp".
func ParsePorts(s string) (Ports, error) {
	name, rest, hasPort := strings.Cut(s, "/")
	wrong := func(why string) (Ports, error) {
		return Ports{}, fmt.Errorf("ports %.60q: %s: write tcp/80, udp/1000-2000, tcp, udp or icmp", s, why)
	}
	p, ok := protocolNames[name]
	if !ok {
		return wrong("no protocol that rules can name")
	}
	if !hasPort {
		return Ports{p, 0, lastPort}, nil
	}
	if !p.HasPorts() {
		return wrong(name + " has no ports")
	}
	first, last, isRange := strings.Cut(rest, "-")
	if !isRange {
		last = first
	}
	f, err := parsePort(first)
	if err != nil {
		return wrong("want ports 1..65535")
	}
	l, err := parsePort(last)
	if err != nil {
		return wrong("want ports 1..65535")
	}
	if l < f {
		return wrong("the range ends before it begins")
	}
	return Ports{p, f, l}, nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 || strconv.FormatUint(n, 10) != s {
		return 0, fmt.Errorf("port %.20q: want 1..65535", s)
	}
	return uint16(n), nil
}

// String gives the form that ParsePorts reads.
func (p Ports) String() string {
	name := ProtocolName(p.Protocol)
	switch {
	case p.First == 0 && p.Last == lastPort:
		return name
	case p.First == p.Last:
		return fmt.Sprintf("%s/%d", name, p.First)
	}
	return fmt.Sprintf("%s/%d-%d", name, p.First, p.Last)
}

// MarshalText implements encoding.TextMarshaler.
func (p Ports) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *Ports) UnmarshalText(text []byte) (err error) {
	*p, err = ParsePorts(string(text))
	return err
}

// Contains reports whether port of protocol is in the range.
func (p Ports) Contains(protocol model.Protocol, port uint16) bool {
	return p.Protocol == protocol && port >= p.First && port <= p.Last
}

// RuleCount gives the number of rules of both directions.
func (p *Policy) RuleCount() int {
	n := 0
	for _, d := range []*Direction{p.Ingress, p.Egress} {
		if d != nil {
			n += len(d.Rules)
		}
	}
	return n
}
