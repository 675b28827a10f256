package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/dockernet"
	"heddle.dev/heddle/internal/durable"
	"heddle.dev/heddle/internal/endpoint"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/tcp"
	"heddle.dev/heddle/internal/store"
)

// storeAnswers bounds one operation on the store.
const storeAnswers = 10 * time.Second

// Agent runs one node.
type Agent struct {
	cfg     Config
	log     *slog.Logger
	started time.Time

	// Set by Start, not changed after.
	store    store.Store
	network  store.Network
	prefix6  netip.Prefix // the network's, if this node can have IPv6 addresses
	ipv6     api.IPv6
	self     model.Node
	holder   store.Holder // of this node's name: this agent
	devices  netcfg.NodeDevices
	overlay  *netcfg.Overlay  // the topology goroutine's
	stores   []netip.AddrPort // what containers are kept from
	tcp      *tcp.Plane
	planes   plane.Set // TCP's first
	enforcer *enforcer
	listener net.Listener // of the API; Run serves it
	plugin   net.Listener // for Docker; nil: not asked for
	group    *cgroup
	record   record // an earlier agent's

	// change serialises what alters endpoints, kernel state included.
	change sync.Mutex
	leases *endpoint.Leases // guarded by change
	// Guarded by change, too.
	adopted map[model.EndpointID]adopted
	// Guarded by change, too: endpoints, by name, that could not be made and not be undone either.
	halfDone map[string]model.Endpoint

	faults faults

	applied appliedTopology // of the topology goroutine, and of Start before
	docker  docker

	known *registry
	view  view
}

// Start brings the node up: store, devices, programs, then the endpoints that an earlier agent left.
// When it returns, containers can be attached. Run serves them; Close gives up what Start opened and
// leaves the node's network in place.
func Start(ctx context.Context, cfg Config) (_ *Agent, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if err := cfg.chooseStore(); err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("heddled must run as root: it loads BPF programs and makes network devices")
	}
	if cfg.EndpointSockets == 0 {
		cfg.EndpointSockets = DefaultEndpointSockets
	}
	if cfg.CompareMaps == 0 {
		cfg.CompareMaps = defaultCompareMaps
	}
	a := &Agent{
		docker: newDocker(), known: newRegistry(), cfg: cfg, log: cfg.Log, started: time.Now(),
		adopted: make(map[model.EndpointID]adopted), halfDone: make(map[string]model.Endpoint),
	}
	if a.log == nil {
		a.log = slog.Default()
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.Close(), a.group.leave())
		}
	}()
	for _, dir := range []string{cfg.StateDir, filepath.Dir(cfg.APISocket), filepath.Dir(cfg.SeccompSocket)} {
		if err := durable.MakeDir(dir, 0o700); err != nil {
			return nil, err
		}
	}
	if err := a.checkHost(); err != nil {
		return nil, err
	}
	// The socket before anything else: whoever holds it is this node's one agent.
	if a.listener, err = api.Listen(cfg.APISocket); err != nil {
		return nil, err
	}
	if a.group, err = enterCgroup(cfg.Cgroup); err != nil {
		return nil, err
	}
	if err := a.join(ctx); err != nil {
		return nil, err
	}
	if err := a.chooseFamilies(); err != nil {
		return nil, err
	}
	if err := a.setupKernel(); err != nil {
		return nil, err
	}
	if err := a.answerCalls(); err != nil {
		return nil, err
	}
	if err := a.restore(ctx); err != nil {
		return nil, err
	}
	if cfg.DockerPlugin == "" {
		return a, nil
	}
	a.plugin, err = api.Listen(cfg.DockerPlugin)
	return a, err
}

// checkHost finds what would make a later step fail, before anything outside this process is changed: the
// store must not hear of a node that cannot be.
func (a *Agent) checkHost() error {
	if err := netcfg.CheckUnderlay(a.cfg.Underlay); err != nil {
		return err
	}
	if err := tcp.CheckPins(a.cfg.PinDir); err != nil {
		return err
	}
	return a.checkDirectPorts()
}

// checkDirectPorts refuses a range in which something on the node already listens: its clients would
// be told apart from Heddle's by the option alone.
func (a *Agent) checkDirectPorts() error {
	taken, err := netcfg.ListenersIn(a.cfg.DirectPorts)
	if err != nil {
		return fmt.Errorf("direct ports: %w", err)
	}
	for _, at := range taken {
		// Listeners of containers, bound to overlay addresses and aliases, are in nobody's way.
		if addr := at.Addr().Unmap(); addr.IsUnspecified() || addr == a.cfg.Underlay {
			return fmt.Errorf("direct ports %s: in use by a listener at %s; choose another range with --direct-ports, equal or different on other nodes",
				a.cfg.DirectPorts, at)
		}
	}
	return nil
}

// join opens the store, sets or checks the network's parameters and registers this node.
func (a *Agent) join(ctx context.Context) error {
	s, err := a.openStore(ctx)
	if err != nil {
		return fmt.Errorf("open store: %w", err)
	}
	a.store = s
	if a.network, err = s.InitNetwork(ctx, a.cfg.Network); err != nil {
		return fmt.Errorf("network parameters: %w", err)
	}
	if a.record, err = readRecord(a.cfg); err != nil {
		a.log.Error("endpoints that the store has lost cannot be adopted", "err", err)
	}
	if err := a.holdName(ctx); err != nil {
		return err
	}
	a.self, err = claim(ctx, s, a.record, model.Node{
		Name: a.cfg.Name, Underlay: a.cfg.Underlay, Prefixes: a.cfg.Prefixes,
		VTEPMAC: netcfg.VTEPMAC(a.cfg.Underlay), ReadsSchema: store.Schema,
		Planes: model.NodePlanes{TCP: model.TCPNode{DirectPorts: a.cfg.DirectPorts, AnswersProbes: true}},
	}, a.log)
	if err != nil {
		return fmt.Errorf("join network %d: %w", a.network.ID, err)
	}
	a.log.Info("joined", "node", a.self.Name, "underlay", a.self.Underlay, "prefixes", a.self.Prefixes)
	return nil
}

// chooseFamilies decides whether this node has IPv6 overlay addresses. A node that cannot goes on with IPv4.
func (a *Agent) chooseFamilies() error {
	if !a.network.Prefix6.IsValid() {
		a.ipv6 = api.IPv6{Reason: api.IPv6NetworkOff, Detail: "the network was made without an IPv6 prefix"}
		return nil
	}
	err := netcfg.CheckIPv6(a.cfg.Underlay)
	var lacking *netcfg.IPv6Error
	if errors.As(err, &lacking) {
		a.ipv6 = api.IPv6{Reason: lacking.Check, Detail: lacking.Err.Error()}
		a.log.Warn("no IPv6 overlay addresses on this node: run `heddle doctor`", "reason", lacking.Check, "err", lacking.Err)
		return nil
	}
	if err != nil {
		return fmt.Errorf("check IPv6: %w", err)
	}
	a.prefix6 = a.network.Prefix6
	a.ipv6 = api.IPv6{Enabled: true}
	for _, p := range a.self.Prefixes {
		a.ipv6.Prefixes = append(a.ipv6.Prefixes, model.OverlayPrefix6(a.prefix6, p))
	}
	return nil
}

// pools gives the addresses of the whole overlay, in the families that this node has.
func (a *Agent) pools() []netip.Prefix {
	if !a.prefix6.IsValid() {
		return a.network.Pool
	}
	return append(slices.Clone(a.network.Pool), a.prefix6)
}

// setupKernel makes devices and loads programs. Devices first: the programs are compiled for them.
func (a *Agent) setupKernel() (err error) {
	a.stores = a.cfg.storeAddrs(a.log)
	a.devices, err = netcfg.SetupNode(netcfg.NodeConfig{
		Underlay: a.self.Underlay, Prefixes: model.WithOverlay6(a.prefix6, a.self.Prefixes), Pool: a.pools(),
		VNI: a.network.VNI, VXLANPort: a.network.VXLANPort, DirectPorts: a.self.Planes.TCP.DirectPorts,
		Mark: tcp.Mark, OverlayMark: tcp.OverlayMark, DropMark: tcp.DropMark, RejectMark: tcp.RejectMark, Table: tcp.Table, RulePref: rulePref, Stores: a.stores,
	})
	if err != nil {
		return fmt.Errorf("set up node devices: %w", err)
	}
	a.overlay = netcfg.NewOverlay(a.devices, a.self.Name)
	a.tcp, err = tcp.Open(tcp.Config{
		Self: a.self, Network: a.network.ID, Pool: a.network.Pool, Prefix6: a.prefix6, VNI: a.network.VNI, VXLANPort: a.network.VXLANPort,
		Devices: a.devices, PinDir: a.cfg.PinDir, Cgroup: a.cfg.Cgroup, ProcDir: tcp.ProcDir(a.cfg.SeccompSocket),
		EndpointSockets: a.cfg.EndpointSockets, EndpointPorts: a.cfg.EndpointPorts, Faults: &a.faults, Log: a.log,
	})
	if err != nil {
		return err
	}
	a.planes = plane.Set{a.tcp}
	if a.cfg.Planes != nil {
		further, err := a.cfg.Planes(plane.Host{Node: a.self, Network: a.network.ID, Prefix6: a.prefix6, Faults: &a.faults, Log: a.log})
		a.planes = append(a.planes, further...)
		if err != nil {
			return fmt.Errorf("open planes: %w", err)
		}
	}
	a.enforcer = newEnforcer(a.planes, a.self.Name, a.network.Pool, a.prefix6, a.log)
	return nil
}

// answerCalls makes ready for the calls that containers make.
func (a *Agent) answerCalls() error {
	socket := filepath.Join(a.cfg.StateDir, "holder.sock")
	return a.tcp.Listen(tcp.ListenConfig{
		Socket: a.cfg.SeccompSocket, Resolve: a.resolve, EndpointIn: a.endpointIn, NetnsOf: a.known.netnsOf,
		KeeperExe: a.cfg.KeeperExe, KeeperSocket: socket, KeeperRuns: func() bool { return a.group.runs("park", "--socket", socket) },
		Storage: a.cfg.Storage,
	})
}

// Run serves containers and the API until ctx ends.
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	states, err := a.store.Watch(ctx)
	if err != nil {
		return fmt.Errorf("watch store: %w", err)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		api.NewCollector(a))
	var wg sync.WaitGroup
	errs := make(chan error, 4)
	serve := func(what string, f func() error) {
		wg.Go(func() {
			defer cancel() // one that ends takes the others along
			if err := f(); err != nil {
				errs <- fmt.Errorf("%s: %w", what, err)
			}
		})
	}
	locals := make(chan []netip.Prefix)
	wg.Go(func() { a.followLocal(ctx, locals) })
	wg.Go(func() { a.repair(ctx) })
	wg.Go(func() { a.compareMaps(ctx) })
	wg.Go(func() { a.followMembers(ctx) })
	serve("topology", func() error { return a.followTopology(ctx, states, locals) })
	for _, p := range a.planes {
		serve("plane "+p.Name(), func() error { return p.Run(ctx) })
	}
	serve("API", func() error {
		return api.ServeOn(ctx, a.listener, api.NewHandler(a, registry, a.log))
	})
	if a.plugin != nil {
		wg.Go(func() { a.followAwaited(ctx) })
		serve("Docker plugin", func() error { return api.ServeOn(ctx, a.plugin, dockernet.NewHandler(a, a.log)) })
	}
	wg.Wait()
	close(errs)
	var all []error
	for err := range errs {
		all = append(all, err)
	}
	return errors.Join(all...)
}

// Close gives up what Start opened. Programs, devices and kept listeners stay: connections live on.
func (a *Agent) Close() error {
	var errs []error
	for _, l := range []net.Listener{a.listener, a.plugin} {
		if l == nil {
			continue
		}
		if err := l.Close(); !errors.Is(err, net.ErrClosed) { // Run closes it, too
			errs = append(errs, err)
		}
	}
	errs = append(errs, a.planes.Close())
	if a.store != nil {
		a.releaseName()
		errs = append(errs, a.store.Close())
	}
	return errors.Join(errs...)
}
