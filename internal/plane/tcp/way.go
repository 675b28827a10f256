package tcp

import (
	"fmt"
	"net/netip"
	"slices"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
)

// unprovenWays are the reasons of connections that a direct path would carry if it were proven.
var unprovenWays = map[model.PeerState]string{
	model.PeerUnproven: "fallback_unproven", model.PeerStripped: "fallback_stripped", model.PeerBlocked: "fallback_blocked",
}

// WayTo says which path a connection of endpoint e would take and why, by what the programs go by
// at connect(). here are the endpoints of this node. Nothing is sent.
func (p *Plane) WayTo(e model.Endpoint, to netip.AddrPort, here []model.Endpoint) (api.Way, error) {
	services, err := p.datapath.Services()
	if err != nil {
		return api.Way{}, err
	}
	if i := slices.IndexFunc(services, func(s model.Service) bool { return s.Addr == model.ServiceAddr{AddrPort: to} }); i >= 0 {
		backends := services[i].Backends
		if len(backends) != 1 {
			return api.Way{Why: fmt.Sprintf("a service of %d backends: each connect picks one", len(backends))}, nil
		}
		to = backends[0]
	}
	if to.Addr().IsLoopback() {
		return api.Way{Path: names.PathLoopback, Why: "its own loopback"}, nil
	}
	addr := to.Addr()
	if a := model.Overlay4(p.cfg.Prefix6, addr); a.IsValid() {
		addr = a
	}
	r, found, err := p.datapath.RouteTo(addr)
	switch {
	case err != nil:
		return api.Way{}, err
	case !found:
		return api.Way{Path: names.PathOutside, Why: "no address of the network's"}, nil
	case r.NodeAddr:
		return api.Way{Path: names.PathNode, Why: "an address of the node itself"}, nil
	case r.Self:
		return p.wayOnNode(e, to, here)
	}
	way := wayBetween(r.Plain, r.Direct, r.State)
	if way.Reason == "" && e.Adopted == nil && (p.cfg.Firewall > 0 || r.Firewall) {
		return api.Way{Path: names.PathOverlay, Reason: "fallback_firewall", Why: "the first connection passes the forward chains of the nodes; after it, direct for a while"}, nil
	}
	return way, nil
}

// wayBetween is that to an endpoint of another node.
func wayBetween(plain, direct bool, state model.PeerState) api.Way {
	reason := unprovenWays[state]
	switch {
	case plain:
		reason = "fallback_peer_plain"
	case !direct:
		reason = "fallback_node_overlay_only"
	case state == model.PeerProven:
		return api.Way{Path: names.PathDirect, Why: "its node takes direct connections, and probes of it are answered"}
	}
	return overlayBecause(reason)
}

// wayOnNode is that to an endpoint of this node: by who listens.
func (p *Plane) wayOnNode(e model.Endpoint, to netip.AddrPort, here []model.Endpoint) (api.Way, error) {
	all, err := p.Connections()
	if err != nil {
		return api.Way{}, err
	}
	holder := slices.IndexFunc(here, func(e model.Endpoint) bool { return slices.Contains(e.Addrs, to.Addr()) })
	listens := holder >= 0 && slices.ContainsFunc(all, func(c model.Connection) bool {
		at := c.Local.Addr()
		return c.Path == model.PathListen && c.Endpoint == here[holder].ID && c.Local.Port() == to.Port() && (at == to.Addr() || at.IsUnspecified())
	})
	if listens {
		return api.Way{Path: names.PathLocal, Why: "an intercepted program of this node listens there"}, nil
	}
	if slices.Contains(e.Addrs, to.Addr()) {
		return overlayBecause("fallback_own_plain"), nil
	}
	return overlayBecause("fallback_local_plain"), nil
}

// overlayBecause is the overlay, for a reason that is counted.
func overlayBecause(reason string) api.Way {
	way := api.Way{Path: names.PathOverlay, Reason: reason}
	if i := slices.IndexFunc(names.Reasons, func(r model.Reason) bool { return r.Name == reason }); i >= 0 {
		way.Why = names.Reasons[i].Help
	}
	return way
}
