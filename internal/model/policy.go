package model

import (
	"fmt"
	"net/netip"
)

// Verdict is what policy says of a new connection or datagram. The numbers are those of enum
// heddle_verdict in bpf/include/abi/policy.h.
type Verdict uint8

// Verdicts. Of two that meet in one connection, what its source may send and what its destination
// may receive, the greater holds (see Worse).
const (
	VerdictAllow  Verdict = 0
	VerdictReject Verdict = 1 // the sender is told: ECONNREFUSED, or an ICMP error
	VerdictDrop   Verdict = 2 // the sender hears nothing
)

var verdictNames = [...]string{"allow", "reject", "drop"}

// String gives "allow", "reject" or "drop".
func (v Verdict) String() string {
	if int(v) < len(verdictNames) {
		return verdictNames[v]
	}
	return fmt.Sprintf("verdict(%d)", uint8(v))
}

// Worse gives the verdict of two that forbids more.
func (v Verdict) Worse(w Verdict) Verdict { return max(v, w) }

// Protocol is an IP protocol number, as policy tells protocols apart: ICMPv6 counts as ICMP, and
// what is none of the three named here is ProtocolOther.
type Protocol uint8

// Protocols.
const (
	ProtocolOther Protocol = 0
	ProtocolICMP  Protocol = 1
	ProtocolTCP   Protocol = 6
	ProtocolUDP   Protocol = 17
)

// HasPorts reports whether the protocol's rules may name ports.
func (p Protocol) HasPorts() bool { return p == ProtocolTCP || p == ProtocolUDP }

// Class stands for all addresses that the rules of a network treat alike. It has a meaning on one
// node only, and only until that node's agent compiles the rules anew from nothing.
type Class uint32

// ClassNone is the class of every address that no entry of a PolicyTables names. No rule selects it
// and none is selected by it: only the defaults of the other end count.
const ClassNone Class = 0

// ClassInfo says what holds for an address of a class where no pair says otherwise.
type ClassInfo struct {
	Class Class
	// Egress is for what the address sends, Ingress for what it receives.
	Egress, Ingress Verdict
}

// ClassPair is the source and the destination of a connection.
type ClassPair struct{ From, To Class }

// PortVerdict is the verdict on one range of destination ports of a protocol. Protocols without
// ports have the range 0-65535.
type PortVerdict struct {
	Protocol    Protocol
	First, Last uint16
	Verdict     Verdict
}

// PairVerdict is the verdict on connections of a pair, both directions' rules taken together: the
// Worse of what From may send to To and of what To may receive from From.
type PairVerdict struct {
	// Default is for what Ports does not name.
	Default Verdict
	// Ports are disjoint, sorted by Protocol and First, and differ from Default.
	Ports []PortVerdict
}

// PolicyTables are the compiled rules of a network, as one node needs them: of pairs only those
// that have an endpoint of the node at one end. The verdict on a connection from address a to port
// p of address b is found so: the classes of a and b (ByAddr, else the longest match in ByPrefix,
// else ClassNone with both verdicts allow); then the pair of the classes, if it is in Pairs; else
// the Worse of a's Egress and b's Ingress. All zero: everything is allowed.
type PolicyTables struct {
	ByAddr   map[netip.Addr]ClassInfo   // overlay addresses, both families; and what else is one address
	ByPrefix map[netip.Prefix]ClassInfo // both families
	Pairs    map[ClassPair]PairVerdict
}

// PolicyChange turns the tables of a node into the next ones. A datapath that applies it MUST not,
// at any moment in between, allow what both the old and the new tables forbid, nor forbid what both
// allow.
type PolicyChange struct {
	// Reset says that the datapath shall forget what is not in this change: Set holds whole tables.
	Reset bool
	Set   PolicyTables
	// Delete names entries that are gone. A class whose number is in no entry any more may be used
	// anew by a later change.
	DeleteAddrs    []netip.Addr
	DeletePrefixes []netip.Prefix
	DeletePairs    []ClassPair
}
