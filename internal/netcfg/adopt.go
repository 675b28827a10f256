package netcfg

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/netns"
)

// What there is to do for endpoints whose device and address another network has made
// (model.Adopted). Its devices, addresses and routes are its own: nothing of them is changed.

// AdoptEndpoint is AddEndpoint for a container that another network has attached: it finds the veth
// pair that leads to cfg.Device, and makes cfg.Addrs local to the node for marked packets if the
// endpoint is intercepted. cfg.MTU and Gateways are not looked at.
func AdoptEndpoint(cfg EndpointConfig) (EndpointDevice, error) {
	ns, err := openContainer(cfg.NetnsPath)
	if err != nil {
		return EndpointDevice{}, fmt.Errorf("endpoint %d: netns_path: %w", cfg.ID, err)
	}
	defer ns.Close()
	h, err := rtnl.Open()
	if err != nil {
		return EndpointDevice{}, err
	}
	defer h.Close()
	dev, err := findAdopted(h, ns, cfg)
	if err != nil {
		return EndpointDevice{}, fmt.Errorf("endpoint %d: %w", cfg.ID, err)
	}
	have, err := ownRoutes(h)
	if err != nil {
		return EndpointDevice{}, err
	}
	for _, a := range cfg.Addrs {
		local := route{table: cfg.Table, dst: netip.PrefixFrom(a, a.BitLen()), kind: unix.RTN_LOCAL, link: netdev.LoopbackIfindex}
		if cfg.Intercepted {
			err = ensureRoute(h, have, local)
		} else {
			err = deleteRoute(h, local)
		}
		if err != nil {
			return EndpointDevice{}, fmt.Errorf("endpoint %d: %w", cfg.ID, err)
		}
	}
	return dev, nil
}

// findAdopted finds the two ends of the pair in the node's namespace and in ns.
func findAdopted(h *netlink.Handle, ns *os.File, cfg EndpointConfig) (EndpointDevice, error) {
	if cfg.Device == "" {
		cfg.Device = model.DefaultDevice
	}
	var inside netlink.LinkAttrs
	err := netns.DoIn(ns, func() error {
		in, err := rtnl.Open()
		if err != nil {
			return err
		}
		defer in.Close()
		l, err := in.LinkByName(cfg.Device)
		if err != nil {
			return fmt.Errorf("container: device %s: %w", cfg.Device, err)
		}
		if l.Type() != "veth" {
			return fmt.Errorf("container: device %s is a %s: only veth pairs, as bridge and ptp make them, can be adopted", cfg.Device, l.Type())
		}
		addrs, err := rtnl.Dump(func() ([]netlink.Addr, error) { return in.AddrList(l, netlink.FAMILY_V4) })
		if err != nil {
			return fmt.Errorf("container: device %s: list addresses: %w", cfg.Device, err)
		}
		want := rtnl.SameFamily(netip.IPv4Unspecified(), cfg.Addrs)
		if !slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return rtnl.FromIPNet(a.IPNet).Addr() == want }) {
			return fmt.Errorf("container: device %s lacks the address %s that it is to be adopted with", cfg.Device, want)
		}
		inside = *l.Attrs()
		return nil
	})
	if err != nil {
		return EndpointDevice{}, err
	}
	host, err := h.LinkByIndex(inside.ParentIndex)
	if err != nil {
		return EndpointDevice{}, fmt.Errorf("other end of %s, device %d of the node: %w", cfg.Device, inside.ParentIndex, err)
	}
	id, err := netnsID(ns)
	if err != nil {
		return EndpointDevice{}, err
	}
	if a := host.Attrs(); host.Type() != "veth" || a.ParentIndex != inside.Index || a.NetNsID != id {
		return EndpointDevice{}, fmt.Errorf("device %s of the container does not lead to the node's network namespace", cfg.Device)
	}
	inode, err := inodeOf(ns)
	if err != nil {
		return EndpointDevice{}, err
	}
	return EndpointDevice{
		Netns: uint32(inode), Ifindex: host.Attrs().Index, Name: host.Attrs().Name, HostMAC: host.Attrs().HardwareAddr.String(),
		ContainerMAC: inside.HardwareAddr.String(), ContainerIfindex: inside.Index,
	}, nil
}

// InspectAdopted is InspectEndpoint for what AdoptEndpoint found.
func InspectAdopted(cfg EndpointConfig) (EndpointState, error) {
	var st EndpointState
	h, err := rtnl.Open()
	if err != nil {
		return st, err
	}
	defer h.Close()
	ns, err := openContainer(cfg.NetnsPath)
	if err == nil {
		defer ns.Close()
		st.EndpointDevice, err = findAdopted(h, ns, cfg)
	}
	if err != nil {
		st.Problems = append(st.Problems, err.Error())
		return st, nil
	}
	host, err := h.LinkByIndex(st.Ifindex)
	if err != nil {
		return st, fmt.Errorf("device %s: %w", st.Name, err)
	}
	st.MTU = host.Attrs().MTU
	for _, dir := range []Direction{Ingress, Egress} {
		there, err := ownFilter(host.Attrs().Index, dir)
		if err != nil || there == nil {
			st.Problems = append(st.Problems, fmt.Sprintf("device %s has no program of Heddle's at its %s", st.Name, dir))
		}
	}
	return st, nil
}

// LeaveAdopted detaches Heddle's programs from all devices of other networks but those in keep:
// without an endpoint they let nothing through.
func LeaveAdopted(keep map[int]bool) error {
	h, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	links, err := adoptedLinks(h)
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range links {
		if keep[l.Attrs().Index] {
			continue
		}
		for _, dir := range []Direction{Ingress, Egress} {
			if _, err := detach(h, l, dir); err != nil && !errors.Is(err, unix.ENODEV) {
				errs = append(errs, fmt.Errorf("detach from %s of %s: %w", dir, l.Attrs().Name, err))
			}
		}
	}
	return errors.Join(errs...)
}

// AdoptedDevices names the devices of other networks that carry endpoints: those with Heddle's
// programs on them.
func AdoptedDevices() (names []string, err error) {
	h, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer h.Close()
	links, err := adoptedLinks(h)
	for _, l := range links {
		names = append(names, l.Attrs().Name)
	}
	return names, err
}

// adoptedLinks gives the veth devices that are not Heddle's and have its program.
func adoptedLinks(h *netlink.Handle) (out []netlink.Link, err error) {
	links, err := rtnl.Dump(h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		if _, ours := netdev.EndpointOf(l); ours || l.Type() != "veth" || strings.HasPrefix(l.Attrs().Name, "heddle-") {
			continue
		}
		if own, err := ownFilter(l.Attrs().Index, Egress); err == nil && own != nil { // else another's, or gone
			out = append(out, l)
		}
	}
	return out, nil
}
