package netcfg

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
	"heddle.dev/heddle/internal/netcfg/sysctl"
	"heddle.dev/heddle/internal/netns"
)

// maxAlias bounds the name shown as a device's alias; the kernel takes 255 bytes.
const maxAlias = 200

// loopbackMTU is that of lo, in bytes.
const loopbackMTU = 65536

// loopbackMSS is the segment size, in bytes, that lo would ask for in a's family. A listener of the
// node answers every SYN from an endpoint along the endpoint's route, but where the peer is a node
// socket too the data goes over lo; a peer behind the route sends no more than its own device's MTU
// allows, whatever it is asked for.
func loopbackMSS(a netip.Addr) int {
	const ip4, ip6, tcp = 20, 40, 20
	if a.Is6() {
		return loopbackMTU - ip6 - tcp
	}
	return loopbackMTU - ip4 - tcp
}

// minMTU is the smallest packet every IPv4 host must take; IPv6 asks for more (minMTU6).
const minMTU = 576

// EndpointConfig is what AddEndpoint brings an endpoint to.
type EndpointConfig struct {
	ID model.EndpointID
	// Name is shown as the alias of the node's device, for operators.
	Name string
	// Device is the name of the container's device; "" is model.DefaultDevice.
	Device string
	// Addrs are the endpoint's overlay addresses, one a family at most.
	Addrs []netip.Addr
	// Gateways are the node's own addresses (NodeDevices.Gateways): one for each family of Addrs.
	Gateways []netip.Addr
	// NetnsPath names the container's network namespace.
	NetnsPath string
	// MTU is that of the container's device, in bytes; 0 means the overlay device's.
	MTU int
	// Table is NodeConfig.Table.
	Table int
	// Intercepted makes the addresses local to the node for marked packets, because the node's
	// sockets hold them.
	Intercepted bool
	// Adopt takes over routes that a container engine made in the container, instead of refusing
	// them.
	Adopt bool
	// Guard attaches the programs that guard the endpoint to the node's device, given by its
	// interface index, before the container's device is up: whatever ends the agent, no container
	// sends a packet that they have not seen. nil for none.
	Guard func(ifindex int) error
	// Pair is what MakePair gave for the same endpoint; nil makes it.
	Pair *Pair
	// Routes are those that several endpoints share the list of; nil: this one lists for itself.
	Routes *Routes
}

// EndpointDevice describes an endpoint's veth pair.
type EndpointDevice struct {
	Ifindex          int    // node's side
	Name             string // node's side
	HostMAC          string // node's side
	ContainerMAC     string
	ContainerIfindex int    // in the container's namespace
	Netns            uint32 // inode of that namespace
	MTU              int    // bytes
	IDs              NetnsIDs
	Made             bool    // this call added the pair
	Routes           *Routes // EndpointConfig's
}

// EndpointLink is the node's side of an endpoint's pair as Endpoints finds it.
type EndpointLink struct {
	ID      model.EndpointID
	Ifindex int
	Name    string
}

func (c EndpointConfig) validate() error {
	if c.ID == 0 || c.ID > model.MaxEndpointID {
		return fmt.Errorf("endpoint id %d: want 1..%d", c.ID, model.MaxEndpointID)
	}
	if len(c.Addrs) == 0 {
		return fmt.Errorf("endpoint %d: addrs: want at least one address", c.ID)
	}
	for i, a := range c.Addrs {
		if !a.IsValid() || a.Is4In6() || i > 0 && a.Is4() == c.Addrs[0].Is4() {
			return fmt.Errorf("endpoint %d: addrs %v: want one address a family at most", c.ID, c.Addrs)
		}
		if gw := rtnl.SameFamily(a, c.Gateways); !gw.IsValid() || gw == a {
			return fmt.Errorf("endpoint %d: address %v: want a gateway of its family that is another address, have %v", c.ID, a, c.Gateways)
		}
	}
	smallest := minMTU
	if hasIPv6(c.Addrs) {
		smallest = minMTU6
	}
	if err := model.ValidateDevice(c.Device); err != nil {
		return fmt.Errorf("endpoint %d: device %w", c.ID, err)
	}
	if c.MTU != 0 && c.MTU < smallest {
		return fmt.Errorf("endpoint %d: mtu %d: want %d or more", c.ID, c.MTU, smallest)
	}
	if c.Table <= 0 {
		return fmt.Errorf("endpoint %d: table %d: want the table of SetupNode", c.ID, c.Table)
	}
	return nil
}

// ErrNoContainer says that the path of a container's network namespace leads to none: the container
// has ended.
var ErrNoContainer = errors.New("container is gone")

// NetnsInode gives the inode of the container's network namespace at path, which tells it from all
// others that exist.
func NetnsInode(path string) (uint64, error) {
	ns, err := openContainer(path)
	if err != nil {
		return 0, err
	}
	defer ns.Close()
	return inodeOf(ns)
}

func inodeOf(ns *os.File) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(ns.Fd()), &st); err != nil {
		return 0, fmt.Errorf("network namespace %s: %w", ns.Name(), err)
	}
	return st.Ino, nil
}

// bootID is where the kernel says which start of the machine this is.
const bootID = "/proc/sys/kernel/random/boot_id"

// IdentifyNetns says which network namespace is at path: the node's own, too.
func IdentifyNetns(path string) (is model.NetnsIdentity, err error) {
	ns, err := netns.Open(path)
	if errors.Is(err, netns.ErrNone) {
		return is, fmt.Errorf("%w: %w", ErrNoContainer, err)
	}
	if err != nil {
		return is, err
	}
	defer ns.Close()
	boot, err := os.ReadFile(bootID)
	if err != nil {
		return is, fmt.Errorf("boot id: %w", err)
	}
	is.Boot = strings.TrimSpace(string(boot))
	err = netns.Visit(ns, func() error {
		is.Cookie, err = sysctl.NetnsCookie()
		return err
	})
	return is, err
}

// CheckNetns reports if the file at path is no network namespace, or is not there.
func CheckNetns(path string) error {
	f, err := netns.Open(path)
	if err != nil {
		return err
	}
	return f.Close()
}

// AddEndpoint joins the container's network namespace to the overlay by a veth pair, or brings the
// pair that is there to cfg. If it made the pair and then met an error, the pair is gone again when
// it returns.
func AddEndpoint(cfg EndpointConfig) (_ EndpointDevice, err error) {
	if err := cfg.validate(); err != nil {
		return EndpointDevice{}, err
	}
	cfg.Device = cmp.Or(cfg.Device, model.DefaultDevice)
	ns, err := openContainer(cfg.NetnsPath)
	if err != nil {
		return EndpointDevice{}, fmt.Errorf("endpoint %d: netns_path: %w", cfg.ID, err)
	}
	defer ns.Close()
	pair := cfg.Pair
	if pair == nil {
		if pair, err = makePair(ns, cfg); err != nil {
			return EndpointDevice{}, err
		}
	}
	host := pair.host
	cfg.MTU = pair.mtu
	if pair.made {
		defer func() {
			if err != nil {
				err = errors.Join(err, DelEndpoint(cfg.ID, cfg.Addrs, cfg.Table))
			}
		}()
	}
	if err := netns.Visit(ns, func() error { return setContainerSide(pair.eth, cfg, pair.made) }); err != nil {
		return EndpointDevice{}, fmt.Errorf("endpoint %d: container: %w", cfg.ID, err)
	}
	ids := NetnsIDs{Container: host.Attrs().NetNsID, Node: pair.eth.Attrs().NetNsID}
	if ids.Container < 0 || ids.Node < 0 {
		return EndpointDevice{}, fmt.Errorf("endpoint %d: device %s: the kernel does not say which network namespaces it is between", cfg.ID, host.Attrs().Name)
	}
	if err := setHostSide(host, cfg, pair.made); err != nil {
		return EndpointDevice{}, fmt.Errorf("endpoint %d: %w", cfg.ID, err)
	}
	inode, err := inodeOf(ns)
	if err != nil {
		return EndpointDevice{}, fmt.Errorf("endpoint %d: netns_path: %w", cfg.ID, err)
	}
	return EndpointDevice{
		Netns: uint32(inode), Made: pair.made, Ifindex: host.Attrs().Index, Name: host.Attrs().Name, HostMAC: netdev.HostMAC(cfg.ID).String(),
		ContainerMAC: netdev.ContainerMAC(cfg.ID).String(), ContainerIfindex: host.Attrs().ParentIndex, MTU: cfg.MTU, IDs: ids, Routes: cfg.Routes,
	}, nil
}

// setMTU makes the overlay device's the MTU if none was asked for.
func (c *EndpointConfig) setMTU() error {
	if c.MTU != 0 {
		return nil
	}
	overlay, err := rtnl.GetLink(netdev.Overlay)
	if err != nil {
		return fmt.Errorf("endpoint %d: %w; set the node up first", c.ID, err)
	}
	c.MTU = overlay.Attrs().MTU
	return nil
}

// openContainer opens the namespace at path and refuses the node's own: what an endpoint gets would
// replace the node's default route.
func openContainer(path string) (*os.File, error) {
	ns, err := netns.Open(path)
	if errors.Is(err, netns.ErrNone) {
		return nil, fmt.Errorf("%w: %w", ErrNoContainer, err)
	}
	if err != nil {
		return nil, err
	}
	own, err := netns.Open("/proc/thread-self/ns/net")
	if err != nil {
		ns.Close()
		return nil, err
	}
	defer own.Close()
	same, err := netns.Same(ns, own)
	if err == nil && same {
		err = fmt.Errorf("%s is the node's own network namespace; give the container one of its own", path)
	}
	if err != nil {
		ns.Close()
		return nil, err
	}
	return ns, nil
}

// readyContainerSide runs in the container's namespace, and sets what a device of an endpoint is
// set to there before it has addresses.
func readyContainerSide(cfg EndpointConfig) (netlink.Link, error) {
	eth, err := rtnl.GetLink(cfg.Device)
	if err != nil {
		return nil, err
	}
	if err := rtnl.SetMTU(rtnl.Each(), eth, cfg.MTU); err != nil {
		return nil, err
	}
	// After the MTU, since a device with too small a one has no IPv6 settings.
	n, err := sysctl.Open()
	if err != nil {
		return nil, err
	}
	defer n.Close()
	return eth, ready6(n, cfg.Device, cfg.Addrs, "lo")
}

// setContainerSide runs in the container's namespace: addresses, a permanent neighbour for the
// gateway so that nobody has to ask for it, and the default route. fresh says that the device was
// made just now.
func setContainerSide(eth netlink.Link, cfg EndpointConfig, fresh bool) error {
	// Up before the addresses, since going down takes IPv6 ones away. lo carries what the container
	// sends to itself.
	var b rtnl.Batch
	index := eth.Attrs().Index
	b.Up(netdev.LoopbackIfindex)
	b.Up(index)
	for _, a := range cfg.Addrs {
		if fresh {
			b.Address(index, a)
		}
		// Not by setNeighbours: see there of what a list costs.
		b.Neighbour(index, rtnl.SameFamily(a, cfg.Gateways), netdev.HostMAC(cfg.ID).String())
	}
	if err := b.Do(unix.EEXIST); err != nil {
		return err
	}
	if !fresh {
		if err := setAddrs(rtnl.Each(), eth, cfg.Addrs); err != nil {
			return err
		}
	}
	if err := setContainerRoutes(index, cfg, fresh); err != nil || !fresh {
		return err
	}
	return awaitAddrs6(eth, slices.DeleteFunc(slices.Clone(cfg.Addrs), netip.Addr.Is4))
}

// setContainerRoutes is the part of setContainerSide that leads out of the container by neighbours
// that are there. fresh says that no route of Heddle's is yet.
func setContainerRoutes(index int, cfg EndpointConfig, fresh bool) error {
	h := rtnl.Each()
	owned := &ownedRoutes{h: h}
	var routes []route
	for _, a := range cfg.Addrs {
		gw := rtnl.SameFamily(a, cfg.Gateways)
		routes = append(routes, // in this order: the second needs the first
			route{table: unix.RT_TABLE_MAIN, dst: netip.PrefixFrom(gw, gw.BitLen()), kind: unix.RTN_UNICAST, link: index},
			route{table: unix.RT_TABLE_MAIN, dst: defaultDst(a), kind: unix.RTN_UNICAST, link: index, gw: gw})
	}
	if fresh && !cfg.Adopt {
		return owned.ensure(routes...)
	}
	have, err := owned.list()
	if err != nil {
		return err
	}
	want := map[routeKey]bool{}
	for _, r := range routes {
		want[r.key()] = true
		if cfg.Adopt {
			err = replaceRoute(h, have, r)
		} else {
			err = ensureRoute(h, have, r)
		}
		if err != nil {
			return err
		}
	}
	for key, r := range have {
		if want[key] || !r.dst.IsSingleIP() {
			continue
		}
		was := permanentNeighbour(index, r.dst.Addr(), "") // a gateway once
		if err := h.NeighDel(was); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("delete neighbour %v: %w", r.dst.Addr(), err)
		}
	}
	return pruneRoutes(h, have, func(r route) bool { return !want[r.key()] })
}

// defaultDst is the destination of the default route of a's family.
func defaultDst(a netip.Addr) netip.Prefix {
	if a.Is6() {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

// readyHostSide is readyContainerSide for the node's end.
func readyHostSide(host netlink.Link, cfg EndpointConfig) error {
	name := host.Attrs().Name
	if err := rtnl.SetMTU(rtnl.Each(), host, cfg.MTU); err != nil {
		return err
	}
	n, err := sysctl.OfNode()
	if err != nil {
		return err
	}
	// What policy rejects is marked so, and gets no further if nftables does not answer it: see
	// stop() in bpf/policy/decide.h.
	if err := n.Set(sysctl.Setting{Path: "ipv4/conf/" + name + "/drop_unicast_in_l2_multicast", Value: "1"}); err != nil {
		return err
	}
	if err := ready6(n, name, cfg.Addrs); err != nil || !hasIPv6(cfg.Addrs) {
		return err
	}
	return forwardFrom(n, name)
}

// setHostSide sets the node's end up and leads the endpoint's addresses to it. fresh says that the
// device was made just now: nothing of an earlier state leads to it.
func setHostSide(host netlink.Link, cfg EndpointConfig, fresh bool) error {
	h, index := rtnl.Each(), host.Attrs().Index
	var b rtnl.Batch
	if alias := cfg.Name[:min(len(cfg.Name), maxAlias)]; host.Attrs().Alias != alias || host.Attrs().Flags&net.FlagUp == 0 {
		b.Alias(index, alias)
		b.Up(index)
	}
	routes := cfg.Routes.owned()
	if !fresh {
		if err := dropOldAddrs(routes, index, cfg); err != nil {
			return err
		}
	}
	neighbours := map[netip.Addr]string{}
	var want []route
	for _, a := range cfg.Addrs {
		neighbours[a] = netdev.ContainerMAC(cfg.ID).String()
		if fresh {
			b.Neighbour(index, a, neighbours[a])
		}
		dst := netip.PrefixFrom(a, a.BitLen())
		want = append(want, route{table: unix.RT_TABLE_MAIN, dst: dst, kind: unix.RTN_UNICAST, link: index, src: rtnl.SameFamily(a, cfg.Gateways), advMSS: loopbackMSS(a)})
		local := localRoute(cfg.Table, a)
		if cfg.Intercepted {
			want = append(want, local)
		} else if err := deleteRoute(h, local); err != nil {
			return err
		}
	}
	if err := b.Do(); err != nil {
		return err
	}
	if !fresh {
		if err := routes.setNeighbours(index, neighbours); err != nil {
			return err
		}
	}
	return routes.ensure(want...)
}

// dropOldAddrs deletes the routes of addresses the endpoint had and has no more: those by its
// device and their like in cfg.Table.
func dropOldAddrs(routes *ownedRoutes, index int, cfg EndpointConfig) error {
	have, err := routes.list()
	if err != nil {
		return err
	}
	for _, key := range routes.byLink[index] {
		if slices.Contains(cfg.Addrs, key.dst.Addr()) || model.MirrorRange.Overlaps(key.dst) {
			continue
		}
		local := routeKey{table: cfg.Table, dst: key.dst}
		for _, k := range []routeKey{key, local} {
			r, there := have[k]
			if !there || r.link != index && r.kind != unix.RTN_LOCAL {
				continue
			}
			if err := deleteRoute(routes.h, r); err != nil {
				return err
			}
			delete(have, k)
		}
	}
	return nil
}

// DelEndpoint takes away what AddEndpoint made for id and addrs with a table. What is not there, or
// went with the container's namespace, is no error; a device of the same name that is not Heddle's
// stays.
func DelEndpoint(id model.EndpointID, addrs []netip.Addr, table int) error {
	h, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	// Local routes first: with the device, the addresses' other routes go.
	var errs []error
	for _, a := range addrs {
		errs = append(errs, deleteRoute(h, localRoute(table, a)))
	}
	host, err := rtnl.FindLink(netdev.EndpointName(id))
	errs = append(errs, err)
	if host != nil {
		if found, ours := netdev.EndpointOf(host); ours && found == id {
			_, err := deleteSeen(host)
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("endpoint %d: %w", id, err)
	}
	return nil
}

// localRoute makes an endpoint's address local to the node for marked packets.
func localRoute(table int, a netip.Addr) route {
	return route{table: table, dst: netip.PrefixFrom(a, a.BitLen()), kind: unix.RTN_LOCAL, link: netdev.LoopbackIfindex}
}

// KeepLocal removes the routes that make addresses of endpoints local to the node for marked
// packets, but for those in keep.
func KeepLocal(keep map[netip.Addr]bool) error {
	h, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	have, err := ownRoutes(h)
	if err != nil {
		return err
	}
	return pruneRoutes(h, have, func(r route) bool { return r.kind == unix.RTN_LOCAL && !keep[r.dst.Addr()] })
}

// Endpoints lists the endpoint devices of this network namespace, sorted by id.
func Endpoints() ([]EndpointLink, error) {
	h, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer h.Close()
	links, err := rtnl.Dump(h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	var out []EndpointLink
	for _, l := range links {
		if id, ours := netdev.EndpointOf(l); ours {
			out = append(out, EndpointLink{ID: id, Ifindex: l.Attrs().Index, Name: l.Attrs().Name})
		}
	}
	slices.SortFunc(out, func(a, b EndpointLink) int { return cmp.Compare(a.ID, b.ID) })
	return out, nil
}
