package netcfg

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/netns"
)

// EndpointState is what InspectEndpoint finds.
type EndpointState struct {
	EndpointDevice
	// MTU is that of the container's device, in bytes; 0 if it is not there.
	MTU int
	// Problems say what the kernel lacks of what AddEndpoint made, in words for operators.
	Problems []string
}

// InspectEndpoint compares what AddEndpoint made for cfg with what is there, and changes nothing.
// The names and hardware addresses are those that cfg has them be.
func InspectEndpoint(cfg EndpointConfig) (EndpointState, error) {
	if err := cfg.validate(); err != nil {
		return EndpointState{}, err
	}
	if cfg.Device == "" {
		cfg.Device = model.DefaultDevice
	}
	st := EndpointState{EndpointDevice: EndpointDevice{
		Name: netdev.EndpointName(cfg.ID), HostMAC: netdev.HostMAC(cfg.ID).String(), ContainerMAC: netdev.ContainerMAC(cfg.ID).String(),
	}}
	h, err := rtnl.Open()
	if err != nil {
		return st, err
	}
	defer h.Close()
	host, err := rtnl.FindLink(st.Name)
	if err != nil {
		return st, err
	}
	if host == nil {
		st.Problems = append(st.Problems, fmt.Sprintf("device %s is gone from the node", st.Name))
		return st, nil
	}
	st.Ifindex = host.Attrs().Index
	if host.Attrs().Flags&net.FlagUp == 0 {
		st.Problems = append(st.Problems, fmt.Sprintf("device %s of the node is down", st.Name))
	}
	have, err := ownRoutes(h)
	if err != nil {
		return st, err
	}
	for _, a := range cfg.Addrs {
		led := func(r route) bool { return r.link == st.Ifindex && r.dst == netip.PrefixFrom(a, a.BitLen()) }
		if !containsRoute(have, led) {
			st.Problems = append(st.Problems, fmt.Sprintf("the node has no route to %s by %s", a, st.Name))
		}
	}
	ns, err := openContainer(cfg.NetnsPath)
	if err != nil {
		st.Problems = append(st.Problems, err.Error())
		return st, nil
	}
	defer ns.Close()
	inode, err := inodeOf(ns)
	if err != nil {
		return st, err
	}
	st.Netns = uint32(inode)
	joined, err := isJoined(ns, host, cfg)
	if err != nil {
		return st, err
	}
	if !joined {
		st.Problems = append(st.Problems, fmt.Sprintf("device %s of the container is not the one that was made", cfg.Device))
		return st, nil
	}
	return st, netns.DoIn(ns, func() error { return inspectContainer(cfg, &st) })
}

func containsRoute(have map[routeKey]route, match func(route) bool) bool {
	for _, r := range have {
		if match(r) {
			return true
		}
	}
	return false
}

// inspectContainer runs in the container's namespace.
func inspectContainer(cfg EndpointConfig, st *EndpointState) error {
	h, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	eth, err := h.LinkByName(cfg.Device)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		st.Problems = append(st.Problems, fmt.Sprintf("device %s of the container is gone", cfg.Device))
		return nil
	}
	if err != nil {
		return fmt.Errorf("device %s: %w", cfg.Device, err)
	}
	st.ContainerIfindex, st.MTU = eth.Attrs().Index, eth.Attrs().MTU
	if eth.Attrs().Flags&net.FlagUp == 0 {
		st.Problems = append(st.Problems, fmt.Sprintf("device %s of the container is down", cfg.Device))
	}
	list, err := rtnl.Dump(func() ([]netlink.Addr, error) { return h.AddrList(eth, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("device %s: list addresses: %w", cfg.Device, err)
	}
	routes, err := ownRoutes(h)
	if err != nil {
		return err
	}
	for _, a := range cfg.Addrs {
		if !slices.ContainsFunc(list, func(have netlink.Addr) bool { return rtnl.FromIPNet(have.IPNet).Addr() == a }) {
			st.Problems = append(st.Problems, fmt.Sprintf("device %s of the container lacks address %s", cfg.Device, a))
		}
		gw := rtnl.SameFamily(a, cfg.Gateways)
		leads := func(r route) bool {
			return r.link == eth.Attrs().Index && r.dst == defaultDst(a) && r.gw == gw
		}
		if !containsRoute(routes, leads) {
			st.Problems = append(st.Problems, fmt.Sprintf("the container has no default route by %s", gw))
		}
	}
	return nil
}
