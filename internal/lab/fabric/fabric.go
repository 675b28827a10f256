// Package fabric joins the hosts of a lab, which are network namespaces, and gives them what the
// administrator of a real host would: addresses, a route, a congestion control. It has netlink of
// its own: none of it is an agent's, and an agent that could wire fabrics would be one with more
// rights than it needs.
package fabric

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Device is the name of a host's device on the lab's fabric.
const Device = "eth0"

// bridgeName joins the hosts of a lab in a namespace that holds nothing else.
const bridgeName = "fabric"

// Port joins one host to a lab's fabric.
type Port struct {
	// Name is the port's device in the fabric's namespace: at most 15 characters, the host's name.
	Name string
	// Netns is the host's network namespace, open.
	Netns *os.File
}

// Host is the configuration of a host on a lab's fabric: a node, or the host outside the overlay.
type Host struct {
	// Addrs are the host's underlay addresses with the fabric's prefix lengths. A host without
	// IPv6, or with IPv6 switched off, gets the IPv4 ones.
	Addrs []netip.Prefix
	// Gateway is where everything outside the fabric goes; the zero Addr means nowhere.
	Gateway netip.Addr
	// Loopback are further addresses of the host, on lo.
	Loopback []netip.Addr
}

// Wire joins hosts by a bridge in the calling thread's network namespace, the fabric's: each gets a
// veth pair from a port of the bridge to Device in the host's namespace. Ports that are there are
// kept.
func Wire(ports []Port) error {
	h, err := open()
	if err != nil {
		return err
	}
	defer h.Close()
	bridge, err := makeBridge(h)
	if err != nil {
		return err
	}
	for _, p := range ports {
		if err := wirePort(h, bridge, p); err != nil {
			return fmt.Errorf("fabric port %s: %w", p.Name, err)
		}
	}
	return nil
}

// makeBridge makes the bridge unless it is there.
func makeBridge(h *netlink.Handle) (netlink.Link, error) {
	bridge, err := findLink(h, bridgeName)
	if err != nil {
		return nil, err
	}
	if bridge == nil {
		snooping := false // there is no querier; without one, multicast would stop after a while
		attrs := netlink.NewLinkAttrs()
		attrs.Name = bridgeName
		if err := h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &snooping}); err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("make bridge %s: %w", bridgeName, err)
		}
		if bridge, err = h.LinkByName(bridgeName); err != nil {
			return nil, fmt.Errorf("device %s: %w", bridgeName, err)
		}
	}
	if err := silence(bridgeName); err != nil {
		return nil, err
	}
	return bridge, setUp(h, bridge)
}

func wirePort(h *netlink.Handle, bridge netlink.Link, p Port) error {
	port, err := findLink(h, p.Name)
	if err != nil {
		return err
	}
	if port == nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = p.Name
		// The other end is born in the host's namespace, under its final name: nothing to rename or
		// move.
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: Device, PeerNamespace: netlink.NsFd(p.Netns.Fd())}
		if err := h.LinkAdd(veth); err != nil {
			return fmt.Errorf("make veth pair: %w", err)
		}
		if port, err = h.LinkByName(p.Name); err != nil {
			return err
		}
	}
	if port.Attrs().MasterIndex != bridge.Attrs().Index {
		if err := h.LinkSetMaster(port, bridge); err != nil {
			return fmt.Errorf("join bridge: %w", err)
		}
	}
	if err := silence(p.Name); err != nil {
		return err
	}
	return setUp(h, port)
}

// Unplug removes ports of the fabric in the calling thread's network namespace, by their names,
// with the devices at their other ends. Ports that are not there are no error.
func Unplug(names []string) error {
	h, err := open()
	if err != nil {
		return err
	}
	defer h.Close()
	for _, name := range names {
		port, err := findLink(h, name)
		if err == nil && port != nil {
			err = h.LinkDel(port)
		}
		if errors.Is(err, unix.ENODEV) {
			continue // it went with its host's namespace
		}
		if err != nil {
			return fmt.Errorf("fabric port %s: %w", name, err)
		}
	}
	return nil
}

// linkLocal gives the link-local address beside IPv6 address p; of an IPv4 one none. Without it the
// kernel does not ask for the neighbours of what it forwards, or sends for containers.
func linkLocal(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4() {
		return netip.Prefix{}
	}
	a := p.Addr().As16()
	copy(a[:8], netip.MustParseAddr("fe80::").AsSlice())
	return netip.PrefixFrom(netip.AddrFrom16(a), 64)
}

// SetupHost gives the calling thread's network namespace, one that Wire joined, its address on
// the fabric, its further addresses and its default route, and brings its devices up.
func SetupHost(host Host) error {
	h, err := open()
	if err != nil {
		return err
	}
	defer h.Close()
	if err := SetupLoopback(host.Loopback); err != nil {
		return err
	}
	dev, err := h.LinkByName(Device)
	if err != nil {
		return fmt.Errorf("device %s: %w", Device, err)
	}
	if err := silence(Device); err != nil {
		return err
	}
	if err := setUp(h, dev); err != nil {
		return err
	}
	off, err := readSysctl("ipv6/conf/" + Device + "/disable_ipv6")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, p := range host.Addrs {
		if p.Addr().Is6() && off != "0" {
			continue
		}
		for _, a := range []netip.Prefix{p, linkLocal(p)} {
			if !a.IsValid() {
				continue
			}
			if err := h.AddrReplace(dev, addressOf(a)); err != nil {
				return fmt.Errorf("device %s: add address %v: %w", Device, a, err)
			}
		}
	}
	if !host.Gateway.IsValid() {
		return nil
	}
	route := &netlink.Route{LinkIndex: dev.Attrs().Index, Gw: host.Gateway.AsSlice()}
	if err := h.RouteReplace(route); err != nil {
		return fmt.Errorf("default route via %v: %w", host.Gateway, err)
	}
	return nil
}

// addressOf is an address of a fabric, where the lab sees to it that no two hosts have the same.
func addressOf(p netip.Prefix) *netlink.Addr {
	addr := &netlink.Addr{IPNet: netOf(p)}
	if p.Addr().Is6() {
		addr.Flags = unix.IFA_F_NODAD
	}
	return addr
}

// AllowForwarding6 lets the calling thread's network namespace, a node of a lab's, forward IPv6
// where the kernel cannot allow it for single devices. No agent may do that on a host of
// somebody's; a lab's nodes take no router advertisements. A kernel without IPv6 is left alone.
func AllowForwarding6() error {
	_, err := readSysctl("ipv6/conf/all/force_forwarding") // of single devices: since Linux 6.17
	if err == nil || !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if _, err := readSysctl("ipv6/conf/all/forwarding"); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return setSysctl("ipv6/conf/all/forwarding", "1")
}

// SetupLoopback brings lo up in the calling thread's network namespace and adds addresses to it.
func SetupLoopback(addrs []netip.Addr) error {
	h, err := open()
	if err != nil {
		return err
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("device lo: %w", err)
	}
	if err := setUp(h, lo); err != nil {
		return err
	}
	for _, a := range addrs {
		if err := h.AddrReplace(lo, &netlink.Addr{IPNet: netOf(netip.PrefixFrom(a, a.BitLen()))}); err != nil {
			return fmt.Errorf("device lo: add address %v: %w", a, err)
		}
	}
	return nil
}
