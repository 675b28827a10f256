package model

import (
	"fmt"
	"net/netip"
	"time"
)

// PeerState says whether connects to another node may take the direct path. It is what probes have
// shown.
type PeerState uint8

// States of a peer's direct path. The overlay carries new connections in all but PeerProven.
const (
	PeerUnproven PeerState = iota // no probe has been answered yet
	PeerProven                    // probes arrive with their option
	PeerStripped                  // SYNs arrive, the option does not
	PeerBlocked                   // SYNs to direct ports, or their answers, do not arrive
)

var peerStates = []string{"unproven", "direct", "stripped", "blocked"}

// String gives the state's name, as status and metrics have it.
func (s PeerState) String() string {
	if int(s) < len(peerStates) {
		return peerStates[s]
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// MarshalText implements encoding.TextMarshaler.
func (s PeerState) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *PeerState) UnmarshalText(text []byte) error {
	for i, name := range peerStates {
		if name == string(text) {
			*s = PeerState(i)
			return nil
		}
	}
	return fmt.Errorf("peer state %q: unknown", text)
}

// PeerPath is what an agent knows of the direct path to one other node.
type PeerPath struct {
	// Node is the other node's name, Underlay its address.
	Node     string     `json:"node"`
	Underlay netip.Addr `json:"underlay"`
	State    PeerState  `json:"state"`
	// Reason names the model.Reason that connects over the overlay have; empty if they are direct.
	Reason string `json:"reason,omitempty"`
	// Detail says what the last probes met with; empty if all were answered.
	Detail string `json:"detail,omitempty"`
	// Since is when the path came into this state, as far as this agent knows.
	Since time.Time `json:"since"`
	// Probed is when the last probe ended, the zero Time if there was none; Next is when the next
	// is due.
	Probed time.Time `json:"probed,omitzero"`
	Next   time.Time `json:"next"`
}

// DirectPaths sums up the direct paths to the other nodes.
type DirectPaths struct {
	// Peers counts the nodes by the state of their path: all states, zero included. Nodes that take
	// no direct connections, or answer no probes, are not among them.
	Peers map[PeerState]int `json:"peers"`
	// Overlay lists those that the overlay carries connections to, by name.
	Overlay []PeerPath `json:"overlay,omitempty"`
	// Silent lists those that answered neither the last probes nor over the overlay, by name, since
	// when. Where connections to them go is as State says.
	Silent []PeerPath `json:"silent,omitempty"`
	// Probes counts the probes sent since the agent's start, by outcome.
	Probes map[string]uint64 `json:"probes"`
}
