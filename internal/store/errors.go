package store

import (
	"errors"
	"fmt"
	"net/netip"

	"heddle.dev/heddle/internal/model"
)

// ErrPoolExhausted says that no prefix of the node's size is free in the pool. Remedy: remove nodes
// that are gone, or make the network with a larger pool or a longer node prefix.
var ErrPoolExhausted = errors.New("address pool exhausted")

// ErrNoNetwork says that nobody has set the network's parameters yet.
var ErrNoNetwork = errors.New("network is not set up in the store: start its first node")

// SchemaError says that something was written for builds that know more than this one.
type SchemaError struct{ Revision int }

// Error implements error.
func (e *SchemaError) Error() string {
	return fmt.Sprintf("schema %d: this build reads schemas up to %d: install here the build that the network's other nodes run", e.Revision, Schema)
}

// CheckSchema reports a *SchemaError for what readers must know a later revision of the schema for;
// 0 is the first.
func CheckSchema(revision int) error {
	if revision < 0 || revision > Schema {
		return &SchemaError{Revision: revision}
	}
	return nil
}

// MismatchError says that a node was started with another value than the network has.
type MismatchError struct {
	Field string // JSON name in Network
	Want  string // what the caller asked for
	Have  string // what is in force
}

// Error implements error.
func (e *MismatchError) Error() string {
	return fmt.Sprintf("network %s: asked for %s, but the network in the store has %s: "+
		"leave it out, or use another network id", e.Field, e.Want, e.Have)
}

// OverlapError says that a node may not have a prefix.
type OverlapError struct {
	Prefix netip.Prefix
	With   string // what it collides with: "10.244.1.0/24 of node n2", "addresses outside pool ..."
}

// Error implements error.
func (e *OverlapError) Error() string {
	return fmt.Sprintf("prefix %s overlaps %s: configure another, or none to get one from the pool", e.Prefix, e.With)
}

// ReadersError says that a node's build does not know of what another one is about to have.
type ReadersError struct {
	Node string
	What string // "encryption", "an IPv6 underlay"
}

// Error implements error.
func (e *ReadersError) Error() string {
	return fmt.Sprintf("node %s has a build that does not know of %s: install this one there first, or remove the node if it is gone (heddle nodes forget %[1]s)", e.Node, e.What)
}

// UnderlayInUseError says that another node is known by an underlay address.
type UnderlayInUseError struct {
	Addr netip.Addr
	Node string // who has it
}

// Error implements error.
func (e *UnderlayInUseError) Error() string {
	return fmt.Sprintf("underlay address %s belongs to node %s: use that node's name, or, if it is gone, `heddle nodes forget %s` on another node", e.Addr, e.Node, e.Node)
}

// PrefixInUseError says that a node cannot give up a prefix because an endpoint has an address in
// it.
type PrefixInUseError struct {
	Node     string
	Addr     netip.Addr
	Endpoint model.EndpointID
}

// Error implements error.
func (e *PrefixInUseError) Error() string {
	return fmt.Sprintf("prefixes of node %s: its endpoint %d has address %s outside the new ones: remove the endpoint first",
		e.Node, e.Endpoint, e.Addr)
}

// UnknownNodeError says that an endpoint's node is not in the store.
type UnknownNodeError struct{ Name string }

// Error implements error.
func (e *UnknownNodeError) Error() string {
	return fmt.Sprintf("node %s is not in the network: join it first", e.Name)
}

// AddrInUseError says that another endpoint of the node holds an address.
type AddrInUseError struct {
	Addr  netip.Addr
	Node  string
	Owner model.EndpointID // 0 if the store does not say who
}

// Error implements error.
func (e *AddrInUseError) Error() string {
	return fmt.Sprintf("address %s is held by endpoint %d of node %s: choose another", e.Addr, e.Owner, e.Node)
}

// AddrOutsideError says that an endpoint's address is not one its node can give.
type AddrOutsideError struct {
	Addr netip.Addr
	Node string
	Why  string // "not in the prefixes of", "reserved on", "does not follow from ... on"
}

// Error implements error.
func (e *AddrOutsideError) Error() string {
	return fmt.Sprintf("address %s: %s node %s: choose another", e.Addr, e.Why, e.Node)
}
