package model

import (
	"net/netip"
	"time"
)

// Move says that an overlay address lives on a node whose prefixes it need not be in: its endpoint
// migrated there, or is about to. While it is there, no other node may give the address out or
// speak for it.
type Move struct {
	// Addr is the IPv4 overlay address; the IPv6 one that follows from it moves with it.
	Addr netip.Addr `json:"addr"`
	// Node is where it lives now.
	Node string `json:"node"`
	// From is the node that gave it up last, Home the node whose prefixes it was taken from.
	From string `json:"from"`
	Home string `json:"home"`
	// Name, Labels and Limits are those that the endpoint had when it was given up. The endpoint
	// that takes the address up gets them.
	Name   string            `json:"name"`
	Labels map[string]string `json:"labels,omitempty"`
	Limits *Limits           `json:"limits,omitempty"`
	// Since is when it was given up.
	Since time.Time `json:"since"`
}
