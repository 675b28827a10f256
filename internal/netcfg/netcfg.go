// Package netcfg brings the kernel's network configuration of one node to what the agent wants: the
// VXLAN overlay, one veth pair a container, routes, rules, address translation and tc filters. It
// decides nothing.
//
// Every function works on the network namespace of the calling thread, which for the agent is the
// node's. Each brings actual to desired and takes away what is stale, so a call can be repeated,
// and repeated after a kill half-way through. What is Heddle's is known by its names and its
// hardware addresses (devices), by the routing protocol number (routes, rules) and by the table's
// name (nftables); nothing else is changed or removed.
//
// The package keeps no state and takes no locks, but for NodeDevices.Firewall. Callers serialise
// calls that change the same node or the same endpoint; internal/node's reconciler does.
package netcfg

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/firewall"
)

// DefaultVXLANPort is IANA's UDP port for VXLAN.
const DefaultVXLANPort = 4789

// maxVNI is the largest VXLAN network identifier: 24 bits.
const maxVNI = 1<<24 - 1

// routeProtocol marks routes and rules as Heddle's (rtm_protocol); `ip route` shows "proto 72".
const routeProtocol = 72

// Bytes that VXLAN encapsulation adds to an inner packet: inner Ethernet, VXLAN, UDP and outer IP
// headers.
const (
	vxlanOverhead4 = 14 + 8 + 8 + 20
	vxlanOverhead6 = 14 + 8 + 8 + 40
)

// NodeConfig is what SetupNode brings a node to.
type NodeConfig struct {
	// Underlay is the node's address on the network that joins the nodes. Some device here has it.
	Underlay netip.Addr
	// Outer is set if Underlay is an inner address, of netdev.WireGuard or, if Translated, of
	// netdev.Inner: then it is the node's address on that network, and Inner the prefix of all
	// inner addresses.
	Outer      netip.Addr
	Inner      netip.Prefix
	Translated bool
	// Prefixes are the node's own overlay prefixes, one a family at most. With an IPv6 one,
	// CheckIPv6 has found nothing amiss.
	Prefixes []netip.Prefix
	// Pool is what the prefixes of all nodes are taken from. Traffic of containers to addresses
	// outside it leaves with the node's address.
	Pool []netip.Prefix
	// VNI is the VXLAN network identifier, 1..2^24-1, equal on all nodes.
	VNI uint32
	// VXLANPort is the UDP port of the overlay, equal on all nodes; 0 means DefaultVXLANPort.
	VXLANPort uint16
	// Mark is the packet mark (host byte order) that makes the addresses of intercepted endpoints
	// local: "fwmark Mark lookup Table" at priority RulePref.
	Mark uint32
	// OverlayMark is the mark of node sockets whose packets must take the overlay's routes. It
	// selects no table, so it only has to differ from Mark.
	OverlayMark uint32
	// DropMark is the mark of sockets whose packets are dropped on their way out, RejectMark the
	// packet mark of what is answered by a RST or an ICMP error and goes no further. Both differ
	// from the others.
	DropMark, RejectMark uint32
	// ServiceMark, without and with the lowest bit, is the mark of packets to services, which leave
	// the node only as policy has been asked about.
	ServiceMark uint32
	// DirectPorts are the TCP ports, in host byte order, that direct connections to any node use.
	// Their packets are never translated, so they are not tracked either.
	DirectPorts model.PortRange
	// Stores are where the nodes' store answers: containers are refused there.
	Stores []netip.AddrPort
	// Published are the ports that led to containers before; Firewall.SetPublished changes them.
	Published []firewall.Published
	// Table is the routing table that Mark selects; it holds nothing but Heddle's routes.
	Table int
	// RulePref is the rule's priority: smaller than 32766 to come before the main table.
	RulePref int
}

// NodeDevices describes what SetupNode made or found.
type NodeDevices struct {
	UnderlayIfindex int
	UnderlayName    string
	// OuterIfindex is the device of the network that joins the nodes. It is UnderlayIfindex, unless
	// the node has an inner address.
	OuterIfindex int
	// OuterMTU is what OverlayMTU was made of: that of the device, in bytes.
	OuterMTU int
	// Outer is the node's IPv6 address there, to and from which packets of UnderlayIfindex are
	// translated; the zero Addr: they are not.
	Outer netip.Addr
	// OverlayIfindex is that of netdev.Overlay. It changes when SetupNode had to make the device
	// anew.
	OverlayIfindex int
	// DivertIfindex is that of netdev.Divert.
	DivertIfindex int
	// VTEPMAC is the hardware address of the overlay device. It depends on the underlay address
	// only.
	VTEPMAC string
	// OverlayMTU is the largest packet, in bytes, that the overlay carries; containers use it.
	OverlayMTU int
	// Prefixes are the node's own prefixes, and Gateways the node's address in each.
	Prefixes []netip.Prefix
	Gateways []netip.Addr
	// Firewall is the node's nftables table.
	Firewall *firewall.Rules
}

// hasInner reports whether Underlay is an inner address.
func (c NodeConfig) hasInner() bool { return c.Outer.IsValid() }

// outer is the node's address on the network that joins the nodes.
func (c NodeConfig) outer() netip.Addr {
	if c.hasInner() {
		return c.Outer
	}
	return c.Underlay
}

// vtep is the address that VXLAN is sent from: encrypted if all is, and never translated.
func (c NodeConfig) vtep() netip.Addr {
	if c.Translated {
		return c.Outer
	}
	return c.Underlay
}

// firewall is what of c the node's nftables table is made of.
func (c NodeConfig) firewall() firewall.Config {
	return firewall.Config{
		Underlay: c.Underlay, HasInner: c.hasInner(), Inner: c.Inner, VTEP: c.vtep(), VXLANPort: c.VXLANPort, VNI: c.VNI,
		Prefixes: c.Prefixes, Gateways: gateways(c.Prefixes), Pool: c.Pool,
		Mark: c.Mark, OverlayMark: c.OverlayMark, DropMark: c.DropMark, RejectMark: c.RejectMark, ServiceMark: c.ServiceMark,
		DirectPorts: c.DirectPorts, Stores: c.Stores, Published: c.Published,
	}
}

// HasInner reports whether the underlay is a device of inner addresses, WireGuard's or
// netdev.Inner.
func (d NodeDevices) HasInner() bool { return d.OuterIfindex != d.UnderlayIfindex }

// Encrypted reports whether the underlay is WireGuard's device, which has no Ethernet header.
func (d NodeDevices) Encrypted() bool { return d.HasInner() && !d.Outer.IsValid() }

// validate fills defaults and reports the first wrong field.
func (c *NodeConfig) validate() error {
	if !c.Underlay.IsValid() || c.Underlay.IsUnspecified() || c.Underlay.IsMulticast() {
		return fmt.Errorf("underlay %v: want the address other nodes reach this node by", c.Underlay)
	}
	if c.VNI == 0 || c.VNI > maxVNI {
		return fmt.Errorf("vni %d: want 1..%d", c.VNI, maxVNI)
	}
	if c.VXLANPort == 0 {
		c.VXLANPort = DefaultVXLANPort
	}
	marks := []uint32{0, c.Mark, c.OverlayMark, c.DropMark, c.RejectMark, c.ServiceMark, c.ServiceMark | 1}
	for i, m := range marks {
		if slices.Contains(marks[:i], m) {
			return fmt.Errorf("marks %#x: want different ones that are not 0", marks[1:])
		}
	}
	// 253..255 are the kernel's default, main and local tables; 0 means "any".
	if c.Table <= 0 || c.Table >= 253 && c.Table <= 255 {
		return fmt.Errorf("table %d: want a routing table of Heddle's own, 1..252 or above 255", c.Table)
	}
	if c.RulePref <= 0 || c.RulePref >= 32766 {
		return fmt.Errorf("rule priority %d: want 1..32765, before the main table", c.RulePref)
	}
	return c.validatePrefixes()
}

func (c *NodeConfig) validatePrefixes() error {
	seen := map[bool]bool{}
	for _, p := range c.Prefixes {
		if err := validPrefix(p); err != nil {
			return err
		}
		if seen[p.Addr().Is4()] {
			return fmt.Errorf("prefixes %v: want one a family at most", c.Prefixes)
		}
		seen[p.Addr().Is4()] = true
		if !inPool(p, c.Pool) {
			return fmt.Errorf("prefix %v: not inside the pool %v", p, c.Pool)
		}
		if p.Overlaps(model.MirrorRange) {
			return fmt.Errorf("prefix %v: overlaps %v, which stands for containers' own stacks; choose another pool", p, model.MirrorRange)
		}
		if p.Contains(c.Underlay) {
			return fmt.Errorf("prefix %v: contains the underlay address %v; choose another pool", p, c.Underlay)
		}
	}
	if len(c.Prefixes) == 0 {
		return errors.New("prefixes: want at least one overlay prefix")
	}
	return nil
}

// validPrefix accepts masked unicast prefixes with room for a gateway and an endpoint.
func validPrefix(p netip.Prefix) error {
	if !p.IsValid() || p != p.Masked() || p.Addr().Is4In6() || p.Bits() > p.Addr().BitLen()-2 {
		return fmt.Errorf("prefix %v: want a network address with room for two hosts, such as 10.1.2.0/24", p)
	}
	return nil
}

func inPool(p netip.Prefix, pool []netip.Prefix) bool {
	for _, q := range pool {
		if q.Contains(p.Addr()) && q.Bits() <= p.Bits() {
			return true
		}
	}
	return false
}

// overlayMTU is the largest packet, in bytes, that fits through an overlay over this underlay.
func overlayMTU(link netlink.Link, underlay netip.Addr) int {
	if underlay.Is6() {
		return link.Attrs().MTU - vxlanOverhead6
	}
	return link.Attrs().MTU - vxlanOverhead4
}

// gateways gives the node's own address in each prefix.
func gateways(prefixes []netip.Prefix) []netip.Addr {
	out := make([]netip.Addr, len(prefixes))
	for i, p := range prefixes {
		out[i] = model.Gateway(p)
	}
	return out
}

// vtepMAC derives the overlay device's hardware address from the underlay address: unique among the
// nodes of an IPv4 underlay, and the same after every restart, so that peers' entries stay right.
func vtepMAC(underlay netip.Addr) net.HardwareAddr {
	if underlay.Is4() {
		a := underlay.As4()
		return net.HardwareAddr{0x02, 0x48, a[0], a[1], a[2], a[3]}
	}
	h := fnv.New32a()
	a := underlay.As16()
	h.Write(a[:])
	return net.HardwareAddr(h.Sum([]byte{0x02, 0x48}))
}
