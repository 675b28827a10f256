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
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/dockernet"
	"heddle.dev/heddle/internal/durable"
	"heddle.dev/heddle/internal/endpointfile"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/netcfg/sysctl"
	"heddle.dev/heddle/internal/patience"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/trap"
)

// storeAnswers bounds one operation on the store.
var storeAnswers = patience.For(10 * time.Second)

// Agent runs one node. It is made of parts, each of which owns its state; what they export is the
// agent's API.
type Agent struct {
	*host
	*endpoints
	*limiter
	*migration
	*membership
	*policies
	*stacks
	*docker
	*peers
	*reports
	*flows
	*tracer
	keepKeys
	attachments *attachments
	recovery    *recovery
	restorer    *restorer
	topology    *topology
	mender      *mender

	calls    *serving     // of trapped calls, begun by Start
	listener net.Listener // of the API; Run serves it
	plugin   net.Listener // for Docker; nil: not asked for
}

// compose makes the parts of an agent.
func compose(h *host) *Agent {
	at := &attachments{host: h, adopted: make(map[model.EndpointID]adopted)}
	es := &endpoints{host: h, attachments: at, halfDone: make(map[string]halfDone)}
	li, mg, ms, rc := &limiter{h, es}, &migration{h, es}, &membership{host: h}, &recovery{h, es}
	tp := &topology{host: h, endpoints: es, limiter: li, membership: ms, migration: mg, recovery: rc, damaged: make(chan struct{}, 1)}
	fl, ps, pe := newFlows(h), &policies{h}, &peers{host: h}
	h.setGroups, h.observe = es.noteGroups, fl.observe
	return &Agent{
		host: h, endpoints: es, limiter: li, migration: mg, membership: ms, policies: ps, stacks: &stacks{h}, peers: pe, reports: &reports{h, fl}, flows: fl, keepKeys: keepKeys{h, pe}, tracer: &tracer{h, ps, fl},
		docker: &docker{
			host: h, attachments: at, endpoints: es, reserved: make(map[netip.Addr]model.EndpointID), asked: make(chan struct{}, 1),
		},
		attachments: at, recovery: rc, restorer: &restorer{host: h, attachments: at, endpoints: es, migration: mg, topology: tp}, topology: tp, mender: newMender(h, tp.damaged),
	}
}

// Start brings the node up: store, devices, programs, then the endpoints that an earlier agent
// left. Their calls are answered as soon as it is known whose they are, their devices looked at
// after that. When it returns, containers can be attached. Run serves them; Close gives up what
// Start opened and leaves the node's network in place.
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
	cfg.setDefaults()
	a := compose(&host{cfg: cfg, log: cfg.Log, started: time.Now(), known: newRegistry(), files: endpointfile.In(cfg.recordDir()), traps: trap.New()})
	a.away = newAway(a.traps.AwayChanged)
	if a.log == nil {
		a.log = slog.Default()
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.Close(), a.group.leave())
		}
	}()
	for _, step := range []func() error{
		a.flows.openExport, a.makeFolders, a.checkHost,
		// The socket before anything else: whoever holds it is this node's one agent.
		func() (err error) { a.listener, err = api.Listen(cfg.APISocket); return err },
		func() (err error) { a.group, err = enterCgroup(cfg.Cgroup); return err },
		func() error { return a.join(ctx) },
		a.setUpEncryption, a.setUpInner, a.chooseFamilies, a.setupKernel, a.listenForCalls,
		func() error { return a.restorer.restore(ctx) },
		func() error { a.calls = serveCalls(ctx, a.traps); return nil },
		func() error { return a.restorer.finish(ctx) },
	} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	if cfg.DockerPlugin == "" {
		return a, nil
	}
	a.plugin, err = api.Listen(cfg.DockerPlugin)
	return a, err
}

// makeFolders makes those that the agent's state and sockets are in.
func (a *Agent) makeFolders() error {
	for _, dir := range []string{a.cfg.StateDir, filepath.Dir(a.cfg.APISocket), filepath.Dir(a.cfg.SeccompSocket)} {
		if err := durable.MakeDir(dir, 0o700); err != nil {
			return err
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
	if err := a.membership.holdName(ctx); err != nil {
		return err
	}
	peerAPI, err := a.peers.listen(ctx)
	if err != nil {
		return err
	}
	if err := a.openKeys(); err != nil {
		return err
	}
	underlay, ipv6 := a.cfg.Underlay, model.IPv6Underlay{}
	if a.cfg.translates() {
		ipv6 = model.IPv6Underlay{Address: a.cfg.Underlay, Prefix: a.cfg.InnerPrefix}
	}
	if a.cfg.inner().IsValid() {
		underlay = netip.Addr{} // the store gives an inner one
	}
	encrypts, _ := a.encryption.wanted()
	a.self, err = register(ctx, s, a.record, model.Node{
		Name: a.cfg.Name, Underlay: underlay, IPv6: ipv6, WireGuard: encrypts, Prefixes: a.cfg.Prefixes,
		VTEPMAC: netcfg.VTEPMAC(a.cfg.Underlay), ReadsSchema: store.Schema, PeerAPI: peerAPI,
		Planes: model.NodePlanes{TCP: model.TCPNode{DirectPorts: a.cfg.DirectPorts, AnswersProbes: true, Firewall: a.cfg.Firewall > 0, AnswersFirewall: true}, Verbs: a.cfg.Verbs},
	}, a.log)
	if err != nil {
		return fmt.Errorf("join network %d: %w", a.network.ID, err)
	}
	a.log.Info("joined", "node", a.self.Name, "underlay", a.self.Underlay, "prefixes", a.self.Prefixes)
	return nil
}

// setupKernel makes devices and loads programs. Devices first: the programs are compiled for them.
func (a *Agent) setupKernel() (err error) {
	a.stores = a.cfg.storeAddrs(a.log)
	if a.peers.listener != nil {
		a.stores = append(a.stores, netip.AddrPortFrom(a.cfg.Underlay, a.cfg.PeerPort))
	}
	if err := sysctl.TryMount(); err != nil {
		a.log.Warn("settings of containers are found by way of the node's /proc: with thousands of containers each takes longer to start, and other programs' look at settings, too", "err", err)
	}
	var outer netip.Addr
	if a.cfg.inner().IsValid() {
		outer = a.cfg.Underlay
	}
	a.wanted = netcfg.NodeConfig{
		Underlay: a.self.Underlay, Outer: outer, Inner: a.cfg.inner(), Translated: a.cfg.translates(), Prefixes: model.WithOverlay6(a.prefix6, a.self.Prefixes), Pool: a.pools(),
		VNI: a.network.VNI, VXLANPort: a.network.VXLANPort, DirectPorts: a.self.Planes.TCP.DirectPorts,
		Mark: model.Mark, OverlayMark: model.OverlayMark, DropMark: model.DropMark, RejectMark: model.RejectMark, ServiceMark: model.ServiceMark, Table: model.Table, RulePref: rulePref, Stores: a.stores, Published: publishedOf(a.record.Endpoints, nil),
	}
	if a.devices, err = netcfg.SetupNode(a.wanted); err != nil {
		return fmt.Errorf("set up node devices: %w", err)
	}
	a.topology.overlay = netcfg.NewOverlay(a.devices, a.self.Name)
	a.stacker = newStacker(a.self.Name, a.away, &a.faults, a.log)
	if err := a.openPlanes(); err != nil {
		return err
	}
	a.enforcer = newEnforcer(a.planes, a.self.Name, a.network.Pool, a.prefix6, a.log)
	return nil
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
	errs := make(chan error, len(a.planes)+6) // one of each that serves: nobody reads before all have ended
	serve := func(what string, f func() error) {
		wg.Go(func() {
			defer cancel() // one that ends takes the others along
			if err := f(); err != nil {
				errs <- fmt.Errorf("%s: %w", what, err)
			}
		})
	}
	locals := make(chan []netip.Prefix)
	wg.Go(func() { a.topology.followLocal(ctx, locals) })
	wg.Go(func() { a.restorer.repair(ctx) })
	wg.Go(func() { a.restorer.compareMaps(ctx) })
	wg.Go(func() { a.endpoints.followHalfDone(ctx) })
	wg.Go(func() { a.membership.followMembers(ctx) })
	wg.Go(func() { a.mender.run(ctx) })
	wg.Go(func() { a.flows.runExport(ctx) })
	serve("topology", func() error { return a.topology.followTopology(ctx, states, locals) })
	serve("encryption", func() error { return a.keepKeys.run(ctx) })
	serve("trapped calls", func() error { return a.calls.wait(ctx) })
	for _, p := range a.planes {
		serve("plane "+p.Name(), func() error { return p.Run(ctx) })
	}
	handler := api.NewHandler(a, registry, a.log)
	serve("API", func() error { return api.ServeOn(ctx, a.listener, handler) })
	if a.peers.listener != nil {
		serve("API for other agents", func() error { return api.ServeOn(ctx, a.peers.listener, api.ForPeers(handler)) })
	}
	if a.plugin != nil {
		wg.Go(func() { a.docker.followAwaited(ctx) })
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
	for _, l := range []net.Listener{a.listener, a.peers.listener, a.plugin} {
		if l == nil {
			continue
		}
		if err := l.Close(); !errors.Is(err, net.ErrClosed) { // Run closes it, too
			errs = append(errs, err)
		}
	}
	if a.enforcer != nil {
		a.enforcer.close()
	}
	a.traps.Close() // its handlers are the planes'
	errs = append(errs, a.planes.Close())
	if a.store != nil {
		a.membership.releaseName()
		errs = append(errs, a.store.Close())
	}
	return errors.Join(errs...)
}
