package netcfg

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// localDebounce is how long changes of local routes are gathered: an address comes with several.
const localDebounce = 20 * time.Millisecond

// LocalPrefixes lists what is local to this network namespace, sorted: addresses of its devices,
// prefixes that routes of the table "local" make so, and broadcast addresses, which it hears.
// Loopback and IPv6 link-local addresses are left out: containers have their own.
func LocalPrefixes() ([]netip.Prefix, error) {
	h, err := open()
	if err != nil {
		return nil, err
	}
	defer h.Close()
	// So the kernel gives the routes of one table only: others have some for every endpoint.
	// Without it (before 4.20) it gives all.
	_ = h.SetStrictCheck(true)
	var out []netip.Prefix
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := dump(func() ([]netlink.Route, error) {
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
				out = append(out, fromIPNet(r.Dst))
			}
		}
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return slices.Compact(out), nil
}

// isListed reports whether a route of the table "local" is for LocalPrefixes. Those that come with
// each endpoint's device are not.
func isListed(r netlink.Route) bool {
	p := fromIPNet(r.Dst)
	if r.Type != unix.RTN_LOCAL && r.Type != unix.RTN_BROADCAST || !p.IsValid() {
		return false
	}
	a := p.Addr()
	return !a.IsLoopback() && !(a.Is6() && a.IsLinkLocalUnicast())
}

// FollowLocal calls changed with LocalPrefixes at once, and again whenever they are others, until
// ctx ends or the kernel's messages are lost: then it gives the error, and may be called again.
func FollowLocal(ctx context.Context, changed func([]netip.Prefix)) error {
	done := make(chan struct{})
	defer close(done)
	updates, lost := make(chan netlink.RouteUpdate, 256), make(chan error, 1)
	err := netlink.RouteSubscribeWithOptions(updates, done, netlink.RouteSubscribeOptions{ErrorCallback: func(err error) {
		select {
		case lost <- err:
		default:
		}
	}})
	if err != nil {
		return fmt.Errorf("follow routes: %w", err)
	}
	// Whoever subscribed has to read, or the library's goroutine never ends.
	defer func() {
		go func() {
			for range updates {
			}
		}()
	}()
	last, err := LocalPrefixes()
	if err != nil {
		return err
	}
	changed(last)
	var debounced <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-lost:
			return fmt.Errorf("follow routes: %w", err)
		case u, ok := <-updates:
			if !ok {
				return errors.New("follow routes: the kernel's messages ended")
			}
			if debounced == nil && u.Route.Table == unix.RT_TABLE_LOCAL && isListed(u.Route) {
				debounced = time.After(localDebounce)
			}
		case <-debounced:
			debounced = nil
			next, err := LocalPrefixes()
			if err != nil {
				return err
			}
			if !slices.Equal(next, last) {
				last = next
				changed(next)
			}
		}
	}
}
