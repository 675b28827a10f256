package netcfg

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// localDebounce is how long changes of local routes are gathered: an address comes with several.
const localDebounce = 20 * time.Millisecond

// LocalPrefixes lists what is local to this network namespace, sorted: addresses of its devices,
// prefixes that routes of the table "local" make so, and broadcast addresses, which it hears.
// Loopback and IPv6 link-local addresses are left out: containers have their own.
func LocalPrefixes() ([]netip.Prefix, error) {
	h, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer h.Close()
	// So the kernel gives the routes of one table only: others have some for every endpoint.
	// Without it (before 4.20) it gives all.
	_ = h.SetStrictCheck(true)
	var out []netip.Prefix
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := rtnl.Dump(func() ([]netlink.Route, error) {
			return h.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_LOCAL}, netlink.RT_FILTER_TABLE)
		})
		if errors.Is(err, unix.ENOENT) {
			continue // the kernel has no such table of this family
		}
		if err != nil {
			return nil, fmt.Errorf("list local routes: %w", err)
		}
		for _, r := range routes {
			if isListed(r) {
				out = append(out, rtnl.FromIPNet(r.Dst))
			}
		}
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return slices.Compact(out), nil
}

// isListed reports whether a route of the table "local" is for LocalPrefixes. Those that come with
// each endpoint's device are not.
func isListed(r netlink.Route) bool {
	p := rtnl.FromIPNet(r.Dst)
	if r.Type != unix.RTN_LOCAL && r.Type != unix.RTN_BROADCAST || !p.IsValid() {
		return false
	}
	a := p.Addr()
	return !a.IsLoopback() && !(a.Is6() && a.IsLinkLocalUnicast())
}

// FollowLocal calls changed with LocalPrefixes at once, and again whenever they are others, until
// ctx ends or the kernel's messages are lost: then it gives the error, and may be called again.
func FollowLocal(ctx context.Context, changed func([]netip.Prefix)) error {
	routes, err := followRoutes()
	if err != nil {
		return err
	}
	defer routes.Close()
	defer context.AfterFunc(ctx, func() { _ = routes.Close() })()
	message := make([]byte, rtnl.AnswerBytes)
	var last []netip.Prefix
	for first := true; ; first = false {
		next, err := LocalPrefixes()
		if err != nil {
			return err
		}
		if first || !slices.Equal(next, last) {
			last = next
			changed(next)
		}
		err = awaitLocal(routes, message)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("follow routes: %w", err)
		}
	}
}

// followRoutes gives a socket that the kernel tells of each change of a route.
func followRoutes() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("follow routes: open netlink: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: unix.RTMGRP_IPV4_ROUTE | unix.RTMGRP_IPV6_ROUTE}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("follow routes: %w", err)
	}
	return os.NewFile(uintptr(fd), "netlink"), nil
}

// awaitLocal waits for a change that may be one of LocalPrefixes, and for what comes with it. It
// looks at no more than the kind of a route: each endpoint of the node has some of other tables.
func awaitLocal(routes *os.File, message []byte) error {
	for waits := true; waits; {
		n, err := routes.Read(message)
		if err != nil {
			return err
		}
		all, err := syscall.ParseNetlinkMessage(message[:n])
		if err != nil {
			return err
		}
		for _, m := range all {
			waits = waits && !(len(m.Data) >= unix.SizeofRtMsg && m.Data[4] == unix.RT_TABLE_LOCAL && (m.Data[7] == unix.RTN_LOCAL || m.Data[7] == unix.RTN_BROADCAST))
		}
	}
	if err := routes.SetReadDeadline(time.Now().Add(localDebounce)); err != nil {
		return err
	}
	for {
		if _, err := routes.Read(message); errors.Is(err, os.ErrDeadlineExceeded) {
			return routes.SetReadDeadline(time.Time{})
		} else if err != nil {
			return err
		}
	}
}
