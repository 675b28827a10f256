package netcfg

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/netcfg/sysctl"
	"heddle.dev/heddle/internal/netns"
)

// What a container's own stack can be given without a program in it: metrics of the routes of its
// device, and settings of its network namespace. They are names of the keys of what FollowOwnStack
// takes; every other key is a path below /proc/sys/net.
const (
	RouteCongestion = "congctl"  // of connections that have the route, whoever opens them
	RouteWindow     = "initcwnd" // their first window
)

// Kept is what a container, or its operator, has set otherwise, and so is left as it is.
type Kept map[string]string

// FollowOwnStack brings the own stack of the container at path from what an earlier call gave it,
// had, to want, and gives what it has left alone: what is neither had's value nor what a new
// network namespace has is somebody's, who may change it while this runs, and whenever he likes. A
// container without its device yet has no routes.
func FollowOwnStack(path, device string, had, want map[string]string) (Kept, error) {
	keys := slices.Sorted(maps.Keys(union(had, want)))
	usual, err := usualSysctls(keys)
	if err != nil {
		return nil, err
	}
	kept := make(Kept)
	err = InContainer(path, func() error {
		n, err := sysctl.Open()
		if err != nil {
			return err
		}
		defer n.Close()
		var errs []error
		for _, key := range keys {
			if isMetric(key) {
				continue
			}
			now, err := n.Get(key)
			if to, write := next(kept, key, now, usual[key], had, want); err == nil && write {
				err = n.Set(sysctl.Setting{Path: key, Value: to})
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("container: %s: %w", key, err))
			}
		}
		return errors.Join(append(errs, followMetrics(kept, device, had, want))...)
	})
	return kept, err
}

func union(a, b map[string]string) map[string]string {
	out := maps.Clone(a)
	if out == nil {
		out = make(map[string]string)
	}
	maps.Copy(out, b)
	return out
}

func isMetric(key string) bool { return key == RouteCongestion || key == RouteWindow }

// next says what is to be where now is, and whether it is to be written.
func next(kept Kept, key, now, usual string, had, want map[string]string) (to string, write bool) {
	to, wanted := want[key]
	if !wanted {
		to = usual
	}
	now = strings.Join(strings.Fields(now), " ")
	if now == to {
		return to, false
	}
	if old, ours := had[key]; now != usual && (!ours || now != old) {
		if wanted {
			kept[key] = now
		}
		return to, false
	}
	return to, true
}

// usualSysctls gives what a new network namespace has of those that are no metrics. Of some that is
// the machine's first one's, which the agent may not be in.
func usualSysctls(keys []string) (map[string]string, error) {
	out := make(map[string]string)
	if !slices.ContainsFunc(keys, func(key string) bool { return !isMetric(key) }) {
		return out, nil
	}
	err := netns.OnDiscardedThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		n, err := sysctl.Open()
		if err != nil {
			return err
		}
		defer n.Close()
		for _, key := range keys {
			if isMetric(key) {
				continue
			}
			value, err := n.Get(key)
			if err != nil {
				return err
			}
			out[key] = strings.Join(strings.Fields(value), " ")
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("what a new network namespace has: %w", err)
	}
	return out, nil
}

// followMetrics is FollowOwnStack for the routes of a device, in this network namespace. Those of
// router advertisements are the kernel's to replace.
func followMetrics(kept Kept, device string, had, want map[string]string) error {
	h, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	link, err := rtnl.FindLink(device)
	if err != nil || link == nil {
		return err
	}
	var errs []error
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := rtnl.Dump(func() ([]netlink.Route, error) { return routesOf(h, family, link) })
		if err != nil {
			errs = append(errs, fmt.Errorf("container: list routes: %w", err))
			continue
		}
		for i := range routes {
			r := &routes[i]
			if r.Type != unix.RTN_UNICAST || r.Protocol == unix.RTPROT_RA || !setMetrics(kept, r, had, want) {
				continue
			}
			if err := h.RouteReplace(r); err != nil {
				errs = append(errs, fmt.Errorf("container: route to %v: %w", r.Dst, err))
			}
		}
	}
	return errors.Join(errs...)
}

// maxRoutes is how many routes of a family its device may have for them to be given metrics. Its
// root may add a million, of which each would be memory of the agent and a message to the kernel.
const maxRoutes = 64

// routesOf gives the main table's routes of a family by the device.
func routesOf(h *netlink.Handle, family int, link netlink.Link) ([]netlink.Route, error) {
	var out []netlink.Route
	filter := &netlink.Route{Table: unix.RT_TABLE_MAIN, LinkIndex: link.Attrs().Index}
	mask := netlink.RT_FILTER_TABLE | netlink.RT_FILTER_OIF
	err := h.RouteListFilteredIter(family, filter, mask, func(r netlink.Route) bool {
		out = append(out, r)
		return len(out) <= maxRoutes
	})
	if len(out) > maxRoutes {
		return nil, fmt.Errorf("more than %d by %s", maxRoutes, link.Attrs().Name)
	}
	return out, err
}

// setMetrics brings those of a route there and reports whether that changed it.
func setMetrics(kept Kept, r *netlink.Route, had, want map[string]string) (changed bool) {
	if to, write := next(kept, RouteCongestion, r.Congctl, "", had, want); write {
		r.Congctl, changed = to, true
	}
	window := ""
	if r.InitCwnd != 0 {
		window = strconv.Itoa(r.InitCwnd)
	}
	if to, write := next(kept, RouteWindow, window, "", had, want); write {
		r.InitCwnd, _ = strconv.Atoi(to) // "": none
		changed = true
	}
	return changed
}
