package netcfg

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"

	"heddle.dev/heddle/internal/netcfg/firewall"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// Teardown removes everything of Heddle's from this network namespace: endpoints' pairs, the
// overlay and the divert pair, routes, rules, the nftables table and tc programs. It says what it
// removed, in an operator's words. What is not there is no error, and an error at one thing does
// not keep the rest. Forwarding (ip_forward) stays on, because others may have come to need it.
func Teardown() (removed []string, err error) {
	h, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer h.Close()
	gone := func(format string, args ...any) { removed = append(removed, fmt.Sprintf(format, args...)) }
	var table bool
	errs := []error{
		detachAll(h, gone),
		detachLimiters(h, gone),
		deleteOwnLinks(h, gone),
		deleteOwnRoutes(h, gone),
		eachOwnRule(h, func(r netlink.Rule) error {
			gone("rule %s: fwmark %#x lookup %d", familyName(r.Family), r.Mark, r.Table)
			return deleteRule(h, r)
		}),
	}
	table, err = firewall.Delete()
	if table {
		gone("nftables table inet %s", firewall.Table)
	}
	return removed, errors.Join(append(errs, err)...)
}

func familyName(family int) string {
	if family == netlink.FAMILY_V6 {
		return "IPv6"
	}
	return "IPv4"
}

func deleteOwnLinks(h *netlink.Handle, gone func(string, ...any)) error {
	links, err := rtnl.Dump(h.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	var errs []error
	for _, l := range links {
		_, endpoint := netdev.EndpointOf(l)
		overlay := l.Attrs().Name == netdev.Overlay && l.Type() == "vxlan"
		divert := l.Attrs().Name == netdev.Divert && l.Attrs().HardwareAddr.String() == netdev.DivertMAC
		shape := l.Attrs().Name == netdev.Shape && l.Attrs().HardwareAddr.String() == netdev.ShapeMAC
		encrypted := l.Attrs().Name == netdev.WireGuard && l.Type() == "wireguard"
		inner := l.Attrs().Name == netdev.Inner && l.Attrs().HardwareAddr.String() == netdev.InnerMAC
		if endpoint || overlay || divert || shape || encrypted || inner { // the other ends of pairs go with them
			errs = append(errs, rtnl.DeleteLink(h, l))
			gone("device %s", l.Attrs().Name)
		}
	}
	return errors.Join(errs...)
}

// deleteOwnRoutes removes the routes that did not go with their devices.
func deleteOwnRoutes(h *netlink.Handle, gone func(string, ...any)) error {
	have, err := ownRoutes(h)
	if err != nil {
		return err
	}
	if len(have) > 0 {
		gone("%d routes", len(have))
	}
	return pruneRoutes(h, have, func(route) bool { return true })
}
