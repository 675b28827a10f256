package netcfg

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// StackDevice is the node's side of a device of a stack module.
type StackDevice struct {
	Ifindex int
	// MAC is the module's, Gateway the one that it sends all frames to.
	MAC, Gateway net.HardwareAddr
	// MTU is in bytes.
	MTU int
}

// DescribeStackDevice gives what AddStackDevice would make, but for the index.
func DescribeStackDevice(id model.EndpointID, veth int) (StackDevice, error) {
	h, err := rtnl.Open()
	if err != nil {
		return StackDevice{}, err
	}
	defer h.Close()
	return describeStackDevice(h, id, veth)
}

func describeStackDevice(h *netlink.Handle, id model.EndpointID, veth int) (StackDevice, error) {
	beside, err := h.LinkByIndex(veth)
	if err != nil {
		return StackDevice{}, fmt.Errorf("device %d of endpoint %d: %w", veth, id, err)
	}
	return StackDevice{MAC: netdev.ContainerMAC(id), Gateway: netdev.HostMAC(id), MTU: beside.Attrs().MTU}, nil
}

// StackDevices says whether the node has what AddStackDevice makes devices of: an error, if not.
func StackDevices() error {
	fd, err := openTUN()
	if err == nil {
		err = unix.Close(fd)
	}
	return err
}

func openTUN() (fd int, err error) {
	fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	return fd, nil
}

// AddStackDevice makes the device by which a module has the packets of endpoint id: a TAP device
// that segments and fills in checksums, and whose reads do not block. It lives as long as the
// file is open, and has the MTU of the node's side of the endpoint's veth, by its index. program is
// attached to its ingress.
func AddStackDevice(id model.EndpointID, veth, program int) (dev StackDevice, file *os.File, err error) {
	fd, err := openTUN()
	if err != nil {
		return dev, nil, err
	}
	file = os.NewFile(uintptr(fd), netdev.StackName(id))
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("device %s of the stack module: %w", netdev.StackName(id), err), file.Close())
		}
	}()
	request, err := unix.NewIfreq(netdev.StackName(id))
	if err != nil {
		return dev, nil, err
	}
	request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return dev, nil, fmt.Errorf("make it: %w", err)
	}
	const offloads = unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, offloads); err != nil {
		return dev, nil, fmt.Errorf("set offloads: %w", err)
	}
	h, err := rtnl.Open()
	if err != nil {
		return dev, nil, err
	}
	defer h.Close()
	link, err := h.LinkByName(netdev.StackName(id))
	if err != nil {
		return dev, nil, err
	}
	if dev, err = describeStackDevice(h, id, veth); err != nil {
		return dev, nil, err
	}
	dev.Ifindex = link.Attrs().Index
	if err := h.LinkSetHardwareAddr(link, netdev.StackMAC(id)); err != nil {
		return dev, nil, fmt.Errorf("set its address: %w", err)
	}
	if err := rtnl.SetMTU(h, link, dev.MTU); err != nil {
		return dev, nil, err
	}
	if err := netdev.QuietIPv6(netdev.StackName(id)); err != nil {
		return dev, nil, err
	}
	if err := AttachTC(dev.Ifindex, Filter{Direction: Ingress, Program: program, Name: "from_stack"}); err != nil {
		return dev, nil, err
	}
	return dev, file, rtnl.SetUp(h, link)
}
