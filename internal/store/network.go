package store

import (
	"fmt"
	"net/netip"
	"slices"

	"heddle.dev/heddle/internal/model"
)

// Network is the set of parameters all nodes of a network share. The first node sets them for good.
type Network struct {
	// ID tells networks on one underlay apart. It is part of every key.
	ID model.NetworkID `json:"id"`
	// Pool holds the IPv4 overlay prefixes that nodes get theirs from; disjoint.
	Pool []netip.Prefix `json:"pool"`
	// NodePrefixLen is the length of the prefix a node gets from the pool, in bits.
	NodePrefixLen int `json:"node_prefix_len"`
	// Prefix6 is the IPv6 prefix that makes IPv6 addresses of the overlay's IPv4 ones
	// (model.Overlay6). The zero Prefix: the network is IPv4-only.
	Prefix6 netip.Prefix `json:"prefix6,omitzero"`
	// NoPrefix6 wishes for a network without Prefix6, which the zero Prefix as a wish does not. It
	// is not stored.
	NoPrefix6 bool `json:"-"`
	// VNI is the VXLAN network identifier: 1..2^24-1.
	VNI uint32 `json:"vni"`
	// VXLANPort is the UDP port of the overlay devices, in host byte order.
	VXLANPort uint16 `json:"vxlan_port"`
	// Schema is the revision of the schema that every reader of this network must know; 0: the
	// first.
	Schema int `json:"schema,omitempty"`
}

// Schema is the latest revision of docs/protocols/store-schema.md that this build reads and the one
// that it writes. What it writes readers of the first revision understand, too, unless a node
// encrypts or has an IPv6 underlay.
const Schema = 5

// WireGuardSchema is the revision from which on agents know nodes that encrypt. Earlier ones would
// send what is for their inner addresses to whoever routes these.
const WireGuardSchema = 4

// IPv6UnderlaySchema is the revision from which on agents know nodes that are reached by IPv6, in
// the same way.
const IPv6UnderlaySchema = 5

// Defaults for fields of Network that nobody set.
const (
	DefaultNetworkID     model.NetworkID = 1
	DefaultNodePrefixLen int             = 24
	DefaultVXLANPort     uint16          = 4789
	// defaultVNIBase plus the network id is the default VNI, so that networks on one underlay
	// differ.
	defaultVNIBase uint32 = 0x480000
)

// Limits that readers enforce; they keep a hostile or broken store from making agents work without
// end.
const (
	maxPools        = 16
	maxNodePrefixes = 16
	maxVNI          = 1<<24 - 1
)

// DefaultPool is the overlay's address range when nobody set one.
var DefaultPool = netip.MustParsePrefix("10.244.0.0/16")

// WithDefaults fills zero fields. A network is dual-stack unless NoPrefix6 is set.
func (n Network) WithDefaults() Network {
	if n.ID == 0 {
		n.ID = DefaultNetworkID
	}
	if len(n.Pool) == 0 {
		n.Pool = []netip.Prefix{DefaultPool}
	}
	if n.NodePrefixLen == 0 {
		n.NodePrefixLen = DefaultNodePrefixLen
	}
	if !n.Prefix6.IsValid() && !n.NoPrefix6 {
		n.Prefix6 = model.DefaultPrefix6(n.ID)
	}
	if n.VNI == 0 {
		n.VNI = defaultVNIBase + uint32(n.ID)
	}
	if n.VXLANPort == 0 {
		n.VXLANPort = DefaultVXLANPort
	}
	return n
}

// Validate reports the first field that no network may have.
func (n Network) Validate() error {
	if err := n.ID.Validate(); err != nil {
		return err
	}
	if n.NodePrefixLen < minPrefixLen || n.NodePrefixLen > maxPrefixLen {
		return fmt.Errorf("node_prefix_len %d: want %d..%d", n.NodePrefixLen, minPrefixLen, maxPrefixLen)
	}
	if n.Prefix6 != (netip.Prefix{}) {
		if err := model.ValidatePrefix6(n.Prefix6); err != nil {
			return fmt.Errorf("prefix6: %w", err)
		}
		if n.NoPrefix6 {
			return fmt.Errorf("prefix6 %s: asked for, and for none", n.Prefix6)
		}
	}
	if len(n.Pool) == 0 || len(n.Pool) > maxPools {
		return fmt.Errorf("pool: %d prefixes, want 1 to %d", len(n.Pool), maxPools)
	}
	for i, p := range n.Pool {
		if err := validatePrefix(p); err != nil {
			return fmt.Errorf("pool: %w", err)
		}
		if p.Bits() > n.NodePrefixLen {
			return fmt.Errorf("pool %s: has no room for a node prefix of length /%d: use a shorter pool prefix", p, n.NodePrefixLen)
		}
		for _, q := range n.Pool[:i] {
			if p.Overlaps(q) {
				return fmt.Errorf("pool: %s overlaps %s", p, q)
			}
		}
	}
	if n.VNI == 0 || n.VNI > maxVNI {
		return fmt.Errorf("vni %d: want 1..%d", n.VNI, maxVNI)
	}
	if n.VXLANPort == 0 {
		return fmt.Errorf("vxlan_port 0: want 1..65535")
	}
	return CheckSchema(n.Schema)
}

// CheckAgainst compares a caller's wishes n with the parameters in force; zero fields of n wish
// nothing. The error is a *MismatchError.
func (n Network) CheckAgainst(inForce Network) error {
	differ := func(field string, want, have any) error {
		return &MismatchError{Field: field, Want: fmt.Sprint(want), Have: fmt.Sprint(have)}
	}
	switch {
	case n.ID != 0 && n.ID != inForce.ID:
		return differ("id", n.ID, inForce.ID)
	case len(n.Pool) != 0 && !slices.Equal(n.Pool, inForce.Pool):
		return differ("pool", n.Pool, inForce.Pool)
	case n.NodePrefixLen != 0 && n.NodePrefixLen != inForce.NodePrefixLen:
		return differ("node_prefix_len", n.NodePrefixLen, inForce.NodePrefixLen)
	case n.Prefix6.IsValid() && n.Prefix6 != inForce.Prefix6, n.NoPrefix6 && inForce.Prefix6.IsValid():
		return differ("prefix6", prefix6Text(n.Prefix6), prefix6Text(inForce.Prefix6))
	case n.VNI != 0 && n.VNI != inForce.VNI:
		return differ("vni", n.VNI, inForce.VNI)
	case n.VXLANPort != 0 && n.VXLANPort != inForce.VXLANPort:
		return differ("vxlan_port", n.VXLANPort, inForce.VXLANPort)
	}
	return nil
}

// inPool reports whether p lies inside one of the pool's prefixes.
func (n Network) inPool(p netip.Prefix) bool {
	return slices.ContainsFunc(n.Pool, func(q netip.Prefix) bool { return contains(q, p) })
}

// checkAddr6 reports an *AddrOutsideError unless e's IPv6 address is the one that follows from its
// IPv4 address.
func (n Network) checkAddr6(e model.Endpoint) error {
	if a := e.Addr6(); a.IsValid() && a != model.Overlay6(n.Prefix6, e.Addr4()) {
		return &AddrOutsideError{Addr: a, Node: e.Node, Why: fmt.Sprintf("does not follow from %s and prefix6 %s on", e.Addr4(), prefix6Text(n.Prefix6))}
	}
	return nil
}

// prefix6Text spells a wish for Prefix6, or its value.
func prefix6Text(p netip.Prefix) string {
	if !p.IsValid() {
		return "none"
	}
	return p.String()
}
