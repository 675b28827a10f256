package netcfg

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// FabricDevice is the name of a host's device on the lab's fabric.
const FabricDevice = "eth0"

// fabricBridge joins the hosts of a lab in a namespace that holds nothing else.
const fabricBridge = "fabric"

// FabricPort joins one host to a lab's fabric.
type FabricPort struct {
	// Name is the port's device in the fabric's namespace: at most 15 characters, the host's name.
	Name string
	// Netns is the host's network namespace, open.
	Netns *os.File
}

// FabricHost is the configuration of a host on a lab's fabric: a node, or the host outside the overlay.
type FabricHost struct {
	// Addrs are the host's underlay addresses with the fabric's prefix lengths. A host without IPv6, or with
	// IPv6 switched off, gets the IPv4 ones.
	Addrs []netip.Prefix
	// Gateway is where everything outside the fabric goes; the zero Addr means nowhere.
	Gateway netip.Addr
	// Loopback are further addresses of the host, on lo.
	Loopback []netip.Addr
}

// WireFabric joins hosts by a bridge in the calling thread's network namespace, the fabric's: each gets a
// veth pair from a port of the bridge to FabricDevice in the host's namespace. Ports that are there are kept.
func WireFabric(ports []FabricPort) error {
	h, err := open()
	if err != nil {
		return err
	}
	defer h.Close()
	bridge, err := fabricLink(h)
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

// fabricLink makes the bridge unless it is there.
func fabricLink(h *netlink.Handle) (netlink.Link, error) {
	bridge, err := findLink(h, fabricBridge)
	if err != nil {
		return nil, err
	}
	if bridge == nil {
		snooping := false // there is no querier; without one, multicast would stop after a while
		attrs := netlink.NewLinkAttrs()
		attrs.Name = fabricBridge
		if err := h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &snooping}); err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("make bridge %s: %w", fabricBridge, err)
		}
		if bridge, err = h.LinkByName(fabricBridge); err != nil {
			return nil, fmt.Errorf("device %s: %w", fabricBridge, err)
		}
	}
	if err := quietIPv6(fabricBridge); err != nil {
		return nil, err
	}
	return bridge, setUp(h, bridge)
}

func wirePort(h *netlink.Handle, bridge netlink.Link, p FabricPort) error {
	port, err := findLink(h, p.Name)
	if err != nil {
		return err
	}
	if port == nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = p.Name
		// The other end is born in the host's namespace, under its final name: nothing to rename or move.
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: FabricDevice, PeerNamespace: netlink.NsFd(p.Netns.Fd())}
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
	if err := quietIPv6(p.Name); err != nil {
		return err
	}
	return setUp(h, port)
}

// UnplugFabric removes ports of the fabric in the calling thread's network namespace, by their names, with the devices at
// their other ends. Ports that are not there are no error.
func UnplugFabric(names []string) error {
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

// linkLocal gives the link-local address beside IPv6 address p; of an IPv4 one none. Without it the kernel does not ask for
// the neighbours of what it forwards, or sends for containers.
func linkLocal(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4() {
		return netip.Prefix{}
	}
	a := p.Addr().As16()
	copy(a[:8], netip.MustParseAddr("fe80::").AsSlice())
	return netip.PrefixFrom(netip.AddrFrom16(a), 64)
}

// SetupFabricHost gives the calling thread's network namespace, one that WireFabric joined, its address on
// the fabric, its further addresses and its default route, and brings its devices up.
func SetupFabricHost(host FabricHost) error {
	h, err := open()
	if err != nil {
		return err
	}
	defer h.Close()
	if err := SetupLoopback(host.Loopback); err != nil {
		return err
	}
	dev, err := h.LinkByName(FabricDevice)
	if err != nil {
		return fmt.Errorf("device %s: %w", FabricDevice, err)
	}
	if err := quietIPv6(FabricDevice); err != nil {
		return err
	}
	if err := setUp(h, dev); err != nil {
		return err
	}
	off, err := sysctl("ipv6/conf/" + FabricDevice + "/disable_ipv6")
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
			if err := h.AddrReplace(dev, fabricAddr(a)); err != nil {
				return fmt.Errorf("device %s: add address %v: %w", FabricDevice, a, err)
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

// fabricAddr is an address of a fabric, where the lab sees to it that no two hosts have the same.
func fabricAddr(p netip.Prefix) *netlink.Addr {
	mask := net.CIDRMask(p.Bits(), p.Addr().BitLen())
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: mask}}
	if p.Addr().Is6() {
		addr.Flags = unix.IFA_F_NODAD
	}
	return addr
}

// AllowForwarding6 lets the calling thread's network namespace, a node of a lab's, forward IPv6 where the kernel
// cannot allow it for single devices. No agent may do that on a host of somebody's; a lab's nodes take no router
// advertisements. A kernel without IPv6 is left alone.
func AllowForwarding6() error {
	can, err := canForward6()
	if can || errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
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
		if err := h.AddrReplace(lo, &netlink.Addr{IPNet: hostNet(a)}); err != nil {
			return fmt.Errorf("device lo: add address %v: %w", a, err)
		}
	}
	return nil
}

// SetCongestionControl sets the TCP congestion control of the calling thread's network namespace for new
// sockets. A kernel without that algorithm, or one that does not let network namespaces have it
// (net.ipv4.tcp_allowed_congestion_control), keeps its own.
func SetCongestionControl(algorithm string) error {
	err := setSysctl("ipv4/tcp_congestion_control", algorithm)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EPERM) {
		return nil
	}
	return err
}
