package netcfg

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/firewall"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/netcfg/sysctl"
)

// SetupNode brings this network namespace to cfg: overlay device, divert pair, rule, the node's
// own routes, sysctls and nftables. It does not touch peers and endpoints, but if the overlay
// device has to be made anew (other VNI, port or underlay), Overlay.Set must follow. On an error
// what was done stays: repeat the call, or call Teardown.
func SetupNode(cfg NodeConfig) (NodeDevices, error) {
	if err := cfg.validate(); err != nil {
		return NodeDevices{}, err
	}
	h, err := rtnl.Open()
	if err != nil {
		return NodeDevices{}, err
	}
	defer h.Close()
	underlay, err := findUnderlay(h, cfg.Underlay)
	if err != nil {
		return NodeDevices{}, err
	}
	outer, err := findUnderlay(h, cfg.outer())
	if err != nil {
		return NodeDevices{}, err
	}
	below := underlay // VXLAN's
	if cfg.Translated {
		below = outer
	}
	overlay, err := setOverlayDevice(h, cfg, below)
	if err != nil {
		return NodeDevices{}, err
	}
	divert, err := setDivertPair(h, gateways(cfg.Prefixes))
	if err != nil {
		return NodeDevices{}, err
	}
	known, err := forwardingNodes(h, overlay.Attrs().Index)
	if err != nil {
		return NodeDevices{}, err
	}
	routes, err := ownRoutes(h)
	if err != nil {
		return NodeDevices{}, err
	}
	var rules *firewall.Rules
	steps := []func() error{
		func() error { return setNodeRoutes(h, cfg) },
		func() error { return setRule(h, cfg) },
		func() error { return setForwarding(h, cfg, outer) },
		func() (err error) {
			rules, err = firewall.Set(cfg.firewall(), divert.Attrs().Index, underlay.Attrs().Index, known, movedHere(routes))
			return err
		},
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return NodeDevices{}, err
		}
	}
	translated := netip.Addr{}
	if cfg.Translated {
		translated = cfg.Outer
	}
	return NodeDevices{
		Outer:           translated,
		UnderlayIfindex: underlay.Attrs().Index,
		UnderlayName:    underlay.Attrs().Name,
		OuterIfindex:    outer.Attrs().Index,
		OuterMTU:        outer.Attrs().MTU,
		OverlayIfindex:  overlay.Attrs().Index,
		DivertIfindex:   divert.Attrs().Index,
		VTEPMAC:         overlay.Attrs().HardwareAddr.String(),
		OverlayMTU:      overlay.Attrs().MTU,
		Prefixes:        cfg.Prefixes,
		Gateways:        gateways(cfg.Prefixes),
		Firewall:        rules,
	}, nil
}

// movedHere gives the addresses that had moved to this node when Overlay.Set was called last.
func movedHere(have map[routeKey]route) (out []netip.Addr) {
	for k := range have {
		if k.metric == movedHereMetric {
			out = append(out, k.dst.Addr())
		}
	}
	return out
}

// CheckUnderlay reports why the calling thread's network namespace cannot be a node with underlay
// address want; the error names the remedy. For before anything is set up.
func CheckUnderlay(want netip.Addr) error {
	h, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	_, err = findUnderlay(h, want)
	return err
}

// findUnderlay gives the device that has address want.
func findUnderlay(h *netlink.Handle, want netip.Addr) (netlink.Link, error) {
	addrs, err := rtnl.Dump(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range addrs {
		if rtnl.FromIPNet(a.IPNet).Addr() != want {
			continue
		}
		l, err := h.LinkByIndex(a.LinkIndex)
		if err != nil {
			return nil, fmt.Errorf("underlay %v: %w", want, err)
		}
		if l.Attrs().Flags&net.FlagLoopback != 0 {
			return nil, fmt.Errorf("underlay %v: it is on the loopback device %s; name an address of the device that leads to the other nodes", want, l.Attrs().Name)
		}
		if l.Attrs().Flags&net.FlagUp == 0 {
			return nil, fmt.Errorf("underlay %v: its device %s is down; set it up (ip link set %[2]s up)", want, l.Attrs().Name)
		}
		return l, nil
	}
	all, err := nodeAddrs(h)
	if err != nil {
		return nil, err
	}
	var there []string
	for _, a := range all {
		if !a.IsLoopback() && !a.IsLinkLocalUnicast() {
			there = append(there, a.String())
		}
	}
	if len(there) == 0 {
		there = []string{"none"}
	}
	return nil, fmt.Errorf("underlay %v: no device here has this address; addresses there are: %s", want, strings.Join(there, ", "))
}

// setOverlayDevice makes the VXLAN device what cfg says: an existing one that differs in what
// cannot be changed is made anew.
func setOverlayDevice(h *netlink.Handle, cfg NodeConfig, underlay netlink.Link) (_ netlink.Link, err error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = netdev.Overlay, overlayMTU(underlay, cfg.vtep()), vtepMAC(cfg.outer())
	want := &netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: int(cfg.VNI), VtepDevIndex: underlay.Attrs().Index,
		SrcAddr: cfg.vtep().AsSlice(), Port: int(cfg.VXLANPort), Learning: false,
	}
	have, err := rtnl.FindLink(netdev.Overlay)
	if err != nil {
		return nil, err
	}
	if have != nil {
		vx, ok := have.(*netlink.Vxlan)
		if !ok {
			return nil, fmt.Errorf("device %s: the name is taken by a device of kind %s; rename or delete it", netdev.Overlay, have.Type())
		}
		if !sameVXLAN(vx, want) {
			if err := rtnl.DeleteLink(h, have); err != nil {
				return nil, err
			}
			have = nil
		}
	}
	if have == nil {
		if err := addOverlayDevice(h, want); err != nil {
			return nil, err
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, rtnl.DeleteLink(h, want))
			}
		}()
		if have, err = h.LinkByName(netdev.Overlay); err != nil {
			return nil, fmt.Errorf("device %s: %w", netdev.Overlay, err)
		}
	}
	if err := rtnl.SetMTU(h, have, attrs.MTU); err != nil {
		return nil, err
	}
	have.Attrs().MTU = attrs.MTU
	if err := errors.Join(netdev.QuietIPv6(netdev.Overlay), enableIPv6(netdev.Overlay, gateways(cfg.Prefixes))); err != nil {
		return nil, err
	}
	if err := rtnl.SetUp(h, have); errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("vxlan port %d: the UDP port is in use here; choose another one, equal on all nodes: %w", cfg.VXLANPort, err)
	} else if err != nil {
		return nil, err
	}
	return have, setAddrs(h, have, gateways(cfg.Prefixes))
}

func sameVXLAN(a, b *netlink.Vxlan) bool {
	return a.VxlanId == b.VxlanId && a.VtepDevIndex == b.VtepDevIndex && rtnl.FromIP(a.SrcAddr) == rtnl.FromIP(b.SrcAddr) &&
		a.Port == b.Port && a.Learning == b.Learning && a.HardwareAddr.String() == b.HardwareAddr.String()
}

// addOverlayDevice adds the device and explains the kernel's EEXIST, which here can only mean the
// VNI.
func addOverlayDevice(h *netlink.Handle, want *netlink.Vxlan) error {
	err := h.LinkAdd(want)
	if err == nil {
		return nil
	}
	if !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add device %s: %w", netdev.Overlay, err)
	}
	holder := "another VXLAN device"
	links, listErr := rtnl.Dump(h.LinkList)
	if listErr != nil {
		return errors.Join(err, listErr)
	}
	for _, l := range links {
		if vx, ok := l.(*netlink.Vxlan); ok && vx.VxlanId == want.VxlanId && vx.Port == want.Port {
			holder = "device " + vx.Name
		}
	}
	return fmt.Errorf("vni %d, vxlan port %d: in use by %s; choose another vni or port, equal on all nodes, or delete that device: %w",
		want.VxlanId, want.Port, holder, err)
}

// setDivertPair makes the veth pair on which captured packets of node processes enter the stack
// again. Their source is an address of the node itself, which the stack takes from a device only
// with accept_local and without strict reverse-path filtering. The filter in force is the larger of
// the device's and "all"'s value, so 0 here would lose against a machine-wide 1 (strict). 2 (loose)
// wins over both, and asks that the device has an address: hence the gateway's.
func setDivertPair(h *netlink.Handle, addrs []netip.Addr) (netlink.Link, error) {
	if err := addDivertPair(h); err != nil {
		return nil, err
	}
	for key, value := range map[string]string{"accept_local": "1", "rp_filter": "2"} {
		if err := sysctl.Set("ipv4/conf/"+netdev.Divert+"/"+key, value); err != nil {
			return nil, err
		}
	}
	for _, name := range []string{netdev.DivertPeer, netdev.Divert} {
		if err := errors.Join(netdev.QuietIPv6(name), enableIPv6(name, addrs)); err != nil {
			return nil, err
		}
		l, err := h.LinkByName(name)
		if err != nil {
			return nil, fmt.Errorf("device %s: %w", name, err)
		}
		if err := rtnl.SetUp(h, l); err != nil {
			return nil, err
		}
	}
	divert, err := h.LinkByName(netdev.Divert)
	if err != nil {
		return nil, fmt.Errorf("device %s: %w", netdev.Divert, err)
	}
	return divert, setAddrs(h, divert, addrs)
}

func addDivertPair(h *netlink.Handle) error {
	return addPair(h, netdev.Divert, netdev.DivertMAC, netdev.DivertPeer, netdev.DivertPeerMAC)
}

// addPair adds a veth pair of Heddle's own unless it is there. The kernel makes both ends at once,
// so one end alone or with another hardware address is somebody else's.
func addPair(h *netlink.Handle, device, mac, peer, peerMAC string) error {
	macs := map[string]string{device: mac, peer: peerMAC}
	found := 0
	for name, mac := range macs {
		l, err := rtnl.FindLink(name)
		if err != nil {
			return err
		}
		if l == nil {
			continue
		}
		if l.Type() != "veth" || l.Attrs().HardwareAddr.String() != mac {
			return fmt.Errorf("device %s: the name is taken by a device that is not Heddle's; rename or delete it", name)
		}
		found++
	}
	if found == len(macs) {
		return nil
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr = device, mustMAC(mac)
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerHardwareAddr = peer, mustMAC(peerMAC)
	if err := h.LinkAdd(pair); err != nil {
		return fmt.Errorf("add devices %s and %s: %w", device, peer, err)
	}
	return nil
}

// mustMAC parses a constant.
func mustMAC(s string) net.HardwareAddr {
	mac, err := net.ParseMAC(s)
	if err != nil {
		panic(err)
	}
	return mac
}

// setNodeRoutes makes addresses of the node's own prefixes that no endpoint has answer at once
// instead of following the default route, and drops what an earlier configuration left.
func setNodeRoutes(h *netlink.Handle, cfg NodeConfig) error {
	have, err := ownRoutes(h)
	if err != nil {
		return err
	}
	want := map[routeKey]bool{}
	for _, r := range cfg.unreachable() {
		want[r.key()] = true
		if err := ensureRoute(h, have, r); err != nil {
			return err
		}
	}
	return pruneRoutes(h, have, func(r route) bool {
		switch r.kind {
		case unix.RTN_UNREACHABLE:
			// Those are Overlay's, and SetWireGuard's.
			return !want[r.key()] && r.metric != movedHereMetric && r.metric != innerMetric
		case unix.RTN_LOCAL:
			return r.table != cfg.Table
		}
		return false
	})
}

// unreachable gives the routes of setNodeRoutes.
func (c NodeConfig) unreachable() (out []route) {
	// The same for mirror addresses, which must never follow the default route.
	prefixes := append([]netip.Prefix{model.MirrorRange}, c.Prefixes...)
	if c.hasInner() {
		// Nor may what is for a node that is not reached.
		prefixes = append(prefixes, c.Pool...)
	}
	for _, p := range prefixes {
		out = append(out, route{table: unix.RT_TABLE_MAIN, dst: p, kind: unix.RTN_UNREACHABLE})
	}
	return out
}

// setForwarding lets the node route between its containers, the overlay and the outside.
func setForwarding(h *netlink.Handle, cfg NodeConfig, underlay netlink.Link) error {
	if err := sysctl.Set("ipv4/ip_forward", "1"); err != nil {
		return err
	}
	if !hasIPv6(gateways(cfg.Prefixes)) {
		return nil
	}
	return setForwarding6(h, underlay)
}
