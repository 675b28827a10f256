package netcfg

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
)

// Teardown removes everything of Heddle's from this network namespace: endpoints' pairs, the overlay and the
// delivery pair, routes, rules, the nftables table and tc programs. What is not there is no error, and an error
// at one thing does not keep the rest. Forwarding (ip_forward) stays on, because others may have come to
// need it.
func Teardown() error {
	h, err := open()
	if err != nil {
		return err
	}
	defer h.Close()
	return errors.Join(
		detachAll(h),
		detachLimiters(h),
		deleteOwnLinks(h),
		deleteOwnRoutes(h),
		eachOwnRule(h, func(r netlink.Rule) error { return deleteRule(h, r) }),
		deleteFirewall(),
	)
}

func deleteOwnLinks(h *netlink.Handle) error {
	links, err := dump(h.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	var errs []error
	for _, l := range links {
		_, endpoint := endpointOf(l)
		overlay := l.Attrs().Name == OverlayDevice && l.Type() == "vxlan"
		deliver := l.Attrs().Name == DeliverDevice && l.Attrs().HardwareAddr.String() == DeliverMAC
		shape := l.Attrs().Name == ShapeDevice && l.Attrs().HardwareAddr.String() == shapeMAC
		if endpoint || overlay || deliver || shape { // deliverPeer goes with DeliverDevice
			errs = append(errs, deleteLink(h, l))
		}
	}
	return errors.Join(errs...)
}

func deleteOwnRoutes(h *netlink.Handle) error {
	have, err := ownRoutes(h)
	if err != nil {
		return err
	}
	return pruneRoutes(h, have, func(route) bool { return true })
}
