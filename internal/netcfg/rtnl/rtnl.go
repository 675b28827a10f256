// Package rtnl asks the kernel for devices, addresses, neighbours, routes and qdiscs by netlink. It
// owns how requests are sent and answered: one by one by the library, in batches, and with answers
// that take little memory; and what the library's addresses are in ours. Every request is made in
// the network namespace of the calling thread.
package rtnl

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// dumpAttempts bounds how often a netlink dump is repeated that a concurrent change interrupted.
const dumpAttempts = 10

// Open gives a netlink handle on the calling thread's network namespace.
func Open() (*netlink.Handle, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	return h, nil
}

// Each gives a handle that opens netlink for each request, on the calling thread's network
// namespace, and nothing before: for what mostly needs none.
func Each() *netlink.Handle { return new(netlink.Handle) }

// Dump repeats a listing until no change interrupted it.
func Dump[T any](list func() ([]T, error)) ([]T, error) {
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

// ToIPNet gives p as the library wants it.
func ToIPNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// FromIPNet gives the zero Prefix for nil.
func FromIPNet(n *net.IPNet) netip.Prefix {
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

// FromIP gives the zero Addr for nil.
func FromIP(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

// Errno wraps err without what the libraries say around the kernel's answer; nil stays nil.
func Errno(what string, err error) error {
	if err == nil {
		return nil
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		err = errno
	}
	return fmt.Errorf("%s: %w", what, err)
}

// SameFamily picks the address of a's family, or the zero Addr.
func SameFamily(a netip.Addr, from []netip.Addr) netip.Addr {
	for _, b := range from {
		if a.Is4() == b.Is4() {
			return b
		}
	}
	return netip.Addr{}
}
