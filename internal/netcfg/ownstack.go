package netcfg

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/netcfg/sysctl"
	"heddle.dev/heddle/internal/netns"
)

// OwnStackConfig is what JoinOwnStack connects: a container's own stack, in which its processes are
// that are not intercepted, and the node.
type OwnStackConfig struct {
	ID        model.EndpointID
	NetnsPath string
	Device    EndpointDevice // that AddEndpoint gave
	Addr      netip.Addr     // the endpoint's IPv4 overlay address
	Table     int            // of routes for node sockets
	// Ports are those that the kernel chooses from in the container's own stack, unless the
	// container has been given a range of its own. The zero range: what they are.
	Ports model.PortRange
	// OnLoopback and IntoLoopback are the programs for the container's namespace
	// (datapath.TCPrograms).
	OnLoopback, IntoLoopback int
}

// headers6 is the length of an IPv6 and a TCP header.
const headers6 = 40 + 20

// NetnsIDs are the names that a node's and a container's network namespace have for each other.
type NetnsIDs struct {
	Container int // the container's, in the node's namespace
	Node      int // the node's, in the container's
}

// InContainer runs fn in the container's network namespace at path, on a thread of its own, and
// gives its error.
func InContainer(path string, fn func() error) error {
	container, err := openContainer(path)
	if err != nil {
		return err
	}
	defer container.Close()
	return netns.DoIn(container, fn)
}

// UnprivilegedPorts gives the first port that anybody may bind in the network namespace at path.
func UnprivilegedPorts(path string) (first int, err error) {
	err = InContainer(path, func() error {
		raw, err := os.ReadFile("/proc/sys/net/ipv4/ip_unprivileged_port_start")
		if err != nil {
			return err
		}
		first, err = strconv.Atoi(strings.TrimSpace(string(raw)))
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("ports that anybody may bind: %w", err)
	}
	return first, nil
}

// netnsID gives the id of ns in the calling thread's network namespace.
func netnsID(ns *os.File) (int, error) {
	h, err := rtnl.Open()
	if err != nil {
		return 0, err
	}
	defer h.Close()
	id, err := h.GetNetNsIdByFd(int(ns.Fd()))
	if err != nil || id >= 0 {
		return id, err
	}
	const kernelChooses = -1
	if err := h.SetNetNsIdByFd(int(ns.Fd()), kernelChooses); err != nil && !errors.Is(err, unix.EEXIST) {
		return 0, err
	}
	return h.GetNetNsIdByFd(int(ns.Fd()))
}

// JoinOwnStack lets node sockets of an endpoint and the processes in its container's own stack talk
// to each other over the container's loopback and its own address. AddEndpoint, the programs on the
// endpoint's device and the maps must come first: from here on, the node's side of the device
// routes loopback addresses, and its programs are what limits them to the container's own.
func JoinOwnStack(cfg OwnStackConfig) error {
	// By way of the endpoint's address, whose hardware address is known: nobody answers for a
	// mirror address.
	mirror := route{table: unix.RT_TABLE_MAIN, dst: model.MirrorPrefix(cfg.ID), kind: unix.RTN_UNICAST,
		link: cfg.Device.Ifindex, gw: cfg.Addr, onlink: true}
	// Node sockets that are bound to no address have the container's own when they go this way.
	// What goes to crossing addresses may become IPv6.
	own, crossing := mirror, mirror
	own.table, own.src = cfg.Table, cfg.Addr
	crossing.table, crossing.src = cfg.Table, cfg.Addr
	crossing.dst, crossing.advMSS = model.CrossingPrefix(cfg.ID), cfg.Device.MTU-headers6
	if err := cfg.Device.Routes.owned().ensure(mirror, own, crossing); err != nil {
		return err
	}
	n, err := sysctl.OfNode()
	if err != nil {
		return err
	}
	if err := n.Set(sysctl.Setting{Path: "ipv4/conf/" + cfg.Device.Name + "/route_localnet", Value: "1"}); err != nil {
		return err
	}
	return inContainer(cfg.NetnsPath, func() error { return joinLoopback(cfg) })
}

// joinLoopback runs in the container's namespace. Packets that IntoLoopback hands to lo come
// without the route that those sent there have, and would be taken for martians.
func joinLoopback(cfg OwnStackConfig) error {
	n, err := sysctl.Open()
	if err != nil {
		return err
	}
	defer n.Close()
	if err := setLoopback(n, "1"); err != nil {
		return err
	}
	class := uint32(cfg.ID)
	if err := AttachTC(cfg.Device.ContainerIfindex, Filter{Ingress, cfg.IntoLoopback, "into_loopback", class}); err != nil {
		return err
	}
	err = AttachTC(netdev.LoopbackIfindex, Filter{Egress, cfg.OnLoopback, "on_loopback", class})
	if err != nil || cfg.Ports == (model.PortRange{}) {
		return err
	}
	return movePorts(n, kernelPorts, cfg.Ports)
}

// setLoopback says whether lo takes any source, and loopback addresses that are routed.
func setLoopback(n *sysctl.Namespace, value string) error {
	return n.Set(sysctl.Setting{Path: "ipv4/conf/lo/accept_local", Value: value}, sysctl.Setting{Path: "ipv4/conf/lo/route_localnet", Value: value})
}

// kernelPorts are those that the kernel chooses from in a new network namespace.
var kernelPorts = model.PortRange{First: 32768, Last: 60999}

// movePorts has the kernel choose ports from another range in this network namespace, unless
// somebody has given it one of their own.
func movePorts(n *sysctl.Namespace, from, to model.PortRange) error {
	value, err := n.Get(portRange)
	if err != nil {
		return err
	}
	if have, err := parsePorts(value); err != nil || have != from {
		return err
	}
	return n.Set(sysctl.Setting{Path: portRange, Value: fmt.Sprintf("%d\t%d", to.First, to.Last)})
}

// LeaveOwnStack undoes in the container's namespace what JoinOwnStack did there for endpoint id and
// ports; the rest goes with the endpoint's device. A namespace that is gone is no error, and
// neither is one that was made anew under the same path and is another endpoint's by now: that
// one's stays.
func LeaveOwnStack(path string, id model.EndpointID, ports model.PortRange) error {
	err := inContainer(path, func() error {
		others, err := isOthersLoopback(id)
		if err != nil || others {
			return err
		}
		n, err := sysctl.Open()
		if err != nil {
			return err
		}
		defer n.Close()
		return errors.Join(DetachTC(netdev.LoopbackIfindex, Egress), movePorts(n, ports, kernelPorts),
			setLoopback(n, "0"))
	})
	if errors.Is(err, errNoContainer) {
		return nil
	}
	return err
}

// isOthersLoopback reports whether lo of this namespace has Heddle's program for another endpoint
// than id.
func isOthersLoopback(id model.EndpointID) (bool, error) {
	f, err := ownFilter(netdev.LoopbackIfindex, Egress)
	if errors.Is(err, errForeignFilter) {
		return false, nil
	}
	return f != nil && f.class != uint32(id), err
}

// errNoContainer: there is no network namespace of a container at the path.
var errNoContainer = errors.New("no container")

func inContainer(path string, do func() error) error {
	ns, err := openContainer(path)
	if err != nil {
		return fmt.Errorf("%w: %w", errNoContainer, err)
	}
	defer ns.Close()
	if err := netns.Visit(ns, do); err != nil {
		return fmt.Errorf("container: %w", err)
	}
	return nil
}
