package netcfg

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// peers is the desired state of the overlay device for some nodes.
type peers struct {
	routes     map[routeKey]route
	neighbours map[netip.Addr]string // gateway -> VTEP hardware address
	forwarding map[string]netip.Addr // VTEP hardware address -> underlay address
	moved      []netip.Addr          // here
}

// Overlay leads from this node to others. It knows which nodes it was brought to, and is its
// caller's: one goroutine at a time.
type Overlay struct {
	devs NodeDevices
	self string
	used peerIndex
}

// NewOverlay gives the overlay of the node called self. devs comes from SetupNode.
func NewOverlay(devs NodeDevices, self string) *Overlay { return &Overlay{devs: devs, self: self} }

// Set makes the overlay lead to nodes, with their Prefixes and Moved, and nowhere else; this node
// is skipped. It compares all of it with what the kernel has. A node that cannot be used (bad
// hardware address, prefix that overlaps another's) is left out and named in the error; the other
// nodes are set all the same.
func (o *Overlay) Set(nodes []model.Node) error {
	o.used = newPeerIndex(o.devs, o.self)
	want, invalid := o.desired(nodes)
	h, err := rtnl.Open()
	if err != nil {
		return errors.Join(invalid, err)
	}
	defer h.Close()
	// Neighbours before routes, so that the first packet along a new route finds them.
	return errors.Join(invalid,
		o.devs.Firewall.SetKnownNodes(want.forwarding),
		o.devs.Firewall.SetMoved(want.moved),
		setForwardingEntries(h, o.devs.OverlayIfindex, want.forwarding),
		setNeighbours(h, o.devs.OverlayIfindex, want.neighbours),
		setPeerRoutes(h, o.devs.OverlayIfindex, want.routes))
}

// Change brings the overlay to other nodes: before are those of the last Set or Change that are not
// there any more, or not as they were, and now is what they are, with the new ones. All that was
// asked of it before must have succeeded. It asks the kernel nothing, and costs what changes.
func (o *Overlay) Change(before, now []model.Node) error {
	have := newPeers()
	for _, n := range before {
		if n.Name == o.self {
			have.addOwnMoved(n)
		} else if mac, err := net.ParseMAC(n.VTEPMAC); err == nil {
			o.used.remove(n)
			have.put(o.devs, n, mac.String())
		}
	}
	want, invalid := o.desired(now)
	h, err := rtnl.Open()
	if err != nil {
		return errors.Join(invalid, err)
	}
	defer h.Close()
	overlay := o.devs.OverlayIfindex
	return errors.Join(invalid,
		o.devs.Firewall.ChangeKnownNodes(have.forwarding, want.forwarding),
		setEntries(h, "forwarding entry", have.forwarding, want.forwarding, forwardingEntry(overlay)),
		setEntries(h, "neighbour", have.neighbours, want.neighbours, neighbourEntry(overlay)),
		o.changeMoved(have.moved, want.moved),
		changeRoutes(h, overlay, have.routes, want.routes))
}

// changeMoved brings the addresses that have moved here to want, if this node is one of those that
// have changed.
func (o *Overlay) changeMoved(have, want []netip.Addr) error {
	if slices.Equal(have, want) {
		return nil
	}
	return o.devs.Firewall.SetMoved(want)
}

// desired gives the state for the usable ones of some nodes, which are in use from then on, and an
// error that names the others.
func (o *Overlay) desired(nodes []model.Node) (*peers, error) {
	want := newPeers()
	var errs []error
	for _, n := range nodes {
		if n.Name == o.self {
			want.addOwnMoved(n)
			continue
		}
		mac, err := o.used.add(n)
		if err != nil {
			errs = append(errs, fmt.Errorf("node %q: %w", n.Name, err))
			continue
		}
		want.put(o.devs, n, mac)
	}
	return want, errors.Join(errs...)
}

// peerIndex says who has a prefix or a hardware address.
type peerIndex struct {
	prefixes model.PrefixHolders
	macs     map[string]netip.Addr // underlay addresses
}

func newPeerIndex(devs NodeDevices, self string) peerIndex {
	x := peerIndex{macs: make(map[string]netip.Addr)}
	for _, p := range devs.Prefixes {
		x.prefixes.Add(p, self)
	}
	return x
}

// add adds node n, all of it or nothing, and gives its hardware address.
func (x *peerIndex) add(n model.Node) (string, error) {
	hw, err := net.ParseMAC(n.VTEPMAC)
	if err != nil || len(hw) != 6 {
		return "", fmt.Errorf("vtep_mac %q: want a hardware address such as 02:48:0a:00:00:01", n.VTEPMAC)
	}
	mac := hw.String()
	if !n.Underlay.IsValid() {
		return "", errors.New("underlay: the address is missing")
	}
	if other, ok := x.macs[mac]; ok {
		return "", fmt.Errorf("vtep_mac %s: the node at %v has it too", mac, other)
	}
	for _, p := range n.Prefixes {
		if err := validPrefix(p); err != nil {
			return "", err
		}
		if q, name, overlaps := x.prefixes.Overlapping(p); overlaps {
			return "", fmt.Errorf("prefix %v: overlaps %v of node %q", p, q, name)
		}
	}
	x.macs[mac] = n.VTEP()
	for _, p := range n.Prefixes {
		x.prefixes.Add(p, n.Name)
	}
	return mac, nil
}

// remove takes out a node that was added.
func (x *peerIndex) remove(n model.Node) {
	hw, _ := net.ParseMAC(n.VTEPMAC) // it was added
	delete(x.macs, hw.String())
	for _, p := range n.Prefixes {
		x.prefixes.Remove(p)
	}
}

func newPeers() *peers {
	return &peers{routes: map[routeKey]route{}, neighbours: map[netip.Addr]string{}, forwarding: map[string]netip.Addr{}}
}

// put adds what leads to node n, whose hardware address is mac.
func (w *peers) put(devs NodeDevices, n model.Node, mac string) {
	w.forwarding[mac] = n.VTEP()
	for _, p := range n.Prefixes {
		src := rtnl.SameFamily(p.Addr(), devs.Gateways)
		if !src.IsValid() {
			continue // this node has no address of the family, so nothing here could talk to it
		}
		gw := model.Gateway(p)
		w.neighbours[gw] = mac
		r := route{table: unix.RT_TABLE_MAIN, dst: p, kind: unix.RTN_UNICAST, link: devs.OverlayIfindex, gw: gw, src: src, onlink: true}
		w.routes[r.key()] = r
		for _, a := range n.Moved {
			if a.Is4() == gw.Is4() {
				r.dst, r.metric = netip.PrefixFrom(a, a.BitLen()), movedAwayMetric
				w.routes[r.key()] = r
			}
		}
	}
}

// addOwnMoved makes what has moved to this node answer at once while no endpoint has it, instead of
// going to the node that it came from.
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

// setNeighbours makes want the neighbours of a device of Heddle's, all of them permanent. Nobody
// else has reason to write to such a device, so every other entry is stale. It is not for one that
// was just made: to list entries, the kernel goes through those of all devices of all namespaces.
func setNeighbours(h *netlink.Handle, link int, want map[netip.Addr]string) error {
	have, err := neighbours(link)
	if err != nil {
		return err
	}
	return setEntries(h, "neighbour", have[link], want, neighbourEntry(link))
}

// neighbours lists the neighbours of a device, or of all for 0, with their hardware addresses, by
// device.
func neighbours(link int) (map[int]map[netip.Addr]string, error) {
	have := map[int]map[netip.Addr]string{link: {}}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := rtnl.Dump(func() ([]netlink.Neigh, error) { return neighboursOf(link, family) })
		if err != nil {
			return nil, fmt.Errorf("list neighbours of device %d: %w", link, err)
		}
		for _, n := range list {
			if n.State&netlink.NUD_NOARP != 0 {
				continue // those are the kernel's multicast entries
			}
			if have[n.LinkIndex] == nil {
				have[n.LinkIndex] = map[netip.Addr]string{}
			}
			have[n.LinkIndex][rtnl.FromIP(n.IP)] = entryMAC(n)
		}
	}
	return have, nil
}

// neighboursOf lists the neighbours of one device in the calling thread's network namespace, or of
// all for 0. The library's own list is the kernel's of all devices, of which it keeps one's.
func neighboursOf(link, family int) (list []netlink.Neigh, err error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, unix.NLM_F_DUMP)
	req.AddData(&netlink.Ndmsg{Family: uint8(family)})
	if link != 0 {
		req.AddData(nl.NewRtAttr(unix.NDA_IFINDEX, nl.Uint32Attr(uint32(link))))
	}
	messages, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH)
	for _, m := range messages {
		n, derr := netlink.NeighDeserialize(m)
		if derr == nil && (link == 0 || n.LinkIndex == link) && n.Family == family {
			list = append(list, *n)
		}
	}
	return list, err
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

// forwardingEntries gives the forwarding database of the overlay device: underlay addresses by
// hardware address.
func forwardingEntries(h *netlink.Handle, overlay int) (map[string]netip.Addr, error) {
	list, err := rtnl.Dump(func() ([]netlink.Neigh, error) { return h.NeighList(overlay, unix.AF_BRIDGE) })
	if err != nil {
		return nil, fmt.Errorf("list forwarding entries of %s: %w", netdev.Overlay, err)
	}
	have := map[string]netip.Addr{}
	for _, n := range list {
		have[n.HardwareAddr.String()] = rtnl.FromIP(n.IP)
	}
	return have, nil
}

// forwardingNodes gives the nodes to which the overlay device leads: those of the last Overlay.Set,
// as long as the device lives.
func forwardingNodes(h *netlink.Handle, overlay int) ([]netip.Addr, error) {
	have, err := forwardingEntries(h, overlay)
	if err != nil {
		return nil, err
	}
	seen := map[netip.Addr]bool{}
	var out []netip.Addr
	for _, a := range have {
		if a.IsValid() && !seen[a] {
			seen[a] = true
			out = append(out, a)
		}
	}
	return out, nil
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

// entryMAC gives the hardware address of a permanent entry, and "" for any other, so that it is
// replaced.
func entryMAC(n netlink.Neigh) string {
	if n.State&netlink.NUD_PERMANENT == 0 {
		return ""
	}
	return n.HardwareAddr.String()
}
