package rtnl

import (
	"errors"
	"fmt"
	"net"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// FindLink gives the device called name in the calling thread's network namespace, or nil if there
// is none.
func FindLink(name string) (found netlink.Link, err error) {
	var broken error
	err = Ask(unix.RTM_GETLINK, 0, func(m syscall.NetlinkMessage) bool {
		found, broken = netlink.LinkDeserialize(nil, m.Data)
		return false
	}, nl.NewIfInfomsg(unix.AF_UNSPEC), nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	if errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	if err := errors.Join(err, broken); err != nil {
		return nil, fmt.Errorf("device %s: %w", name, err)
	}
	return found, nil
}

// GetLink is FindLink for a device that must be there.
func GetLink(name string) (netlink.Link, error) {
	l, err := FindLink(name)
	if err == nil && l == nil {
		err = fmt.Errorf("device %s: %w", name, unix.ENODEV)
	}
	return l, err
}

// DeleteLink deletes l; that it has gone by itself is no error.
func DeleteLink(h *netlink.Handle, l netlink.Link) error {
	err := h.LinkDel(l)
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete device %s: %w", l.Attrs().Name, err)
	}
	return nil
}

// SetUp brings l up unless it is.
func SetUp(h *netlink.Handle, l netlink.Link) error {
	if l.Attrs().Flags&net.FlagUp != 0 {
		return nil
	}
	if err := h.LinkSetUp(l); err != nil {
		return fmt.Errorf("set device %s up: %w", l.Attrs().Name, err)
	}
	return nil
}

// SetMTU sets l's MTU in bytes unless it has it.
func SetMTU(h *netlink.Handle, l netlink.Link, mtu int) error {
	if l.Attrs().MTU == mtu {
		return nil
	}
	if err := h.LinkSetMTU(l, mtu); err != nil {
		return fmt.Errorf("device %s: set mtu %d: %w", l.Attrs().Name, mtu, err)
	}
	return nil
}
