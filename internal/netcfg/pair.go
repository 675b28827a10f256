package netcfg

import (
	"cmp"
	"errors"
	"fmt"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/netns"
)

// Pair is an endpoint's pair that has its programs and settings, and no addresses or routes yet.
type Pair struct {
	host, eth netlink.Link // the node's side and the container's
	mtu       int          // bytes
	made      bool         // by the call that gives it
}

// MakePair does of AddEndpoint what can be done before it is known that the endpoint may have its
// addresses: nothing leads to the pair it makes, and its devices are down. AddEndpoint with Pair
// does the rest, DelEndpoint undoes it.
func MakePair(cfg EndpointConfig) (*Pair, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	cfg.Device = cmp.Or(cfg.Device, model.DefaultDevice)
	ns, err := openContainer(cfg.NetnsPath)
	if err != nil {
		return nil, fmt.Errorf("endpoint %d: netns_path: %w", cfg.ID, err)
	}
	defer ns.Close()
	return makePair(ns, cfg)
}

func makePair(ns *os.File, cfg EndpointConfig) (_ *Pair, err error) {
	if err := cfg.setMTU(); err != nil {
		return nil, err
	}
	pair := &Pair{mtu: cfg.MTU}
	if pair.host, pair.made, err = setPair(rtnl.Each(), ns, cfg); err != nil {
		return nil, fmt.Errorf("endpoint %d: %w", cfg.ID, err)
	}
	if err := pair.ready(ns, cfg); err != nil {
		err = fmt.Errorf("endpoint %d: %w", cfg.ID, err)
		if pair.made {
			err = errors.Join(err, DelEndpoint(cfg.ID, cfg.Addrs, cfg.Table))
		}
		return nil, err
	}
	return pair, nil
}

// ready gives the pair its programs and both its ends what a device of an endpoint is set to.
func (p *Pair) ready(ns *os.File, cfg EndpointConfig) (err error) {
	if cfg.Guard != nil {
		if err := cfg.Guard(p.host.Attrs().Index); err != nil {
			return fmt.Errorf("guard: %w", err)
		}
	}
	if err := readyHostSide(p.host, cfg); err != nil {
		return err
	}
	err = netns.Visit(ns, func() error {
		p.eth, err = readyContainerSide(cfg)
		return err
	})
	if err != nil {
		return fmt.Errorf("container: %w", err)
	}
	return nil
}

// setPair makes sure of a pair whose one end is the node's and whose other end is in ns; made says
// that this call added it. A pair that leads elsewhere, as after the container was made anew, is
// replaced.
func setPair(h *netlink.Handle, ns *os.File, cfg EndpointConfig) (host netlink.Link, made bool, err error) {
	name := netdev.EndpointName(cfg.ID)
	host, err = rtnl.FindLink(name)
	if err != nil {
		return nil, false, err
	}
	if host != nil {
		if id, ours := netdev.EndpointOf(host); !ours || id != cfg.ID {
			return nil, false, fmt.Errorf("device %s: the name is taken by a device that is not Heddle's; rename or delete it", name)
		}
		joined, err := isJoined(ns, host, cfg)
		if err != nil {
			return nil, false, err
		}
		if joined {
			return host, false, nil
		}
		if err := rtnl.DeleteLink(h, host); err != nil {
			return nil, false, err
		}
	}
	pair := newPair(cfg, cfg.Device)
	pair.PeerNamespace = netlink.NsFd(ns.Fd())
	if err := h.LinkAdd(pair); err != nil {
		if errors.Is(err, unix.EEXIST) {
			return nil, false, fmt.Errorf("add device %s: %s has a device %s already; detach it from the other network: %w",
				name, cfg.NetnsPath, cfg.Device, err)
		}
		return nil, false, fmt.Errorf("add device %s: %w", name, err)
	}
	host, err = rtnl.GetLink(name)
	if err != nil {
		return nil, false, errors.Join(err, rtnl.DeleteLink(h, pair))
	}
	return host, true, nil
}

// newPair describes the pair of an endpoint, its container's side called peer.
func newPair(cfg EndpointConfig, peer string) *netlink.Veth {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = netdev.EndpointName(cfg.ID), cfg.MTU, netdev.HostMAC(cfg.ID)
	// What the kernel takes without being told, but then it makes one for each processor first, and
	// waits for all of them at each end until the others are out of use.
	attrs.NumTxQueues, attrs.NumRxQueues = 1, 1
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerHardwareAddr, pair.PeerMTU = peer, netdev.ContainerMAC(cfg.ID), uint32(cfg.MTU)
	return pair
}

// isJoined reports whether the other end of host is the container's device in ns.
func isJoined(ns *os.File, host netlink.Link, cfg EndpointConfig) (joined bool, err error) {
	err = netns.Visit(ns, func() error {
		l, err := rtnl.FindLink(cfg.Device)
		if err != nil || l == nil {
			return err
		}
		a := l.Attrs()
		joined = a.Index == host.Attrs().ParentIndex && a.ParentIndex == host.Attrs().Index &&
			a.HardwareAddr.String() == netdev.ContainerMAC(cfg.ID).String()
		return nil
	})
	return joined, err
}
