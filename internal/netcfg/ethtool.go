package netcfg

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// offloads are those that matter here, by the requests of linux/ethtool.h.
var offloads = []struct {
	name    string
	request uint32
}{{"TSO", 0x1e}, {"GSO", 0x23}, {"GRO", 0x2b}, {"checksums", 0x16}}

// Offloads says which of TSO, GSO, GRO and checksums a device of the calling thread's network
// namespace has on, and which off.
func Offloads(device string) (on, off []string, err error) {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("offloads of %s: %w", device, err)
	}
	defer unix.Close(s)
	for _, o := range offloads {
		value, err := ethtoolValue(s, device, o.request)
		if err != nil {
			return nil, nil, fmt.Errorf("offloads of %s: %s: %w", device, o.name, err)
		}
		if value != 0 {
			on = append(on, o.name)
		} else {
			off = append(off, o.name)
		}
	}
	return on, off, nil
}

// Card is a network card that is up: a device with something on a bus behind it.
type Card struct {
	Name    string
	MTU     int
	On, Off []string // Offloads
}

// Cards lists those of the calling thread's network namespace.
func Cards() (cards []Card, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	for _, link := range links {
		c := Card{Name: link.Attrs().Name, MTU: link.Attrs().MTU}
		if _, err := os.Stat(filepath.Join("/sys/class/net", c.Name, "device")); err != nil || link.Attrs().Flags&net.FlagUp == 0 {
			continue
		}
		if c.On, c.Off, err = Offloads(c.Name); err != nil {
			return nil, err
		}
		cards = append(cards, c)
	}
	return cards, nil
}

// ethtoolValue makes one of ethtool's requests that yield a number, on a device of the calling
// thread's network namespace.
func ethtoolValue(socket int, device string, request uint32) (uint32, error) {
	value := struct{ request, data uint32 }{request: request} // struct ethtool_value
	ifreq := struct {                                         // struct ifreq
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(ifreq.name[:unix.IFNAMSIZ-1], device)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(socket), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&ifreq)))
	runtime.KeepAlive(&value)
	if errno != 0 {
		return 0, errno
	}
	return value.data, nil
}
