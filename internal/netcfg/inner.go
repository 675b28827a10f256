package netcfg

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// translationOverhead is by how much a header of IPv6 is longer than one of IPv4, in bytes.
const translationOverhead = 20

// Inner is what SetInner brings netdev.Inner to.
type Inner struct {
	// Outer is the node's IPv6 address on the network that joins the nodes.
	Outer netip.Addr
	// Addr is the node's inner address, in Prefix: all of that is reached by the device.
	Addr   netip.Addr
	Prefix netip.Prefix
}

// SetInner makes netdev.Inner, or brings the one there to want. What leaves by it is dropped until
// the program is attached that translates it.
func SetInner(want Inner) error {
	h, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	outer, err := findUnderlay(h, want.Outer)
	if err != nil {
		return err
	}
	if err := addPair(h, netdev.Inner, netdev.InnerMAC, netdev.InnerPeer, netdev.InnerPeerMAC); err != nil {
		return err
	}
	link, err := h.LinkByName(netdev.Inner)
	if err != nil {
		return fmt.Errorf("device %s: %w", netdev.Inner, err)
	}
	if err := innerIsFree(h, link, want.Prefix, "--inner-prefix"); err != nil {
		return err
	}
	have, err := ownRoutes(h)
	if err != nil {
		return err
	}
	if err := ensureRoute(h, have, route{table: unix.RT_TABLE_MAIN, dst: want.Prefix, kind: unix.RTN_UNREACHABLE, metric: innerMetric}); err != nil {
		return err
	}
	peer, err := h.LinkByName(netdev.InnerPeer)
	if err != nil {
		return fmt.Errorf("device %s: %w", netdev.InnerPeer, err)
	}
	for _, l := range []netlink.Link{peer, link} {
		// Nobody answers there who has which address: the kernel is not to ask.
		if err := h.LinkSetARPOff(l); err != nil {
			return fmt.Errorf("device %s: no ARP: %w", l.Attrs().Name, err)
		}
		if err := errors.Join(netdev.QuietIPv6(l.Attrs().Name), rtnl.SetMTU(h, l, outer.Attrs().MTU-translationOverhead), rtnl.SetUp(h, l)); err != nil {
			return err
		}
	}
	return setInnerAddr(h, link, netip.PrefixFrom(want.Addr, want.Prefix.Bits()))
}

// RemoveInner deletes the device of an earlier agent, whose underlay was IPv6.
func RemoveInner() error {
	h, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	have, err := rtnl.FindLink(netdev.Inner)
	if err != nil || have == nil || have.Attrs().HardwareAddr.String() != netdev.InnerMAC {
		return err
	}
	return rtnl.DeleteLink(h, have)
}
