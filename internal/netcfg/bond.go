package netcfg

import (
	"fmt"

	"github.com/vishvananda/netlink"

	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// SendsWithManyAddresses reports whether a device, or one that it is on, is a bond that gives what
// it sends the hardware addresses of several devices.
func SendsWithManyAddresses(ifindex int) (bool, error) {
	h, err := rtnl.Open()
	if err != nil {
		return false, err
	}
	defer h.Close()
	for ifindex != 0 {
		l, err := h.LinkByIndex(ifindex)
		if err != nil {
			return false, fmt.Errorf("device %d: %w", ifindex, err)
		}
		if b, ok := l.(*netlink.Bond); ok {
			return b.Mode == netlink.BOND_MODE_BALANCE_ALB || b.Mode == netlink.BOND_MODE_BALANCE_TLB, nil
		}
		if l.Type() != "vlan" {
			return false, nil
		}
		ifindex = l.Attrs().ParentIndex
	}
	return false, nil
}
