package netcfg

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/netns"
)

// waitingPrefix and the endpoint's id in hexadecimal name the container's side of a pair that waits
// on the node for its container.
const waitingPrefix = "hc"

// Waiting is a pair whose container's side is still on the node: the container engine moves it.
type Waiting struct {
	Ifindex int    // node's side
	Device  string // container's side, as long as it is on the node
	MTU     int    // bytes
}

// PrepareEndpoint makes the pair of an endpoint whose network namespace is not there yet (NetnsPath
// is not looked at). Once the engine has moved the container's side there, called it Device and
// given it address and routes, which EngineDone tells, AddEndpoint with Adopt does the rest.
func PrepareEndpoint(cfg EndpointConfig) (_ Waiting, err error) {
	if err := cfg.validate(); err != nil {
		return Waiting{}, err
	}
	h, err := rtnl.Open()
	if err != nil {
		return Waiting{}, err
	}
	defer h.Close()
	if err := cfg.setMTU(); err != nil {
		return Waiting{}, err
	}
	name := netdev.EndpointName(cfg.ID)
	there, err := rtnl.FindLink(name)
	if err != nil {
		return Waiting{}, err
	}
	if there != nil {
		return Waiting{}, fmt.Errorf("endpoint %d: device %s is there already", cfg.ID, name)
	}
	waiting := waitingName(cfg.ID)
	if err := h.LinkAdd(newPair(cfg, waiting)); err != nil {
		return Waiting{}, fmt.Errorf("endpoint %d: add devices %s, %s: %w", cfg.ID, name, waiting, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, DelEndpoint(cfg.ID, cfg.Addrs, cfg.Table))
		}
	}()
	host, err := rtnl.GetLink(name)
	if err != nil {
		return Waiting{}, err
	}
	// Nothing of the node's own stack is to be at that end, nor to speak there.
	if err := netdev.QuietIPv6(waiting); err != nil {
		return Waiting{}, fmt.Errorf("endpoint %d: %w", cfg.ID, err)
	}
	if err := errors.Join(readyHostSide(host, cfg), setHostSide(host, cfg, true)); err != nil {
		return Waiting{}, fmt.Errorf("endpoint %d: %w", cfg.ID, err)
	}
	return Waiting{Ifindex: host.Attrs().Index, Device: waiting, MTU: cfg.MTU}, nil
}

func waitingName(id model.EndpointID) string {
	return waitingPrefix + strconv.FormatUint(uint64(id), 16)
}

// EngineDone reports whether an engine has done its part for a prepared endpoint: the container's
// side of the pair is in the namespace under its name, and a default route leads through it, which
// engines add last.
func EngineDone(cfg EndpointConfig) (bool, error) {
	if cfg.Device == "" {
		cfg.Device = model.DefaultDevice
	}
	ns, err := openContainer(cfg.NetnsPath)
	if errors.Is(err, ErrNoContainer) {
		return false, nil // the engine has not mounted it yet
	}
	if err != nil {
		return false, err
	}
	defer ns.Close()
	h, err := rtnl.Open()
	if err != nil {
		return false, err
	}
	defer h.Close()
	host, err := rtnl.FindLink(netdev.EndpointName(cfg.ID))
	if err != nil || host == nil {
		return false, err
	}
	joined, err := isJoined(ns, host, cfg)
	if err != nil || !joined {
		return false, err
	}
	err = netns.DoIn(ns, func() error {
		joined, err = hasDefaultRoute(cfg.Device)
		return err
	})
	return joined, err
}

// hasDefaultRoute reports whether this namespace has a default route for IPv4 by device.
func hasDefaultRoute(device string) (bool, error) {
	h, err := rtnl.Open()
	if err != nil {
		return false, err
	}
	defer h.Close()
	eth, err := rtnl.FindLink(device)
	if err != nil || eth == nil {
		return false, err
	}
	routes, err := rtnl.Dump(func() ([]netlink.Route, error) { return h.RouteList(eth, netlink.FAMILY_V4) })
	if err != nil {
		return false, fmt.Errorf("list routes: %w", err)
	}
	for _, r := range routes {
		if r.Table == unix.RT_TABLE_MAIN && parseRoute(r).dst.Bits() == 0 {
			return true, nil
		}
	}
	return false, nil
}

// dockerDNS is where Docker's DNS is asked for names in a container.
var dockerDNS = netip.AddrFrom4([4]byte{127, 0, 0, 11})

// ResolverPort gives the TCP port, in host byte order, at which something in the network namespace
// at path listens on 127.0.0.11: Docker's DNS, which a DNAT rule for the namespace's own output
// makes of port 53. 0 if nothing does, or more than one socket.
func ResolverPort(path string) (port uint16, err error) {
	err = InContainer(path, func() error {
		all, err := ListenersIn(model.PortRange{First: 1, Last: 65535})
		if err != nil {
			return err
		}
		port = resolverPort(all)
		return nil
	})
	return port, err
}

func resolverPort(listeners []netip.AddrPort) (port uint16) {
	for _, l := range listeners {
		switch {
		case l.Addr() != dockerDNS:
		case port != 0:
			return 0
		default:
			port = l.Port()
		}
	}
	return port
}
