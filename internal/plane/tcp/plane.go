// Package tcp is the plane of TCP connections (Slim, NSDI '19): programs in containers get sockets
// of the node's network namespace, and BPF programs say by overlay addresses what these do. It
// composes the programs (datapath), the answering of trapped calls (intercept), the probing of
// direct paths (probe) and the limits of traffic; it decides nothing about the network, and keeps
// nothing of endpoints that its caller does not tell it.
package tcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"heddle.dev/heddle/internal/fdkeep"
	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/tcp/congestion"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
	"heddle.dev/heddle/internal/plane/tcp/intercept"
	"heddle.dev/heddle/internal/plane/tcp/probe"
	"heddle.dev/heddle/internal/plane/tcp/procnet"
	"heddle.dev/heddle/internal/trap/ioctl"
)

// Config is what the plane of a node is made with.
type Config struct {
	// Self is the node; Network, Pool and the VXLAN fields are those of its network. Prefix6 is
	// zero if the node has no IPv6 overlay addresses.
	Self      model.Node
	Network   model.NetworkID
	Pool      []netip.Prefix
	Prefix6   netip.Prefix
	VNI       uint32
	VXLANPort uint16
	// Devices are the node's.
	Devices netcfg.NodeDevices
	// PinDir is a directory on a BPF file system, Cgroup the agent's.
	PinDir, Cgroup string
	// ProcDir is where the files are made that containers have for /proc/net/tcp and tcp6.
	ProcDir string
	// EndpointSockets is how many TCP sockets an endpoint may have.
	EndpointSockets uint64
	// EndpointPorts is how many of the node's ephemeral ports an endpoint may hold. 0 means a
	// quarter of those that containers may have.
	EndpointPorts uint32
	// Firewall is for how long what the nodes' forward chains have let pass goes past them. 0: this
	// node's see no connections.
	Firewall time.Duration
	// FirewallLive says what becomes of live connections that the forward chains forbid now.
	FirewallLive model.FirewallLive
	// Clear says what becomes of direct connections that are older than the node's encryption.
	Clear model.ClearConnections
	// Packets says whether packets between containers go past the node's stack; Stores are where
	// containers are refused by the stack.
	Packets model.PacketMode
	// Tunnel says how they travel between nodes.
	Tunnel model.TunnelMode
	Stores []netip.AddrPort
	// KeeperExe is the agent's own program, which has listen() called in another process. Empty:
	// containers get their sockets one by one.
	KeeperExe string
	Traps     plane.Traps
	Faults    plane.Faults
	// Observe is that of plane.Host. One goroutine calls it.
	Observe func(flow.Observation)
	// StacksChanged is that of plane.Host.
	StacksChanged func()
	Log           *slog.Logger
}

// Plane is the TCP plane of one node. What alters endpoints (Guard, Attach, Detach, Keep, the
// limits) is called by one goroutine at a time; what asks may be called by any.
type Plane struct {
	cfg       Config
	log       *slog.Logger
	nodePorts model.PortRange // that containers' sockets do not get
	datapath  *datapath.Datapath
	prober    *probe.Prober
	probed    probedNodes
	sockets   *intercept.Handler
	ioctls    *ioctl.Handler
	shaper    shaper
	packets   packets
	native    nativeProbes
	firewall  firewallWatch
	stacks    *congestion.Registry
	own       ownStacks
	// changedStacks: live connections are not at what SetStack said yet.
	changedStacks atomic.Bool
	passes        chan struct{} // says that one has got stuck or come back
	reported      reported
}

var _ interface {
	plane.Plane
	plane.Services
	plane.IDs
	plane.Status
	plane.Stacks
} = (*Plane)(nil)

// Name is the plane's.
func (p *Plane) Name() string { return "tcp" }

// Open loads the programs and attaches them to the node's devices. Connections of an earlier agent
// live on.
func Open(cfg Config) (_ *Plane, err error) {
	p := &Plane{cfg: cfg, log: cfg.Log, stacks: congestion.Open(cfg.PinDir), passes: make(chan struct{}, 1)}
	p.changedStacks.Store(true) // an earlier agent may have ended between SetStack and FollowStacks
	ephemeral, err := netcfg.EphemeralPorts()
	if err != nil {
		return nil, err
	}
	if p.nodePorts, err = nodePorts(ephemeral); err != nil {
		return nil, err
	}
	if p.cfg.EndpointPorts == 0 {
		p.cfg.EndpointPorts = defaultEndpointPorts(ephemeral, p.nodePorts)
	}
	if p.nodePorts.First == 0 {
		p.log.Warn("containers can take all ports that this node connects from", "ip_local_port_range", "short, or the kernel lacks IP_LOCAL_PORT_RANGE")
	}
	usual, err := netcfg.CongestionControl()
	if err != nil {
		return nil, err
	}
	p.datapath, err = datapath.Open(datapath.Config{
		PinDir: cfg.PinDir, Cgroup: cfg.Cgroup, NetworkID: cfg.Network,
		Underlay: cfg.Self.Underlay, Prefix6: cfg.Prefix6, Pool: cfg.Pool, DirectPorts: cfg.Self.Planes.TCP.DirectPorts, VXLANPort: cfg.VXLANPort, VNI: cfg.VNI,
		Mark: model.Mark, OverlayMark: model.OverlayMark, DropMark: model.DropMark, RejectMark: model.RejectMark, ServiceMark: model.ServiceMark,
		EndpointSockets: cfg.EndpointSockets, NodePorts: p.nodePorts, EndpointPorts: p.cfg.EndpointPorts, EphemeralPorts: ephemeral, Congestion: usual, StuckChanged: p.passesChanged, Firewall: cfg.Firewall,
		DivertIfindex: cfg.Devices.DivertIfindex, UnderlayIfindex: cfg.Devices.UnderlayIfindex, UnderlayRaw: cfg.Devices.Encrypted(),
		OverlayIfindex: cfg.Devices.OverlayIfindex, VTEPMAC: cfg.Devices.VTEPMAC,
		UnderlayInner: cfg.Devices.HasInner(), Outer: cfg.Devices.Outer, OuterIfindex: cfg.Devices.OuterIfindex,
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	if err := procnet.Publish(cfg.ProcDir, p.datapath.ProcFile); err != nil {
		return nil, fmt.Errorf("publish /proc/net of containers: %w", err)
	}
	if err := p.startProbes(); err != nil {
		return nil, err
	}
	p.shaper = shaper{datapath: p.datapath, faults: cfg.Faults, log: p.log}
	if err := p.attachToNode(); err != nil {
		return nil, err
	}
	if err := p.datapath.ForgetFirewalls(); err != nil {
		return nil, fmt.Errorf("what an earlier agent asked the firewalls: %w", err)
	}
	p.firewall = firewallWatch{
		window: cfg.Firewall, live: cfg.FirewallLive, log: p.log, wanted: cfg.Firewall > 0,
		past: p.datapath.PastFirewalls, ask: p.askFirewalls, end: p.endFirewalled,
	}
	tunnel, err := tunnelOf(cfg)
	if err != nil {
		return nil, err
	}
	p.packets = packets{
		mode: cfg.Packets, tunnel: tunnel, datapath: p.datapath, reserved: whyRouted(cfg),
		device: whyDevice(cfg.Devices, cfg.Self.Underlay),
	}
	p.native = nativeProbes{cfg: &p.cfg, packets: &p.packets, datapath: p.datapath, log: p.log}
	if err := p.packets.choose(); err != nil {
		return nil, err
	}
	return p, p.handleTraps()
}

// CheckPins finds what would make Open fail, before anything is changed: what dir is, and what an
// agent of another version left there.
func CheckPins(dir string) error {
	if err := datapath.CheckPinDir(dir); err != nil {
		return err
	}
	return datapath.CheckPins(dir)
}

// attachToNode attaches the programs of the node's own devices.
func (p *Plane) attachToNode() error {
	progs := p.datapath.TCPrograms()
	type filter struct {
		ifindex   int
		direction netcfg.Direction
		prog      int
		name      string
	}
	filters := []filter{
		{p.cfg.Devices.DivertIfindex, netcfg.Ingress, progs.Deliver, "deliver"},
		{p.cfg.Devices.OverlayIfindex, netcfg.Ingress, progs.FromOverlay, "from_overlay"},
		{p.cfg.Devices.OverlayIfindex, netcfg.Egress, progs.ToOverlay, "to_overlay"},
		{p.cfg.Devices.UnderlayIfindex, netcfg.Ingress, progs.FromUnderlay, "from_underlay"},
		{p.cfg.Devices.OuterIfindex, netcfg.Ingress, progs.FromUnderlay, "from_underlay"},
		{netdev.LoopbackIfindex, netcfg.Ingress, progs.FromLo, "from_lo"},
	}
	if p.cfg.Devices.Outer.IsValid() {
		filters = append(filters, filter{p.cfg.Devices.UnderlayIfindex, netcfg.Egress, progs.ToWire, "to_wire"})
	}
	for _, t := range filters {
		if err := netcfg.AttachTC(t.ifindex, netcfg.Filter{Direction: t.direction, Program: t.prog, Name: t.name}); err != nil {
			return fmt.Errorf("attach %s: %w", t.name, err)
		}
	}
	return netcfg.DetachElsewhere("from_underlay", p.cfg.Devices.UnderlayIfindex, p.cfg.Devices.OuterIfindex)
}

// handleTraps makes the handlers of the plane's calls and registers them.
func (p *Plane) handleTraps() error {
	c := intercept.Config{Maker: sockets{p.datapath, p.nodePorts}, AdmitCompares: p.datapath.ComparesCallers(), Log: p.log}
	if exe := p.cfg.KeeperExe; exe != "" {
		c.ListenElsewhere = func(socket *os.File) error { return fdkeep.ListenBy(socket, exe, "listen") }
	}
	var err error
	if p.sockets, err = intercept.New(c); err != nil {
		return err
	}
	if p.ioctls, err = ioctl.New(ioctl.Config{OtherNetns: p.sockets.BatchNetns}); err != nil {
		p.sockets.Close()
		return err
	}
	p.cfg.Traps.Handle(p.ioctls)
	p.cfg.Traps.Handle(p.sockets)
	return nil
}

// Run probes other nodes, ends what is above limits, follows passes that are stuck and tells of
// connections, until ctx ends.
func (p *Plane) Run(ctx context.Context) error {
	if err := p.datapath.TakeOver(); err != nil {
		p.log.Error("the programs go on looking for what may never have been done: each packet costs a little more", "err", err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { p.runProbes(ctx) })
	wg.Go(func() { p.endOverQuota(ctx) })
	wg.Go(func() { p.followPasses(ctx) })
	wg.Go(func() { p.packets.follow(ctx, p.packetsChanged) })
	wg.Go(func() { p.native.run(ctx) })
	wg.Go(func() { p.firewall.run(ctx) })
	wg.Go(func() { p.followClear(ctx) })
	wg.Go(func() {
		if err := p.datapath.FollowFlows(ctx, p.cfg.Observe); err != nil {
			p.log.Error("flows are not observed", "err", err)
		}
	})
	wg.Wait()
	return nil
}

// Close gives up what the plane has open. Programs and pins stay: connections live on.
func (p *Plane) Close() error { return errors.Join(p.stacks.Close(), p.datapath.Close()) }

// ProcDir gives where ProcDir is for a seccomp socket: beside it.
func ProcDir(seccompSocket string) string {
	return filepath.Join(filepath.Dir(seccompSocket), procnet.Dir)
}
