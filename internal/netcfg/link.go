package netcfg

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/netcfg/sysctl"
)

// setAddrs makes want, as host addresses, the addresses of l. Link-local addresses, which the
// kernel made before netdev.QuietIPv6, go too.
func setAddrs(h *netlink.Handle, l netlink.Link, want []netip.Addr) error {
	name := l.Attrs().Name
	have, err := rtnl.Dump(func() ([]netlink.Addr, error) { return h.AddrList(l, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("device %s: list addresses: %w", name, err)
	}
	var kept []netip.Addr
	for _, a := range have {
		p := rtnl.FromIPNet(a.IPNet)
		if p.IsSingleIP() && slices.Contains(want, p.Addr()) {
			kept = append(kept, p.Addr())
			continue
		}
		if err := h.AddrDel(l, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("device %s: remove address %v: %w", name, p, err)
		}
	}
	var added6 []netip.Addr
	for _, a := range want {
		if slices.Contains(kept, a) {
			continue
		}
		if a.Is6() {
			added6 = append(added6, a)
		}
		addr := &netlink.Addr{IPNet: rtnl.ToIPNet(netip.PrefixFrom(a, a.BitLen()))}
		if a.Is6() {
			addr.Flags = unix.IFA_F_NODAD // nobody else can have it: the prefix is the node's
		}
		if err := h.AddrAdd(l, addr); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("device %s: add address %v: %w", name, a, err)
		}
	}
	return awaitAddrs6(l, added6)
}

// NodeAddrs lists the addresses of all devices of this network namespace, sorted, each once: what
// is local here whatever its scope. Whole ranges that are local (127.0.0.0/8) appear by the address
// configured.
func NodeAddrs() ([]netip.Addr, error) {
	h, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer h.Close()
	return nodeAddrs(h)
}

func nodeAddrs(h *netlink.Handle) ([]netip.Addr, error) {
	list, err := rtnl.Dump(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	out := make([]netip.Addr, 0, len(list))
	for _, a := range list {
		out = append(out, rtnl.FromIPNet(a.IPNet).Addr())
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

// CongestionControl gives the name of the congestion control that the kernel gives sockets of this
// network namespace.
func CongestionControl() (string, error) { return sysctl.Get("ipv4/tcp_congestion_control") }

// EphemeralPorts gives the ports that the kernel chooses from in this network namespace.
func EphemeralPorts() (model.PortRange, error) {
	value, err := sysctl.Get(portRange)
	if err != nil {
		return model.PortRange{}, err
	}
	return parsePorts(value)
}

// portRange is the path of EphemeralPorts' setting.
const portRange = "ipv4/ip_local_port_range"

func parsePorts(value string) (model.PortRange, error) {
	var r model.PortRange
	if _, err := fmt.Sscan(value, &r.First, &r.Last); err != nil {
		return model.PortRange{}, fmt.Errorf("read sysctl net.ipv4.ip_local_port_range: %q: %w", value, err)
	}
	return r, nil
}

// Device gives the name and MTU of one device of this network namespace. net.InterfaceByIndex lists
// all, and for each of them the kernel looks through the namespaces: 4 s with 7,000 containers.
func Device(ifindex int) (name string, mtu int, err error) {
	l, err := rtnl.Each().LinkByIndex(ifindex)
	if err != nil {
		return "", 0, fmt.Errorf("device %d: %w", ifindex, err)
	}
	return l.Attrs().Name, l.Attrs().MTU, nil
}
