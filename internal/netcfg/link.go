package netcfg

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/sysctl"
)

// dumpAttempts bounds how often a netlink dump is repeated that a concurrent change interrupted.
const dumpAttempts = 10

// open gives a netlink handle on the calling thread's network namespace.
func open() (*netlink.Handle, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	return h, nil
}

// each gives a handle that opens netlink for each request, on the calling thread's network
// namespace, and nothing before: for what mostly needs none.
func each() *netlink.Handle { return new(netlink.Handle) }

// dump repeats a listing until no change interrupted it.
func dump[T any](list func() ([]T, error)) ([]T, error) {
	var out []T
	var err error
	for range dumpAttempts {
		out, err = list()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return out, err
}

// deleteLink deletes l; that it has gone by itself is no error.
func deleteLink(h *netlink.Handle, l netlink.Link) error {
	err := h.LinkDel(l)
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete device %s: %w", l.Attrs().Name, err)
	}
	return nil
}

// setUp brings l up unless it is.
func setUp(h *netlink.Handle, l netlink.Link) error {
	if l.Attrs().Flags&net.FlagUp != 0 {
		return nil
	}
	if err := h.LinkSetUp(l); err != nil {
		return fmt.Errorf("set device %s up: %w", l.Attrs().Name, err)
	}
	return nil
}

// setMTU sets l's MTU in bytes unless it has it.
func setMTU(h *netlink.Handle, l netlink.Link, mtu int) error {
	if l.Attrs().MTU == mtu {
		return nil
	}
	if err := h.LinkSetMTU(l, mtu); err != nil {
		return fmt.Errorf("device %s: set mtu %d: %w", l.Attrs().Name, mtu, err)
	}
	return nil
}

// setAddrs makes want, as host addresses, the addresses of l. Link-local addresses, which the
// kernel made before quietIPv6, go too.
func setAddrs(h *netlink.Handle, l netlink.Link, want []netip.Addr) error {
	name := l.Attrs().Name
	have, err := dump(func() ([]netlink.Addr, error) { return h.AddrList(l, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("device %s: list addresses: %w", name, err)
	}
	var kept []netip.Addr
	for _, a := range have {
		p := fromIPNet(a.IPNet)
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
		addr := &netlink.Addr{IPNet: hostNet(a)}
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
	h, err := open()
	if err != nil {
		return nil, err
	}
	defer h.Close()
	return nodeAddrs(h)
}

func nodeAddrs(h *netlink.Handle) ([]netip.Addr, error) {
	list, err := dump(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	out := make([]netip.Addr, 0, len(list))
	for _, a := range list {
		out = append(out, fromIPNet(a.IPNet).Addr())
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

func hostNet(a netip.Addr) *net.IPNet { return toIPNet(netip.PrefixFrom(a, a.BitLen())) }

func toIPNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// fromIPNet gives the zero Prefix for nil.
func fromIPNet(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	a, _ := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if bits == 32 {
		a = a.Unmap()
	}
	return netip.PrefixFrom(a, ones)
}

// fromIP gives the zero Addr for nil.
func fromIP(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
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
	l, err := each().LinkByIndex(ifindex)
	if err != nil {
		return "", 0, fmt.Errorf("device %d: %w", ifindex, err)
	}
	return l.Attrs().Name, l.Attrs().MTU, nil
}
