package model

import (
	"fmt"
	"net/netip"
	"slices"
)

// FirewallLive says what becomes of live connections that went past the nodes' forward chains, when
// these would not let them pass any more.
type FirewallLive string

// What becomes of them.
const (
	FirewallLiveEnd  FirewallLive = "end"  // they are ended
	FirewallLiveKeep FirewallLive = "keep" // they go on, and the status names them
)

// Validate reports what is neither.
func (l FirewallLive) Validate() error {
	if all := []FirewallLive{FirewallLiveEnd, FirewallLiveKeep}; !slices.Contains(all, l) {
		return fmt.Errorf("live connections of the overlay firewall %.40q: want %s or %s", l, FirewallLiveEnd, FirewallLiveKeep)
	}
	return nil
}

// Forbidden are live connections past the forward chains that these forbid now.
type Forbidden struct {
	Src         netip.Addr     `json:"src"` // the container's IPv4 overlay address
	Dst         netip.AddrPort `json:"dst"`
	Connections int            `json:"connections"`
}
