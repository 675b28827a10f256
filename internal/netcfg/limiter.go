package netcfg

import (
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// Filters that put packets into the shaping device come behind everything else: it skips what would
// follow.
const (
	limiterPriority = 0x4864
	limiterOwner    = filterOwner + "limit_"
)

// AttachLimiter attaches both programs to a device that came while limits are in force. SetShapes
// does so for those that are there.
func AttachLimiter(ifindex int, progs Limiter) error {
	h, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	dev, err := findShapeDevice(h)
	if err != nil {
		return err
	}
	if dev == nil {
		return fmt.Errorf("attach limits to device %d: no device %s", ifindex, netdev.Shape)
	}
	link, err := h.LinkByIndex(ifindex)
	if err != nil {
		return fmt.Errorf("attach limits to device %d: %w", ifindex, err)
	}
	return attachLimiter(h, link, dev, progs)
}

// attachLimiters attaches the programs to every device that endpoints' packets may take: lo,
// Heddle's own, those of stack modules, and those that routes lead to.
func attachLimiters(h *netlink.Handle, shape netlink.Link, progs Limiter) error {
	links, err := rtnl.Dump(h.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	routed, err := routedDevices(h)
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range links {
		name := l.Attrs().Name
		_, endpoint := netdev.EndpointOf(l)
		endpoint = endpoint || netdev.IsStack(l)
		if l.Attrs().Index != netdev.LoopbackIfindex && !routed[l.Attrs().Index] && !endpoint && name != netdev.Overlay && name != netdev.Divert {
			continue
		}
		if err := attachLimiter(h, l, shape, progs); err != nil && !errors.Is(err, unix.ENODEV) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// routedDevices are those that routes of the main table use.
func routedDevices(h *netlink.Handle) (map[int]bool, error) {
	routes, err := rtnl.Dump(func() ([]netlink.Route, error) { return h.RouteList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	out := make(map[int]bool)
	for _, r := range routes {
		if r.LinkIndex != 0 {
			out[r.LinkIndex] = true
		}
		for _, hop := range r.MultiPath {
			out[hop.LinkIndex] = true
		}
	}
	return out, nil
}

func attachLimiter(h *netlink.Handle, link, shape netlink.Link, progs Limiter) error {
	err := ensureClsact(h, link)
	if err == nil {
		err = errors.Join(
			setLimiter(link.Attrs().Index, Ingress, progs.In, "in", shape.Attrs().Index),
			setLimiter(link.Attrs().Index, Egress, progs.Out, "out", shape.Attrs().Index),
		)
	}
	if err != nil {
		return fmt.Errorf("attach limits to %s (kernel options NET_CLS_BPF, NET_ACT_MIRRED): %w", link.Attrs().Name, err)
	}
	return nil
}

// setLimiter attaches one program, or replaces the one there in one step, with the action to
// redirect to the shaping device. The library knows no actions of this classifier's.
func setLimiter(ifindex int, dir Direction, progFD int, name string, shape int) error {
	req := nl.NewNetlinkRequest(unix.RTM_NEWTFILTER, unix.NLM_F_CREATE|unix.NLM_F_ACK)
	req.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(ifindex), Handle: filterHandle, Parent: dir.parent(),
		Info: netlink.MakeHandle(limiterPriority, nl.Swap16(unix.ETH_P_ALL))})
	req.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("bpf")))
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	options.AddRtAttr(nl.TCA_BPF_FD, nl.Uint32Attr(uint32(progFD)))
	options.AddRtAttr(nl.TCA_BPF_NAME, nl.ZeroTerminated(limiterOwner+name))
	actions := options.AddRtAttr(nl.TCA_BPF_ACT, nil)
	if err := netlink.EncodeActions(actions, []netlink.Action{netlink.NewMirredAction(shape)}); err != nil {
		return err
	}
	req.AddData(options)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// detachLimiters removes the programs from every device, and clsact qdiscs that were there for them
// alone.
func detachLimiters(h *netlink.Handle, gone func(string, ...any)) error {
	links, err := rtnl.Dump(h.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	var errs []error
	for _, l := range links {
		removed, err := detachLimiter(h, l)
		if removed > 0 {
			gone("limits' BPF programs from %s", l.Attrs().Name)
		}
		if err != nil && !errors.Is(err, unix.ENODEV) {
			errs = append(errs, fmt.Errorf("detach limits from %s: %w", l.Attrs().Name, err))
		}
	}
	return errors.Join(errs...)
}

// detachLimiter is detachLimiters for one device; it gives how many programs were there.
func detachLimiter(h *netlink.Handle, link netlink.Link) (removed int, err error) {
	clsact, err := hasClsact(link.Attrs().Index)
	if err != nil || !clsact {
		return 0, err
	}
	left := 0
	for _, dir := range []Direction{Ingress, Egress} {
		list, err := rtnl.Dump(func() ([]netlink.Filter, error) { return h.FilterList(link, dir.parent()) })
		if err != nil {
			return removed, fmt.Errorf("list filters: %w", err)
		}
		for _, f := range list {
			bpf, ok := f.(*netlink.BpfFilter)
			if !ok || !strings.HasPrefix(bpf.Name, limiterOwner) {
				left++
				continue
			}
			if err := h.FilterDel(bpf); err != nil && !errors.Is(err, unix.ENOENT) {
				return removed, err
			}
			removed++
		}
	}
	if removed == 0 || left > 0 {
		return removed, nil
	}
	if err := h.QdiscDel(newClsact(link.Attrs().Index)); err != nil && !errors.Is(err, unix.ENOENT) {
		return removed, err
	}
	return removed, nil
}
