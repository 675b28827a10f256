package netcfg

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// UseNeighbour has the kernel look for the hardware address of addr behind a device, or see whether
// it still holds, as sending a packet would have it.
func UseNeighbour(ifindex int, addr netip.Addr) error {
	h := rtnl.Each()
	err := h.NeighSet(&netlink.Neigh{LinkIndex: ifindex, Family: rtnl.FamilyOf(addr), IP: addr.AsSlice(), Flags: netlink.NTF_USE, State: unix.NUD_NONE})
	if err != nil {
		return fmt.Errorf("neighbour %v: %w", addr, err)
	}
	return nil
}
