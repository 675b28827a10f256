package model

import (
	"fmt"
	"net/netip"
)

// IPv6Underlay is how other nodes reach one whose address on the network that joins them is an IPv6
// one. With it, the node's Underlay is an inner address, which sockets and programs know; packets
// have it within nodes only (bpf/tc/wire.h). The zero value: the node's Underlay is what others
// send to.
type IPv6Underlay struct {
	Address netip.Addr `json:"address"`
	// Prefix holds the inner addresses of all nodes.
	Prefix netip.Prefix `json:"prefix"`
}

// CheckUnderlay6 reports why a node cannot be reached by IPv6 address a.
func CheckUnderlay6(a netip.Addr) error {
	switch {
	case !a.Is6() || a.Is4In6() || a.Zone() != "" || a.IsUnspecified() || a.IsMulticast() || a.IsLoopback():
		return fmt.Errorf("address %s: want a unicast IPv6 address, without a zone, of the device that leads to the other nodes", a)
	case a.IsLinkLocalUnicast():
		return fmt.Errorf("address %s: a link-local address is not the same device's on all nodes; give a unique local (fd00::/8) or global one", a)
	}
	return nil
}

// Validate checks the record of a node whose inner address is inner.
func (u IPv6Underlay) Validate(inner netip.Addr) error {
	if err := ValidateInner(u.Prefix); err != nil {
		return err
	}
	if err := CheckUnderlay6(u.Address); err != nil {
		return err
	}
	if !u.Prefix.Contains(inner) || inner == u.Prefix.Addr() {
		return fmt.Errorf("underlay %s: want an address in %s", inner, u.Prefix)
	}
	return nil
}

// Translated reports whether what is sent to the node's Underlay is translated to its IPv6 address.
func (n Node) Translated() bool { return n.IPv6 != IPv6Underlay{} }

// Inner gives the prefix of the node's inner address, or the zero Prefix if it has none.
func (n Node) Inner() netip.Prefix {
	if n.Encrypts() {
		return n.WireGuard.Prefix
	}
	return n.IPv6.Prefix
}

// Outer is the node's address on the network that joins the nodes. It is Underlay, unless that is
// an inner address.
func (n Node) Outer() netip.Addr {
	switch {
	case n.Encrypts():
		return n.WireGuard.Endpoint.Addr()
	case n.Translated():
		return n.IPv6.Address
	}
	return n.Underlay
}

// VTEP is where other nodes send VXLAN to.
func (n Node) VTEP() netip.Addr {
	if n.Translated() {
		return n.IPv6.Address
	}
	return n.Underlay
}
