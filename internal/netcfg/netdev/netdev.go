// Package netdev says which devices are Heddle's: their names, their hardware addresses, and what
// all of them have in common. It owns nothing of a device's life: who makes one knows the rest.
package netdev

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/sysctl"
)

// Names of the devices of a node. Endpoints' devices are EndpointPrefix followed by the id in
// hexadecimal.
const (
	// Overlay is the VXLAN device.
	Overlay = "heddle-vx0"
	// Divert is where tc programs redirect packets that a node process sent to an intercepted
	// container: packets enter the node's stack again on it.
	Divert = "heddle-hd0"
	// DivertPeer is the other end of Divert's pair; it only has to be up.
	DivertPeer = "heddle-hd1"
	// Inner leads to the inner addresses of other nodes on an IPv6 underlay: a program translates
	// what leaves by it.
	Inner = "heddle-in0"
	// InnerPeer is the other end of Inner's pair; it only has to be up.
	InnerPeer = "heddle-in1"
	// WireGuard is the device by which the nodes' inner addresses are reached.
	WireGuard = "heddle-wg0"
	// Shape is the intermediate functional block (ifb) in which packets of endpoints with a cap
	// wait, in classes of an HTB qdisc. It is there only while some endpoint has a limit.
	Shape = "heddle-sh0"

	// EndpointPrefix begins the names of endpoints' devices on the node.
	EndpointPrefix = "hd"
	// stackPrefix begins the names of devices by which a stack module has an endpoint's packets.
	// The endpoint's id follows in hexadecimal.
	stackPrefix = "hs"
)

// Hardware addresses, which tell the devices from anybody else's. A redirected packet must have
// DivertMAC as destination for the stack to take it, and what arrives on Inner has InnerMAC after
// its translation.
const (
	DivertMAC     = "02:48:44:00:00:01"
	DivertPeerMAC = "02:48:44:00:00:02"
	InnerMAC      = "02:48:44:00:00:03"
	InnerPeerMAC  = "02:48:44:00:00:04"
	ShapeMAC      = "02:48:53:00:00:01"
)

// LoopbackIfindex is what every network namespace gives its lo.
const LoopbackIfindex = 1

// HostMAC is the hardware address of the node's side of an endpoint's pair. With the name it tells
// an endpoint's device from anybody else's.
func HostMAC(id model.EndpointID) net.HardwareAddr {
	return net.HardwareAddr{0x02, 0x48, 0x45, byte(id >> 16), byte(id >> 8), byte(id)}
}

// ContainerMAC is the hardware address of the container's side of an endpoint's pair.
func ContainerMAC(id model.EndpointID) net.HardwareAddr {
	return net.HardwareAddr{0x02, 0x48, 0x43, byte(id >> 16), byte(id >> 8), byte(id)}
}

// EndpointName is the name of the node's side of an endpoint's pair: at most 8 characters.
func EndpointName(id model.EndpointID) string { return fmt.Sprintf("hd%x", uint32(id)) }

// EndpointOf tells whether l is the node's side of an endpoint's pair, and of which: kind, name and
// hardware address must fit. The kernel sets all three at once, so a kill cannot leave one without
// the others.
func EndpointOf(l netlink.Link) (model.EndpointID, bool) {
	digits, ok := strings.CutPrefix(l.Attrs().Name, EndpointPrefix)
	if !ok || l.Type() != "veth" {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 16, 32)
	id := model.EndpointID(n)
	ours := err == nil && id != 0 && id <= model.MaxEndpointID && EndpointName(id) == l.Attrs().Name &&
		l.Attrs().HardwareAddr.String() == HostMAC(id).String()
	return id, ours
}

// StackMAC is the address of an endpoint's device of a stack module: nothing is sent to it.
func StackMAC(id model.EndpointID) net.HardwareAddr {
	return net.HardwareAddr{0x02, 0x48, 0x53, byte(id >> 16), byte(id >> 8), byte(id)}
}

// StackName is the name of that device.
func StackName(id model.EndpointID) string { return stackPrefix + strconv.FormatUint(uint64(id), 16) }

// IsStack tells whether l is a device of a stack module.
func IsStack(l netlink.Link) bool {
	digits, ok := strings.CutPrefix(l.Attrs().Name, stackPrefix)
	n, err := strconv.ParseUint(digits, 16, 32)
	return ok && err == nil && l.Type() == "tuntap" && l.Attrs().HardwareAddr.String() == StackMAC(model.EndpointID(n)).String()
}

// QuietIPv6 leaves a device of Heddle's nothing but the addresses and neighbours that Heddle gives
// it: no link-local address, no router advertisements, no search for duplicates. A kernel without
// IPv6 has nothing to stop.
func QuietIPv6(device string) error {
	n, err := sysctl.Open()
	if err != nil {
		return err
	}
	defer n.Close()
	return QuietIPv6In(n, device)
}

// QuietIPv6In is QuietIPv6 by settings that are open already.
func QuietIPv6In(n *sysctl.Namespace, device string) error {
	conf := "ipv6/conf/" + device
	err := n.Set([]sysctl.Setting{{Path: conf + "/addr_gen_mode", Value: "1"}, {Path: conf + "/accept_ra", Value: "0"},
		{Path: conf + "/autoconf", Value: "0"}, {Path: conf + "/accept_dad", Value: "0"}}...)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
