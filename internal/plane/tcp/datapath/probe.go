package datapath

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"

	"heddle.dev/heddle/internal/model"
)

// routeStates are the flags of a route by the state of its node's direct path.
var routeStates = map[model.PeerState]heddleRouteFlags{
	model.PeerProven:   0,
	model.PeerUnproven: heddleRouteFlagsROUTE_UNPROVEN,
	model.PeerStripped: heddleRouteFlagsROUTE_STRIPPED,
	model.PeerBlocked:  heddleRouteFlagsROUTE_BLOCKED,
}

// TagProbe makes the new TCP socket fd a probe of the direct path: the SYN of its connect carries
// an option from overlay address src to dst, the gateways of the two nodes, that asks for no
// connection. With the zero addresses it makes a listener one that takes probes. No other hook
// touches the socket.
func (d *Datapath) TagProbe(fd int, src, dst netip.Addr) error {
	tag := heddleSockTag{Flags: uint32(heddleSockTagFlagsTAG_PROBE)}
	if src.IsValid() {
		tag.Path = uint8(heddleHeddlePathPATH_DIRECT)
		tag.Local, tag.Remote = fromAddr(src), fromAddr(dst)
		tag.RemotePort = 1 // the option has a port, though nothing is asked for
	}
	if err := d.objs.TagBySock.Put(uint32(fd), &tag); err != nil {
		return fmt.Errorf("tag probe: %w", err)
	}
	return nil
}

// SetPeerState says whether connects to the node at underlay may be direct. It holds for the routes
// there are and for those of every later SetTopology. Nodes of which nothing was said are direct.
func (d *Datapath) SetPeerState(underlay netip.Addr, state model.PeerState) error {
	d.routes.mu.Lock()
	defer d.routes.mu.Unlock()
	if err := d.routes.setPeerState(d.objs.RouteByPrefix, fromAddr(underlay), uint32(routeStates[state])); err != nil {
		return fmt.Errorf("routes to %s: %w", underlay, err)
	}
	return nil
}

// PeerStates gives the states that the routes of an earlier agent have, by underlay address. For
// the start, before SetTopology.
func (d *Datapath) PeerStates() (map[netip.Addr]model.PeerState, error) {
	var (
		k   heddleRouteKey
		r   heddleRoute
		out = make(map[netip.Addr]model.PeerState)
	)
	it := d.objs.RouteByPrefix.Iterate()
	for it.Next(&k, &r) {
		flags := heddleRouteFlags(r.Flags)
		if flags&heddleRouteFlagsROUTE_DIRECT == 0 || flags&(heddleRouteFlagsROUTE_SELF|heddleRouteFlagsROUTE_NODE_ADDR|heddleRouteFlagsROUTE_PLAIN) != 0 {
			continue
		}
		for state, flag := range routeStates {
			if flags&heddleRouteFlagsROUTE_NOT_PROVEN == flag {
				out[toAddr(r.Underlay)] = state
			}
		}
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	return out, nil
}

// FollowReprobes calls suspect with the underlay address of each node to which a connect met with
// trouble, or to which one went over the overlay because its direct path is unproven, until ctx
// ends.
func (d *Datapath) FollowReprobes(ctx context.Context, suspect func(netip.Addr)) error {
	return followRing(ctx, d.objs.Suspects, func(record []byte) {
		if len(record) >= 4 {
			suspect(toAddr(mapped(binary.NativeEndian.Uint32(record))))
		}
	})
}

// GiveUpBlocked has direct connects that wait for an answer of a node whose path is PeerBlocked end
// within seconds, and says how many. It must run in the node's network namespace.
func (d *Datapath) GiveUpBlocked() (n int, err error) {
	results, err := d.iterate("give_up", d.objs.GiveUp)
	for _, ended := range results {
		n += int(ended)
	}
	if err != nil {
		return n, fmt.Errorf("give up connects: %w", err)
	}
	return n, nil
}
