package model

import (
	"fmt"
	"slices"
)

// TunnelMode says how redirected packets travel between nodes.
type TunnelMode string

// The modes of tunnels.
const (
	TunnelAlways TunnelMode = "always" // in VXLAN
	TunnelAuto   TunnelMode = "auto"   // as they are to nodes on the same network that take them so, else in VXLAN
)

// Validate reports what is no mode.
func (m TunnelMode) Validate() error {
	if m != TunnelAlways && m != TunnelAuto {
		return fmt.Errorf("tunnel %.40q: want %s or %s", m, TunnelAlways, TunnelAuto)
	}
	return nil
}

// PacketMode says how packets between containers, of what is not carried by node sockets, go
// through a node.
type PacketMode string

// The modes.
const (
	PacketsAuto     PacketMode = "auto"     // redirect, unless the node's firewall has rules that are to see them
	PacketsRedirect PacketMode = "redirect" // past the node's stack
	PacketsRoute    PacketMode = "route"    // through it
)

// Validate reports what is no mode.
func (m PacketMode) Validate() error {
	if modes := []PacketMode{PacketsAuto, PacketsRedirect, PacketsRoute}; !slices.Contains(modes, m) {
		return fmt.Errorf("packets %.40q: want %s, %s or %s", m, PacketsAuto, PacketsRedirect, PacketsRoute)
	}
	return nil
}
