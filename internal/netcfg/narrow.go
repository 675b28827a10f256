package netcfg

import (
	"fmt"
	"net/netip"

	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// NarrowRoute names the first of nodes to which the kernel's route says that packets are to be
// smaller than its device takes; "" if there is none. Nodes without a route do not count.
func NarrowRoute(nodes []netip.Addr) (string, error) {
	h, err := rtnl.Open()
	if err != nil {
		return "", err
	}
	defer h.Close()
	mtus := map[int]int{}
	for _, to := range nodes {
		routes, err := h.RouteGet(to.AsSlice())
		if err != nil || len(routes) == 0 || routes[0].MTU == 0 {
			continue
		}
		index := routes[0].LinkIndex
		if mtus[index] == 0 {
			link, err := h.LinkByIndex(index)
			if err != nil {
				return "", fmt.Errorf("device of the route to %v: %w", to, err)
			}
			mtus[index] = link.Attrs().MTU
		}
		if routes[0].MTU < mtus[index] {
			return fmt.Sprintf("the route to %v has MTU %d", to, routes[0].MTU), nil
		}
	}
	return "", nil
}
