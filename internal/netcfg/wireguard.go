package netcfg

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// wireGuardOverhead is what WireGuard adds to a packet at most, in bytes: its own headers, UDP's
// and IPv6's. On IPv4 20 of them are not used, as is usual.
const wireGuardOverhead = 80

// innerMetric is that of the route by which inner addresses are unreachable where the device is
// not. An agent that does not encrypt leaves it: sockets of before send from an inner address.
const innerMetric = 18533

// WireGuard is what SetWireGuard brings the device to.
type WireGuard struct {
	// Outer is the node's address on the network that joins the nodes, Port the UDP port there.
	Outer netip.Addr
	Port  uint16
	// Inner is the node's inner address, in Prefix: all of that is reached by the device.
	Inner  netip.Addr
	Prefix netip.Prefix
	// PrivateKey is the node's.
	PrivateKey [32]byte
}

// WireGuardPeer is a key of another node.
type WireGuardPeer struct {
	Key      model.PublicKey
	Endpoint netip.AddrPort
	// Inner is the address that the holder of the key has. The zero Addr: the key may shake hands,
	// and have nothing yet.
	Inner netip.Addr
}

// WireGuardSession is how long after its handshake WireGuard's session ends (REJECT_AFTER_TIME).
const WireGuardSession = 3 * time.Minute

// WireGuardState is what the device says of a peer.
type WireGuardState struct {
	Inner netip.Addr
	// Endpoint is where it was last heard from; not valid before it is known.
	Endpoint netip.AddrPort
	// Handshake is when the last one was, the zero Time if there was none.
	Handshake      time.Time
	Sent, Received uint64 // bytes, encrypted
}

// SetWireGuard makes the device, or brings the one there to w: with the same key, what goes by it
// does not notice. Peers stay as they are.
func SetWireGuard(w WireGuard) error {
	h, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	outer, err := findUnderlay(h, w.Outer)
	if err != nil {
		return err
	}
	link, err := wireGuardLink(h)
	if err != nil {
		return err
	}
	if err := innerIsFree(h, link, w.Prefix, "--encrypt-prefix"); err != nil {
		return err
	}
	if err := errors.Join(netdev.QuietIPv6(netdev.WireGuard), rtnl.SetMTU(h, link, outer.Attrs().MTU-wireGuardOverhead)); err != nil {
		return err
	}
	have, err := ownRoutes(h)
	if err != nil {
		return err
	}
	if err := ensureRoute(h, have, route{table: unix.RT_TABLE_MAIN, dst: w.Prefix, kind: unix.RTN_UNREACHABLE, metric: innerMetric}); err != nil {
		return err
	}
	port, key := int(w.Port), wgtypes.Key(w.PrivateKey)
	if err := configureWireGuard(wgtypes.Config{PrivateKey: &key, ListenPort: &port}); err != nil {
		return err
	}
	if err := rtnl.SetUp(h, link); errors.Is(err, unix.EADDRINUSE) {
		return fmt.Errorf("encrypt port %d: the UDP port is in use here; choose another with --encrypt-port: %w", w.Port, err)
	} else if err != nil {
		return err
	}
	return setInnerAddr(h, link, netip.PrefixFrom(w.Inner, w.Prefix.Bits()))
}

// wireGuardLink gives the device, which it makes unless it is there.
func wireGuardLink(h *netlink.Handle) (netlink.Link, error) {
	have, err := rtnl.FindLink(netdev.WireGuard)
	if err != nil {
		return nil, err
	}
	if have == nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = netdev.WireGuard
		if err := h.LinkAdd(&netlink.Wireguard{LinkAttrs: attrs}); err != nil {
			return nil, fmt.Errorf("add device %s: %w", netdev.WireGuard, noWireGuard(err))
		}
		if have, err = h.LinkByName(netdev.WireGuard); err != nil {
			return nil, fmt.Errorf("device %s: %w", netdev.WireGuard, err)
		}
	}
	if have.Type() != "wireguard" {
		return nil, fmt.Errorf("device %s: the name is taken by a device of kind %s; rename or delete it", netdev.WireGuard, have.Type())
	}
	return have, nil
}

// noWireGuard says what to do about a kernel without WireGuard.
func noWireGuard(err error) error {
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("%w: this kernel has no WireGuard: load or install its module (modprobe wireguard; Linux 5.6 and later have it), or start every node of the network without --encrypt", err)
	}
	return err
}

// CheckWireGuard reports why this kernel makes no WireGuard device. It leaves nothing behind.
func CheckWireGuard() error {
	return inThrowAwayNetns(func() error {
		h, err := rtnl.Open()
		if err != nil {
			return err
		}
		defer h.Close()
		return noWireGuard(tryWireGuard(h))
	})
}

func tryWireGuard(h *netlink.Handle) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "probe-wg"
	return rtnl.Errno("add wireguard", h.LinkAdd(&netlink.Wireguard{LinkAttrs: attrs}))
}

// innerIsFree reports whether some other device has an address in the prefix of inner addresses.
func innerIsFree(h *netlink.Handle, own netlink.Link, prefix netip.Prefix, flag string) error {
	addrs, err := rtnl.Dump(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range addrs {
		if p := rtnl.FromIPNet(a.IPNet); a.LinkIndex != own.Attrs().Index && p.Overlaps(prefix) {
			return fmt.Errorf("inner addresses %s: this host uses %s; choose another %s, equal on all nodes", prefix, p, flag)
		}
	}
	return nil
}

// setInnerAddr makes want the device's one address. Its prefix makes the route to all inner
// addresses.
func setInnerAddr(h *netlink.Handle, link netlink.Link, want netip.Prefix) error {
	have, err := rtnl.Dump(func() ([]netlink.Addr, error) { return h.AddrList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("device %s: list addresses: %w", link.Attrs().Name, err)
	}
	found := false
	for _, a := range have {
		if p := rtnl.FromIPNet(a.IPNet); p == want {
			found = true
		} else if err := h.AddrDel(link, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("device %s: remove address %v: %w", link.Attrs().Name, p, err)
		}
	}
	if found {
		return nil
	}
	network := &net.IPNet{IP: want.Addr().AsSlice(), Mask: net.CIDRMask(want.Bits(), want.Addr().BitLen())}
	if err := h.AddrAdd(link, &netlink.Addr{IPNet: network}); err != nil {
		return fmt.Errorf("device %s: add address %v: %w", link.Attrs().Name, want, err)
	}
	return nil
}

// SetWireGuardKey gives the device another private key, and has it shake hands anew with all peers
// at once: by that they learn of the key. What they send by earlier sessions still arrives.
func SetWireGuardKey(private [32]byte) error {
	dev, err := readWireGuard()
	if err != nil {
		return err
	}
	key := wgtypes.Key(private)
	greet, rest := greetings(dev.Peers)
	if err := configureWireGuard(wgtypes.Config{PrivateKey: &key, Peers: greet}); err != nil {
		return err
	}
	return configureWireGuard(wgtypes.Config{Peers: rest})
}

// greetings gives what has a device send each peer an empty packet, and what takes that back: a
// peer that gets an interval for such packets is sent one at once.
func greetings(peers []wgtypes.Peer) (greet, rest []wgtypes.PeerConfig) {
	interval, none := time.Minute, time.Duration(0)
	for _, p := range peers {
		greet = append(greet, wgtypes.PeerConfig{PublicKey: p.PublicKey, UpdateOnly: true, PersistentKeepaliveInterval: &interval})
		rest = append(rest, wgtypes.PeerConfig{PublicKey: p.PublicKey, UpdateOnly: true, PersistentKeepaliveInterval: &none})
	}
	return greet, rest
}

// SetWireGuardPeers makes want the device's peers: no two with the same key or inner address. What
// is as it should be is left alone; an inner address that goes to another key goes in one step.
// Peers with a session stay at the endpoints that they were heard from: behind a router that
// translates, only those lead to them.
func SetWireGuardPeers(want []WireGuardPeer) error {
	dev, err := readWireGuard()
	if err != nil {
		return err
	}
	if changes := peerChanges(dev.Peers, want, time.Now()); len(changes) > 0 {
		return configureWireGuard(wgtypes.Config{Peers: changes})
	}
	return nil
}

// peerChanges gives what leads from the peers that there are to want. Those that go come last: what
// takes their place has their address by then.
func peerChanges(have []wgtypes.Peer, want []WireGuardPeer, now time.Time) (changes []wgtypes.PeerConfig) {
	old := make(map[wgtypes.Key]wgtypes.Peer, len(have))
	for _, p := range have {
		old[p.PublicKey] = p
	}
	for _, w := range want {
		key := wgtypes.Key(w.Key)
		p, is := old[key]
		delete(old, key)
		var allowed []net.IPNet
		if w.Inner.IsValid() {
			allowed = []net.IPNet{{IP: w.Inner.AsSlice(), Mask: net.CIDRMask(w.Inner.BitLen(), w.Inner.BitLen())}}
		}
		same := slices.EqualFunc(p.AllowedIPs, allowed, func(a, b net.IPNet) bool { return a.String() == b.String() })
		change := wgtypes.PeerConfig{PublicKey: key, Endpoint: net.UDPAddrFromAddrPort(w.Endpoint), ReplaceAllowedIPs: true, AllowedIPs: allowed}
		if p.Endpoint != nil && (p.Endpoint.AddrPort() == w.Endpoint || now.Sub(p.LastHandshakeTime) < WireGuardSession) {
			change.Endpoint = nil
		}
		if !is || !same || change.Endpoint != nil {
			changes = append(changes, change)
		}
	}
	for _, p := range have {
		if _, stale := old[p.PublicKey]; stale {
			changes = append(changes, wgtypes.PeerConfig{PublicKey: p.PublicKey, Remove: true})
		}
	}
	return changes
}

// WireGuardPeers gives what the device says of its peers, by their keys.
func WireGuardPeers() (map[model.PublicKey]WireGuardState, error) {
	dev, err := readWireGuard()
	if err != nil {
		return nil, err
	}
	out := make(map[model.PublicKey]WireGuardState, len(dev.Peers))
	for _, p := range dev.Peers {
		s := WireGuardState{Handshake: p.LastHandshakeTime, Sent: uint64(p.TransmitBytes), Received: uint64(p.ReceiveBytes)}
		if p.Endpoint != nil {
			s.Endpoint = p.Endpoint.AddrPort()
		}
		if len(p.AllowedIPs) > 0 {
			s.Inner = rtnl.FromIP(p.AllowedIPs[0].IP)
		}
		out[model.PublicKey(p.PublicKey)] = s
	}
	return out, nil
}

// ErrNoWireGuard says that the device is not there any more.
var ErrNoWireGuard = errors.New("the device of encryption was removed")

// FindWireGuard reports, as ErrNoWireGuard, that the device is not there, or has another index than
// ifindex, and so is another one.
func FindWireGuard(ifindex int) error {
	l, err := rtnl.FindLink(netdev.WireGuard)
	if err == nil && (l == nil || l.Attrs().Index != ifindex) {
		err = fmt.Errorf("%w: %s", ErrNoWireGuard, netdev.WireGuard)
	}
	return err
}

// RemoveWireGuard deletes the device of an earlier agent, which encrypted.
func RemoveWireGuard() error {
	h, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	have, err := rtnl.FindLink(netdev.WireGuard)
	if err != nil || have == nil || have.Type() != "wireguard" {
		return err
	}
	return rtnl.DeleteLink(h, have)
}

func readWireGuard() (*wgtypes.Device, error) {
	c, err := wgctrl.New()
	if err != nil {
		return nil, fmt.Errorf("open WireGuard: %w", err)
	}
	defer c.Close()
	dev, err := c.Device(netdev.WireGuard)
	if err != nil {
		return nil, fmt.Errorf("read device %s: %w", netdev.WireGuard, err)
	}
	return dev, nil
}

func configureWireGuard(cfg wgtypes.Config) error {
	c, err := wgctrl.New()
	if err != nil {
		return fmt.Errorf("open WireGuard: %w", err)
	}
	defer c.Close()
	if err := c.ConfigureDevice(netdev.WireGuard, cfg); err != nil {
		return fmt.Errorf("configure device %s: %w", netdev.WireGuard, err)
	}
	return nil
}
