package fabric

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// open gives a netlink handle on the calling thread's network namespace.
func open() (*netlink.Handle, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	return h, nil
}

// findLink gives the link called name, or nil if there is none.
func findLink(h *netlink.Handle, name string) (netlink.Link, error) {
	l, err := h.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("device %s: %w", name, err)
	}
	return l, nil
}

// setUp brings a link up.
func setUp(h *netlink.Handle, l netlink.Link) error {
	if err := h.LinkSetUp(l); err != nil {
		return fmt.Errorf("set device %s up: %w", l.Attrs().Name, err)
	}
	return nil
}

func netOf(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// silence leaves a device nothing but the IPv6 addresses and neighbours that the lab gives it. A
// kernel without IPv6 has nothing to stop.
func silence(device string) error {
	for _, s := range []struct{ key, value string }{
		{"addr_gen_mode", "1"}, {"accept_ra", "0"}, {"autoconf", "0"}, {"accept_dad", "0"},
	} {
		err := setSysctl("ipv6/conf/"+device+"/"+s.key, s.value)
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// readSysctl reads the file path under /proc/sys/net, in this network namespace.
func readSysctl(path string) (string, error) {
	value, err := os.ReadFile(filepath.Join("/proc/sys/net", path))
	if err != nil {
		return "", fmt.Errorf("read sysctl net.%s: %w", strings.ReplaceAll(path, "/", "."), err)
	}
	return strings.TrimSpace(string(value)), nil
}

// setSysctl writes value to the file path under /proc/sys/net, in this network namespace, unless it
// is there: some writes have side effects even when they change nothing.
func setSysctl(path, value string) error {
	if have, err := readSysctl(path); err != nil || have == value {
		return err
	}
	if err := os.WriteFile(filepath.Join("/proc/sys/net", path), []byte(value), 0); err != nil {
		return fmt.Errorf("set sysctl net.%s = %s: %w", strings.ReplaceAll(path, "/", "."), value, err)
	}
	return nil
}

// SetCongestionControl sets the TCP congestion control of the calling thread's network namespace
// for new sockets. A kernel without that algorithm, or one that does not let network namespaces
// have it (net.ipv4.tcp_allowed_congestion_control), keeps its own.
func SetCongestionControl(algorithm string) error {
	err := setSysctl("ipv4/tcp_congestion_control", algorithm)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EPERM) {
		return nil
	}
	return err
}
