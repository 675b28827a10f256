package netcfg

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/netns"
)

// TestFollowLocal adds and removes addresses and a local route, and expects to be told of each.
func TestFollowLocal(t *testing.T) {
	top := newTopology(t)
	in(t, top.node[0], func() error {
		ctx, cancel := context.WithCancel(t.Context())
		told, ended := make(chan []netip.Prefix, 100), make(chan error, 1)
		// The subscription belongs to the namespace of the thread that makes it.
		start := make(chan struct{})
		go func() {
			ended <- netns.Do(top.node[0], func() error {
				close(start)
				return FollowLocal(ctx, func(p []netip.Prefix) { told <- p })
			})
		}()
		<-start
		defer func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}()
		expect := func(what string, present bool) error {
			p := netip.MustParsePrefix(what)
			for deadline := time.After(30 * time.Second); ; {
				select {
				case local := <-told:
					if slices.Contains(local, p) == present {
						return nil
					}
				case <-deadline:
					return fmt.Errorf("not told within 30 s that %s is local: %v", p, present)
				}
			}
		}
		first := <-told
		for _, p := range first {
			if a := p.Addr(); a.IsLoopback() || a.Is6() && a.IsLinkLocalUnicast() {
				t.Errorf("%s is among what is local", p)
			}
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		for _, a := range []string{"198.51.100.7/32", "2001:db8::7/128", "169.254.20.10/32"} {
			addr := &netlink.Addr{IPNet: rtnl.ToIPNet(netip.MustParsePrefix(a))}
			if err := netlink.AddrAdd(lo, addr); err != nil {
				return err
			}
			if err := expect(a, true); err != nil {
				return err
			}
			if err := netlink.AddrDel(lo, addr); err != nil {
				return err
			}
			if err := expect(a, false); err != nil {
				return err
			}
		}
		wide := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(198, 51, 100, 9), Mask: net.CIDRMask(29, 32)}, Broadcast: net.IPv4(198, 51, 100, 15)}
		if err := netlink.AddrAdd(lo, wide); err != nil {
			return err
		}
		if err := expect("198.51.100.15/32", true); err != nil {
			return err
		}
		route := &netlink.Route{Dst: rtnl.ToIPNet(netip.MustParsePrefix("198.51.100.0/25")), LinkIndex: lo.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST}
		if err := netlink.RouteAdd(route); err != nil {
			return err
		}
		return expect("198.51.100.0/25", true)
	})
}
