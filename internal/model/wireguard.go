package model

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net/netip"
)

// PublicKey is a public key of Curve25519, as WireGuard has it. The zero key is none.
type PublicKey [32]byte

// IsZero reports whether k is no key.
func (k PublicKey) IsZero() bool { return k == PublicKey{} }

// String gives the key in base64, as wg(8) does.
func (k PublicKey) String() string { return base64.StdEncoding.EncodeToString(k[:]) }

// MarshalText implements encoding.TextMarshaler.
func (k PublicKey) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler. A key has one spelling.
func (k *PublicKey) UnmarshalText(text []byte) error {
	raw, err := base64.StdEncoding.Strict().DecodeString(string(text))
	if err != nil || len(raw) != len(k) || PublicKey(raw).String() != string(text) { // a decoder skips new lines
		return fmt.Errorf("public key %.60q: want 32 bytes in base64", text)
	}
	*k = PublicKey(raw)
	return nil
}

// WireGuardNode is how a node encrypts what it and others send each other. With it, the node's
// Underlay is the inner address: what goes there is encrypted on its way. The zero value: the node
// does not encrypt.
type WireGuardNode struct {
	// Endpoint is where the node takes encrypted packets: its address on the network that joins the
	// nodes, and a UDP port.
	Endpoint netip.AddrPort `json:"endpoint"`
	// Prefix holds the inner addresses of all nodes.
	Prefix netip.Prefix `json:"prefix"`
	// Key is the node's public key, Next the one that it is about to take: both are accepted.
	Key  PublicKey `json:"public_key"`
	Next PublicKey `json:"next_key,omitzero"`
}

// Least and greatest length of WireGuardNode.Prefix, in bits.
const (
	minInnerBits = 8
	maxInnerBits = 29
)

// ValidateInner checks a prefix of inner addresses.
func ValidateInner(p netip.Prefix) error {
	if !p.IsValid() || !p.Addr().Is4() || p != p.Masked() || p.Bits() < minInnerBits || p.Bits() > maxInnerBits ||
		p.Addr().IsMulticast() || p.Addr().IsLoopback() || p.Overlaps(MirrorRange) {
		return fmt.Errorf("prefix %s: want an IPv4 prefix of %d to %d bits that is in use nowhere, such as 100.72.0.0/16", p, minInnerBits, maxInnerBits)
	}
	return nil
}

// Validate checks the record of a node whose inner address is inner.
func (w WireGuardNode) Validate(inner netip.Addr) error {
	if err := ValidateInner(w.Prefix); err != nil {
		return err
	}
	switch {
	case !w.Endpoint.IsValid() || w.Endpoint.Port() == 0 || w.Endpoint.Addr().IsUnspecified() || w.Endpoint.Addr().IsMulticast() || w.Endpoint.Addr().Is4In6():
		return fmt.Errorf("endpoint %s: want a unicast address and a port", w.Endpoint)
	case w.Prefix.Contains(w.Endpoint.Addr()):
		return fmt.Errorf("endpoint %s: is in %s, whose addresses are reached through it", w.Endpoint, w.Prefix)
	case !w.Prefix.Contains(inner) || inner == w.Prefix.Addr():
		return fmt.Errorf("underlay %s: want an address in %s", inner, w.Prefix)
	case w.Key.IsZero():
		return errors.New("public_key: missing")
	case w.Key == w.Next:
		return errors.New("next_key: is public_key")
	}
	return nil
}

// Encrypts reports whether what is sent to the node's Underlay is encrypted.
func (n Node) Encrypts() bool { return n.WireGuard != WireGuardNode{} }

// PlainReason says why two nodes do not send each other anything.
type PlainReason string

// The reasons.
const (
	PeerPlain    PlainReason = "peer_plain"    // this node encrypts, the other does not
	SelfPlain    PlainReason = "self_plain"    // the other way round
	OtherPrefix  PlainReason = "other_prefix"  // their inner addresses are of different prefixes
	SameKey      PlainReason = "same_key"      // they have the same key: one's state directory was copied
	SameEndpoint PlainReason = "same_endpoint" // both say that they are at the same address
	PeerFamily   PlainReason = "peer_family"   // the other's underlay is IPv4, this node's IPv6
	SelfFamily   PlainReason = "self_family"   // the other way round
)

// Unfit says why self and peer cannot communicate, or "".
func (n Node) Unfit(peer Node) PlainReason {
	a, b := n.WireGuard, peer.WireGuard
	switch {
	case !n.Encrypts() && !peer.Encrypts():
		return n.unfitPlain(peer)
	case !peer.Encrypts():
		return PeerPlain
	case !n.Encrypts():
		return SelfPlain
	case a.Prefix != b.Prefix:
		return OtherPrefix
	case a.Key == b.Key:
		return SameKey
	case a.Endpoint == b.Endpoint:
		return SameEndpoint
	}
	return ""
}

// unfitPlain is Unfit for two nodes that do not encrypt.
func (n Node) unfitPlain(peer Node) PlainReason {
	switch {
	case !n.Translated() && !peer.Translated():
		return ""
	case !peer.Translated():
		return PeerFamily
	case !n.Translated():
		return SelfFamily
	case n.IPv6.Prefix != peer.IPv6.Prefix:
		return OtherPrefix
	case n.IPv6.Address == peer.IPv6.Address:
		return SameEndpoint
	}
	return ""
}
