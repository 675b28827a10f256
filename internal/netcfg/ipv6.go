package netcfg

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/netcfg/sysctl"
)

// minMTU6 is the smallest packet every IPv6 link must carry; the kernel has no IPv6 on a device
// with less.
const minMTU6 = 1280

// IPv6Error says why this node can have no IPv6 overlay addresses.
type IPv6Error struct {
	// Check names what is lacking: "ipv6_mtu", or the name that `heddle doctor` has for it.
	Check string
	Err   error
}

// Error implements error.
func (e *IPv6Error) Error() string { return fmt.Sprintf("%s: %v", e.Check, e.Err) }

// Unwrap gives the cause.
func (e *IPv6Error) Unwrap() error { return e.Err }

// CheckIPv6 reports, as an *IPv6Error, what keeps the calling thread's network namespace from
// having IPv6 overlay addresses with this underlay address. Any other error is one of looking.
func CheckIPv6(underlay netip.Addr) error {
	for _, device := range []string{"all", "lo"} {
		off, err := sysctl.Get("ipv6/conf/" + device + "/disable_ipv6")
		if errors.Is(err, os.ErrNotExist) {
			return &IPv6Error{"ipv6", errors.New("the kernel has none")}
		}
		if err != nil {
			return err
		}
		if off != "0" {
			return &IPv6Error{"ipv6_enabled", fmt.Errorf("net.ipv6.conf.%s.disable_ipv6 = %s", device, off)}
		}
	}
	can, err := canForward6()
	if err != nil {
		return err
	}
	if !can {
		return &IPv6Error{"ipv6_forwarding", errors.New("net.ipv6.conf.all.forwarding = 0, and this kernel cannot forward for single devices")}
	}
	h, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	if _, err := rtnl.Dump(func() ([]netlink.Rule, error) { return h.RuleList(netlink.FAMILY_V6) }); err != nil {
		return &IPv6Error{"net_rule_fwmark_ipv6", fmt.Errorf("list rules: %w", err)}
	}
	link, err := findUnderlay(h, underlay)
	if err != nil {
		return err
	}
	if mtu := overlayMTU(link, underlay); mtu < minMTU6 {
		return &IPv6Error{"ipv6_mtu", fmt.Errorf("%d bytes fit through the overlay, IPv6 needs %d: raise the mtu of %s by %d",
			mtu, minMTU6, link.Attrs().Name, minMTU6-mtu)}
	}
	return nil
}

// canForward6 reports whether IPv6 packets can be forwarded without changing what others see:
// single devices can be allowed to (Linux 6.17), or the machine is a router already.
func canForward6() (bool, error) {
	if _, err := sysctl.Get("ipv6/conf/all/force_forwarding"); err == nil || !errors.Is(err, os.ErrNotExist) {
		return err == nil, err
	}
	on, err := sysctl.Get("ipv6/conf/all/forwarding")
	return on != "0", err
}

// forwardFrom lets IPv6 packets that arrive by device be forwarded. The setting for the whole
// machine would make it a router: the kernel discards default routes that router advertisements
// set, and takes no more. "forwarding" of a single device forwards nothing.
func forwardFrom(n *sysctl.Namespace, device string) error {
	if on, err := n.Get("ipv6/conf/all/forwarding"); err != nil {
		return err
	} else if on != "0" {
		return nil
	}
	return n.Set(sysctl.Setting{Path: "ipv6/conf/" + device + "/force_forwarding", Value: "1"})
}

// setForwarding6 lets IPv6 packets be forwarded that come in by the overlay and from outside: by
// the underlay's device and those of default routes, where answers to masqueraded connections
// arrive. AddEndpoint does the same for endpoints' devices.
func setForwarding6(h *netlink.Handle, underlay netlink.Link) error {
	devices := []string{netdev.Overlay, underlay.Attrs().Name}
	routes, err := rtnl.Dump(func() ([]netlink.Route, error) {
		return h.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return fmt.Errorf("list routes: %w", err)
	}
	for _, r := range routes {
		if rtnl.FromIPNet(r.Dst).Bits() > 0 || r.Type != unix.RTN_UNICAST {
			continue
		}
		links := []int{r.LinkIndex}
		for _, hop := range r.MultiPath {
			links = append(links, hop.LinkIndex)
		}
		for _, index := range links {
			l, err := h.LinkByIndex(index)
			if err != nil {
				continue // a route with several next hops has no device itself; others may just have gone
			}
			devices = append(devices, l.Attrs().Name)
		}
	}
	n, err := sysctl.Open()
	if err != nil {
		return err
	}
	defer n.Close()
	for _, d := range devices {
		if err := forwardFrom(n, d); err != nil {
			return err
		}
	}
	return nil
}

// ready6 is netdev.QuietIPv6 for a device that may have one of addrs: that undoes for the device,
// and for others, what the namespace's default may say, and then it is an error if there is no
// IPv6.
func ready6(n *sysctl.Namespace, device string, addrs []netip.Addr, others ...string) error {
	if err := netdev.QuietIPv6In(n, device); err != nil || !hasIPv6(addrs) {
		return err
	}
	for _, d := range append(others, device) {
		if err := n.Set(sysctl.Setting{Path: "ipv6/conf/" + d + "/disable_ipv6", Value: "0"}); err != nil {
			return err
		}
	}
	return nil
}

// How long the kernel may take to deliver packets to a new IPv6 address, and how often it is asked.
const (
	addressUsable = 2 * time.Second
	addressPoll   = 200 * time.Microsecond
)

// awaitAddrs6 waits until addresses that were just added to l receive packets: the kernel makes
// their local routes in a worker of its own, mostly before this looks.
func awaitAddrs6(l netlink.Link, addrs []netip.Addr) error {
	deadline := time.Now().Add(addressUsable)
	for len(addrs) > 0 {
		local, err := rtnl.Dump(func() ([]netip.Addr, error) { return localAddrs6(l.Attrs().Index) })
		if err != nil {
			return fmt.Errorf("list routes: %w", err)
		}
		addrs = slices.DeleteFunc(addrs, func(a netip.Addr) bool { return slices.Contains(local, a) })
		if len(addrs) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("device %s: the kernel does not take address %v into use", l.Attrs().Name, addrs[0])
		}
		time.Sleep(addressPoll)
	}
	return nil
}

// localAddrs6 lists the IPv6 addresses at which this namespace receives packets by a device.
func localAddrs6(index int) (local []netip.Addr, err error) {
	msg := nl.NewRtMsg()
	msg.Family = unix.AF_INET6
	order := nl.NativeEndian()
	err = rtnl.Ask(unix.RTM_GETROUTE, unix.NLM_F_DUMP, func(m syscall.NetlinkMessage) bool {
		if len(m.Data) < unix.SizeofRtMsg || m.Data[7] != unix.RTN_LOCAL {
			return true
		}
		attrs, parse := syscall.ParseNetlinkRouteAttr(&m)
		if parse != nil {
			return true
		}
		var dst netip.Addr
		by := 0
		for _, a := range attrs {
			switch {
			case a.Attr.Type == unix.RTA_DST:
				dst, _ = netip.AddrFromSlice(a.Value)
			case a.Attr.Type == unix.RTA_OIF && len(a.Value) == 4:
				by = int(order.Uint32(a.Value))
			}
		}
		if by == index {
			local = append(local, dst)
		}
		return true
	}, msg)
	return local, err
}

// enableIPv6 undoes for one device what the namespace's default may say, if it is to have one of
// addrs.
func enableIPv6(device string, addrs []netip.Addr) error {
	if !hasIPv6(addrs) {
		return nil
	}
	return sysctl.Set("ipv6/conf/"+device+"/disable_ipv6", "0")
}

func hasIPv6(addrs []netip.Addr) bool {
	for _, a := range addrs {
		if a.Is6() {
			return true
		}
	}
	return false
}
