package datapath

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
)

// Route is where the programs send connections to an address.
type Route struct {
	Self     bool // an endpoint of this node
	NodeAddr bool // the node itself
	Direct   bool // its node takes direct connections
	Plain    bool // it is not intercepted
	Firewall bool // the forward chains of the nodes are to see connections to it
	State    model.PeerState
	// Underlay is its node's address: of an endpoint of another node.
	Underlay netip.Addr
}

// RouteTo looks an overlay's IPv4 address up as connect() does; false: it is outside.
func (d *Datapath) RouteTo(a netip.Addr) (Route, bool, error) {
	key, r := routeKey(netip.PrefixFrom(a, a.BitLen())), heddleRoute{}
	err := d.objs.RouteByPrefix.Lookup(&key, &r)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return Route{}, false, nil
	}
	if err != nil {
		return Route{}, false, fmt.Errorf("look up route to %s: %w", a, err)
	}
	has := func(f heddleRouteFlags) bool { return heddleRouteFlags(r.Flags)&f != 0 }
	out := Route{Self: has(heddleRouteFlagsROUTE_SELF), NodeAddr: has(heddleRouteFlagsROUTE_NODE_ADDR), Direct: has(heddleRouteFlagsROUTE_DIRECT),
		Plain: has(heddleRouteFlagsROUTE_PLAIN), Firewall: has(heddleRouteFlagsROUTE_FIREWALL), State: model.PeerProven, Underlay: toAddr(r.Underlay)}
	for state, flag := range routeStates {
		if flag != 0 && has(flag) {
			out.State = state
		}
	}
	return out, true, nil
}
