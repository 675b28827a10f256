package netcfg

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// peers is the desired state of the overlay device, taken together from all nodes.
type peers struct {
	routes     map[routeKey]route
	neighbours map[netip.Addr]string // gateway -> VTEP hardware address
	forwarding map[string]netip.Addr // VTEP hardware address -> underlay address
	moved      []netip.Addr          // here
}

// SetPeers makes the overlay lead to nodes, with their Prefixes and Moved, and nowhere else. devs comes from SetupNode; self is this node's
// name, which is skipped. A node that cannot be used (bad hardware address, prefix that overlaps another's) is
// left out and named in the error; the other nodes are set all the same.
func SetPeers(devs NodeDevices, self string, nodes []model.Node) error {
	want, invalid := desiredPeers(devs, self, nodes)
	h, err := open()
	if err != nil {
		return errors.Join(invalid, err)
	}
	defer h.Close()
	// Neighbours before routes, so that the first packet along a new route finds them.
	return errors.Join(invalid,
		setKnownNodes(want.forwarding),
		setMoved(want.moved, devs.Mark),
		setForwardingEntries(h, devs.OverlayIfindex, want.forwarding),
		setNeighbours(h, devs.OverlayIfindex, want.neighbours),
		setPeerRoutes(h, devs.OverlayIfindex, want.routes))
}

// ChangePeers is SetPeers for an overlay that leads to before, by a SetPeers or ChangePeers that succeeded. It asks the
// kernel nothing: among thousands of nodes that is most of the cost of one that changes.
func ChangePeers(devs NodeDevices, self string, before, nodes []model.Node) error {
	have, _ := desiredPeers(devs, self, before) // those that could not be used then are not there
	want, invalid := desiredPeers(devs, self, nodes)
	h, err := open()
	if err != nil {
		return errors.Join(invalid, err)
	}
	defer h.Close()
	return errors.Join(invalid,
		changeKnownNodes(have.forwarding, want.forwarding),
		setEntries(h, "forwarding entry", have.forwarding, want.forwarding, forwardingEntry(devs.OverlayIfindex)),
		setEntries(h, "neighbour", have.neighbours, want.neighbours, neighbourEntry(devs.OverlayIfindex)),
		changeMoved(have.moved, want.moved, devs.Mark),
		changeRoutes(h, devs.OverlayIfindex, have.routes, want.routes))
}

// desiredPeers gives the state for the usable nodes and an error that names the others.
func desiredPeers(devs NodeDevices, self string, nodes []model.Node) (peers, error) {
	want := &peers{routes: map[routeKey]route{}, neighbours: map[netip.Addr]string{}, forwarding: map[string]netip.Addr{}}
	var taken prefixHolders
	for _, p := range devs.Prefixes {
		taken.add(p, self)
	}
	var errs []error
	for _, n := range nodes {
		if n.Name == self {
			want.addOwnMoved(n)
			continue
		}
		if err := want.add(devs, n, &taken); err != nil {
			errs = append(errs, fmt.Errorf("node %q: %w", n.Name, err))
		}
	}
	return *want, errors.Join(errs...)
}

// add adds node n, all of it or nothing. taken names the node of each prefix so far.
func (w peers) add(devs NodeDevices, n model.Node, taken *prefixHolders) error {
	mac, err := net.ParseMAC(n.VTEPMAC)
	if err != nil || len(mac) != 6 {
		return fmt.Errorf("vtep_mac %q: want a hardware address such as 02:48:0a:00:00:01", n.VTEPMAC)
	}
	if !n.Underlay.IsValid() {
		return errors.New("underlay: the address is missing")
	}
	if other, ok := w.forwarding[mac.String()]; ok {
		return fmt.Errorf("vtep_mac %s: the node at %v has it too", mac, other)
	}
	for _, p := range n.Prefixes {
		if err := validPrefix(p); err != nil {
			return err
		}
		if q, name, overlaps := taken.overlapping(p); overlaps {
			return fmt.Errorf("prefix %v: overlaps %v of node %q", p, q, name)
		}
	}
	w.forwarding[mac.String()] = n.Underlay
	for _, p := range n.Prefixes {
		taken.add(p, n.Name)
		src := sameFamily(p.Addr(), devs.Gateways)
		if !src.IsValid() {
			continue // this node has no address of the family, so nothing here could talk to it
		}
		gw := model.Gateway(p)
		w.neighbours[gw] = mac.String()
		r := route{table: unix.RT_TABLE_MAIN, dst: p, kind: unix.RTN_UNICAST, link: devs.OverlayIfindex, gw: gw, src: src, onlink: true}
		w.routes[r.key()] = r
		for _, a := range n.Moved {
			if a.Is4() == gw.Is4() {
				r.dst, r.metric = netip.PrefixFrom(a, a.BitLen()), movedAwayMetric
				w.routes[r.key()] = r
			}
		}
	}
	return nil
}

// addOwnMoved makes what has moved to this node answer at once while no endpoint has it, instead of going to the node
// that it came from.
func (w *peers) addOwnMoved(n model.Node) {
	w.moved = n.Moved
	for _, a := range n.Moved {
		r := route{table: unix.RT_TABLE_MAIN, dst: netip.PrefixFrom(a, a.BitLen()), kind: unix.RTN_UNREACHABLE, metric: movedHereMetric}
		w.routes[r.key()] = r
	}
}

func setPeerRoutes(h *netlink.Handle, overlay int, want map[routeKey]route) error {
	have, err := ownRoutes(h)
	if err != nil {
		return err
	}
	return changeRoutes(h, overlay, have, want)
}

// changeRoutes brings the routes have of the overlay device to want; have may hold others, too.
func changeRoutes(h *netlink.Handle, overlay int, have, want map[routeKey]route) error {
	var errs []error
	for _, r := range want {
		errs = append(errs, ensureRoute(h, have, r))
	}
	errs = append(errs, pruneRoutes(h, have, func(r route) bool {
		_, keep := want[r.key()]
		return (r.link == overlay || r.metric == movedHereMetric) && !keep
	}))
	return errors.Join(errs...)
}

// setNeighbours makes want the neighbours of a device of Heddle's, all of them permanent. Nobody else has
// reason to write to such a device, so every other entry is stale.
func setNeighbours(h *netlink.Handle, link int, want map[netip.Addr]string) error {
	have := map[netip.Addr]string{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := dump(func() ([]netlink.Neigh, error) { return h.NeighList(link, family) })
		if err != nil {
			return fmt.Errorf("list neighbours of device %d: %w", link, err)
		}
		for _, n := range list {
			if n.State&netlink.NUD_NOARP == 0 { // those are the kernel's multicast entries
				have[fromIP(n.IP)] = entryMAC(n)
			}
		}
	}
	return setEntries(h, "neighbour", have, want, neighbourEntry(link))
}

func neighbourEntry(link int) func(netip.Addr, string) *netlink.Neigh {
	return func(a netip.Addr, mac string) *netlink.Neigh { return permanentNeighbour(link, a, mac) }
}

// setForwardingEntries makes want the forwarding database of the overlay device.
func setForwardingEntries(h *netlink.Handle, overlay int, want map[string]netip.Addr) error {
	have, err := forwardingEntries(h, overlay)
	if err != nil {
		return err
	}
	return setEntries(h, "forwarding entry", have, want, forwardingEntry(overlay))
}

func forwardingEntry(overlay int) func(string, netip.Addr) *netlink.Neigh {
	return func(mac string, underlay netip.Addr) *netlink.Neigh {
		hw, _ := net.ParseMAC(mac) // written by HardwareAddr.String
		return &netlink.Neigh{
			LinkIndex: overlay, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF, State: netlink.NUD_PERMANENT,
			HardwareAddr: hw, IP: underlay.AsSlice(),
		}
	}
}

// forwardingEntries gives the forwarding database of the overlay device: underlay addresses by hardware address.
func forwardingEntries(h *netlink.Handle, overlay int) (map[string]netip.Addr, error) {
	list, err := dump(func() ([]netlink.Neigh, error) { return h.NeighList(overlay, unix.AF_BRIDGE) })
	if err != nil {
		return nil, fmt.Errorf("list forwarding entries of %s: %w", OverlayDevice, err)
	}
	have := map[string]netip.Addr{}
	for _, n := range list {
		have[n.HardwareAddr.String()] = fromIP(n.IP)
	}
	return have, nil
}

// setEntries brings the neighbour or forwarding entries have to want; entry builds one.
func setEntries[K, V comparable](h *netlink.Handle, what string, have, want map[K]V, entry func(K, V) *netlink.Neigh) error {
	var errs []error
	for k, v := range want {
		if old, ok := have[k]; ok && old == v {
			continue
		}
		if err := h.NeighSet(entry(k, v)); err != nil {
			errs = append(errs, fmt.Errorf("set %s %v to %v: %w", what, k, v, err))
		}
	}
	for k, v := range have {
		if _, keep := want[k]; keep {
			continue
		}
		if err := h.NeighDel(entry(k, v)); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("delete %s %v: %w", what, k, err))
		}
	}
	return errors.Join(errs...)
}

// permanentNeighbour says that a is reached at hardware address mac on link, without asking.
func permanentNeighbour(link int, a netip.Addr, mac string) *netlink.Neigh {
	family := netlink.FAMILY_V4
	if a.Is6() {
		family = netlink.FAMILY_V6
	}
	hw, _ := net.ParseMAC(mac) // empty for an incomplete entry that is to be deleted
	return &netlink.Neigh{LinkIndex: link, Family: family, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: hw}
}

// entryMAC gives the hardware address of a permanent entry, and "" for any other, so that it is replaced.
func entryMAC(n netlink.Neigh) string {
	if n.State&netlink.NUD_PERMANENT == 0 {
		return ""
	}
	return n.HardwareAddr.String()
}
