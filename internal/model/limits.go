package model

import (
	"cmp"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Rate is a speed in bits a second; 0 stands for no limit. A cap counts the bytes of IP packets as
// the kernel has them before it cuts them into segments, so of a TCP stream it is the payload
// within a few per cent.
type Rate uint64

// MinRate and MaxRate bound what can be asked for: slower, one packet of the kernel's takes
// seconds; faster, nothing is shaped.
const (
	MinRate Rate = 100_000
	MaxRate Rate = 1_000_000_000_000
)

// rateUnits are tc's, longest suffix first.
var rateUnits = []struct {
	suffix string
	bits   float64
}{{"tbit", 1e12}, {"gbit", 1e9}, {"mbit", 1e6}, {"kbit", 1e3}, {"bit", 1}}

// ParseRate reads a number with one of the units bit, kbit, mbit, gbit and tbit (powers of 1000),
// such as "100mbit" or "2.5gbit". "none" is 0: no limit.
func ParseRate(s string) (Rate, error) {
	if s == "none" {
		return 0, nil
	}
	for _, u := range rateUnits {
		number, ok := strings.CutSuffix(s, u.suffix)
		if !ok {
			continue
		}
		n, err := strconv.ParseFloat(number, 64)
		if err != nil || !(n > 0) || n*u.bits > float64(MaxRate) {
			break
		}
		r := Rate(math.Round(n * u.bits))
		return r, r.Validate()
	}
	return 0, fmt.Errorf("%.40q is no rate: want a number and bit, kbit, mbit, gbit or tbit, from %v to %v, or none", s, MinRate, MaxRate)
}

// String gives what ParseRate reads.
func (r Rate) String() string {
	if r == 0 {
		return "none"
	}
	for _, u := range rateUnits {
		if v := float64(r) / u.bits; v >= 1 {
			return strconv.FormatFloat(v, 'f', -1, 64) + u.suffix
		}
	}
	return "none"
}

// Validate reports a rate that is out of range.
func (r Rate) Validate() error {
	if r != 0 && (r < MinRate || r > MaxRate) {
		return fmt.Errorf("%d bits a second: want 0 for none, or %v to %v", uint64(r), MinRate, MaxRate)
	}
	return nil
}

// Priority is the class of an endpoint's packets among those that wait for one device of the node.
type Priority string

// Priorities. PriorityOwn leaves to the container's programs what they may choose (SO_PRIORITY up
// to 6, IP_TOS).
const (
	PriorityOwn    Priority = ""
	PriorityHigh   Priority = "high"
	PriorityNormal Priority = "normal"
	PriorityLow    Priority = "low"
)

// MaxDSCP is the largest differentiated services code point.
const MaxDSCP = 63

// Limits are what the operator allows one endpoint. The zero value is no limit at all. Traffic
// within the container, over its loopback or to its own address, has none.
type Limits struct {
	// Egress and Ingress cap what the endpoint sends and receives, all connections and datagrams
	// together.
	Egress  Rate `json:"egress_bps,omitempty"`
	Ingress Rate `json:"ingress_bps,omitempty"`
	// ConnectionEgress and ConnectionIngress cap each of its TCP connections. Beyond some 250 at a
	// time, connections share.
	ConnectionEgress  Rate `json:"connection_egress_bps,omitempty"`
	ConnectionIngress Rate `json:"connection_ingress_bps,omitempty"`
	// Priority is the class of what the endpoint sends.
	Priority Priority `json:"priority,omitempty"`
	// DSCP is written into what the endpoint sends; nil leaves what its programs set.
	DSCP *uint8 `json:"dscp,omitempty"`
	// Verbs are quotas of its RDMA device, if it has one.
	Verbs VerbsLimits `json:"verbs,omitzero"`
}

// VerbsLimits bound what an endpoint's programs may have of the verbs plane, all together. 0 stands
// for what the node's agent was told for all endpoints, or the router's own default.
type VerbsLimits struct {
	QPs uint32 `json:"qps,omitempty"`
	CQs uint32 `json:"cqs,omitempty"`
	MRs uint32 `json:"mrs,omitempty"`
	// MemoryMiB bounds the memory that is shared with the router: rings and queues.
	MemoryMiB uint32 `json:"memory_mib,omitempty"`
	// Messages are send requests a second.
	Messages uint32 `json:"messages_per_second,omitempty"`
}

// Or gives the limits of l, those of other where l has none.
func (l VerbsLimits) Or(other VerbsLimits) VerbsLimits {
	return VerbsLimits{cmp.Or(l.QPs, other.QPs), cmp.Or(l.CQs, other.CQs), cmp.Or(l.MRs, other.MRs),
		cmp.Or(l.MemoryMiB, other.MemoryMiB), cmp.Or(l.Messages, other.Messages)}
}

// Equal reports whether two are the same.
func (l Limits) Equal(other Limits) bool {
	if (l.DSCP == nil) != (other.DSCP == nil) || l.DSCP != nil && *l.DSCP != *other.DSCP {
		return false
	}
	l.DSCP = other.DSCP
	return l == other
}

// IsZero reports whether there is no limit.
func (l Limits) IsZero() bool { return l == Limits{} }

// Shapes reports whether some rate is capped, as opposed to packets only being marked.
func (l Limits) Shapes() bool {
	return l.Egress|l.Ingress|l.ConnectionEgress|l.ConnectionIngress != 0
}

// LimitUse is what an endpoint's caps let through and what they dropped, since the cap of that kind
// was set.
type LimitUse struct {
	Endpoint string   `json:"endpoint"`
	Limits   Limits   `json:"limits"`
	Egress   QueueUse `json:"egress"`
	Ingress  QueueUse `json:"ingress"`
}

// QueueUse counts what waited in the queues of one direction.
type QueueUse struct {
	Bytes        uint64 `json:"bytes"`         // sent on
	Packets      uint64 `json:"packets"`       // sent on
	Dropped      uint64 `json:"dropped"`       // packets for which there was no room
	BacklogBytes uint64 `json:"backlog_bytes"` // waiting now
}

// Add adds what waited elsewhere.
func (u *QueueUse) Add(other QueueUse) {
	u.Bytes += other.Bytes
	u.Packets += other.Packets
	u.Dropped += other.Dropped
	u.BacklogBytes += other.BacklogBytes
}

// LimitError says which field of Limits is wrong, by its JSON name.
type LimitError struct {
	Field, Message string
}

// Error gives field and message.
func (e *LimitError) Error() string { return e.Field + ": " + e.Message }

// Validate reports the first wrong field, as a *LimitError.
func (l Limits) Validate() error {
	for _, f := range []struct {
		name string
		rate Rate
	}{
		{"egress_bps", l.Egress}, {"ingress_bps", l.Ingress},
		{"connection_egress_bps", l.ConnectionEgress}, {"connection_ingress_bps", l.ConnectionIngress},
	} {
		if err := f.rate.Validate(); err != nil {
			return &LimitError{f.name, err.Error()}
		}
	}
	switch l.Priority {
	case PriorityOwn, PriorityHigh, PriorityNormal, PriorityLow:
	default:
		return &LimitError{"priority", fmt.Sprintf("%.40q: want high, normal or low", string(l.Priority))}
	}
	if l.DSCP != nil && *l.DSCP > MaxDSCP {
		return &LimitError{"dscp", fmt.Sprintf("%d: want 0 to %d", *l.DSCP, MaxDSCP)}
	}
	return nil
}
