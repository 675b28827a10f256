// Command heddled is the agent of one Heddle node. See docs/ARCHITECTURE.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/doctor"
	"heddle.dev/heddle/internal/fdkeep"
	"heddle.dev/heddle/internal/logform"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/node"
	"heddle.dev/heddle/internal/peerapi"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/lanes"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/queues"
	"heddle.dev/heddle/internal/plane/stacks"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/verbs"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/systemd"
	"heddle.dev/heddle/internal/trap"
	"heddle.dev/heddle/internal/version"
)

// leastProcs is the least number of processors of Go's scheduler: a container whose program makes
// calls has one most of the time.
const leastProcs = 64

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends at once
	if err := newCommand().ExecuteContext(ctx); err != nil {
		if !errors.As(err, new(loggedError)) {
			fmt.Fprintln(os.Stderr, "heddled:", err)
		}
		os.Exit(1)
	}
}

// loggedError is one that the log has.
type loggedError struct{ error }

func newCommand() *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:           "heddled",
		Short:         "Run the agent of a Heddle node",
		Long:          "Run the agent of a Heddle node: one process per container host, as root, in the host's network namespace.",
		Version:       version.String(),
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := fromEnvironment(cmd.Flags(), os.LookupEnv); err != nil {
				return err
			}
			if f.cfg.JoinFile != "" && !cmd.Flags().Changed("store") {
				f.store = "" // the join file says where it is
			}
			cfg, err := f.config()
			if err == nil {
				err = run(cmd.Context(), cfg, f.rdmaDevice)
			}
			if err != nil && f.logFormat == logform.JSON && cfg.Log != nil {
				cfg.Log.Error("the agent ends", "err", err)
				return loggedError{err}
			}
			return err
		},
	}
	f.register(cmd)
	cmd.AddCommand(newFDKeepCommand(), newListenCommand(), newConfineCommand(), newTeardownCommand(), newABICommand(), newPopulateCommand(), newPodCommand())
	return cmd
}

// delegatedCgroup as --cgroup is what systemd's units have: systemd.Delegated.
const delegatedCgroup = "delegated"

// envPrefix and a flag's name in capitals make the variable that sets it: HEDDLED_STATE_DIR is
// --state-dir.
const envPrefix = "HEDDLED_"

// fromEnvironment sets the flags that are not on the command line from the environment, as
// /etc/default/heddled has them. Empty variables count as none.
func fromEnvironment(flags *pflag.FlagSet, lookup func(string) (string, bool)) error {
	var errs []error
	flags.VisitAll(func(f *pflag.Flag) {
		name := envPrefix + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		if value, ok := lookup(name); ok && value != "" && !f.Changed {
			if err := flags.Set(f.Name, value); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", name, err))
			}
		}
	})
	return errors.Join(errs...)
}

// flags are the agent's settings as they stand on the command line.
type flags struct {
	name, underlay, directPorts, store, logLevel, logFormat string
	prefix6                                                 string
	networkID                                               uint16
	pool, prefixes                                          []string
	vni                                                     uint32
	cfg                                                     node.Config
	noKeeper                                                bool
	verbs                                                   model.VerbsLimits
	verbsSpin                                               uint32
	rdmaDevice                                              string
	rdmaOutside                                             []string
	stackDrain                                              time.Duration
	encrypt, encryptPrefix, innerPrefix                     string
	stackModules                                            string
}

func (f *flags) register(cmd *cobra.Command) {
	hostname, _ := os.Hostname()
	p := cmd.Flags()
	p.StringVar(&f.name, "node", hostname, "name of this node in the network: a-z, 0-9 and '-'")
	p.StringVar(&f.underlay, "underlay", "", "address other nodes reach this node by, IPv4 or IPv6, of one family on all nodes (required)")
	p.StringVar(&f.innerPrefix, "inner-prefix", defaultInnerPrefix, "IPv4 prefix of the addresses by which nodes with IPv6 addresses are known to sockets, the same on all nodes; in use nowhere else")
	p.StringVar(&f.directPorts, "direct-ports", model.DefaultDirectPorts.String(), "TCP ports this node takes direct connections on")
	f.registerEncryption(p)
	p.Uint16Var(&f.networkID, "network-id", uint16(store.DefaultNetworkID), "id of the network, 1..4095")
	p.StringSliceVar(&f.pool, "pool", nil, "IPv4 overlay prefixes of the whole network; set by the first node (default "+store.DefaultPool.String()+")")
	p.StringVar(&f.prefix6, "prefix6", "", "IPv6 prefix of 96 bits that makes IPv6 overlay addresses of IPv4 ones, or 'none'; set by the first node (default fd48:6464:ID::/96)")
	p.StringSliceVar(&f.prefixes, "prefix", nil, "IPv4 overlay prefix of this node (default: a free one of the pool)")
	p.Uint32Var(&f.vni, "vni", 0, "VXLAN network identifier; set by the first node")
	p.StringVar(&f.cfg.JoinFile, "join-file", "", "join the network whose first node made this file (its STATE-DIR/join.pem)")
	p.StringVar(&f.store, "store", node.EmbeddedStore, "'embedded' on the first node, or etcd addresses: https://ADDRESS:2379[,...]; with --join-file it is that network's")
	p.StringVar(&f.cfg.StoreFiles.CA, "store-ca", "", "PEM file of who signed the certificate of an etcd of your own (default: the machine's authorities)")
	p.StringVar(&f.cfg.StoreFiles.Cert, "store-cert", "", "PEM file of the certificate that an etcd of your own asks of its clients")
	p.StringVar(&f.cfg.StoreFiles.Key, "store-key", "", "PEM file of the key of --store-cert")
	p.StringVar(&f.cfg.StoreUser, "store-user", "", "user of an etcd of your own")
	p.StringVar(&f.cfg.StorePasswordFile, "store-password-file", "", "file with the password of --store-user")
	p.StringVar(&f.cfg.StoreDir, "store-dir", "", "data of the embedded etcd (default STATE-DIR/etcd)")
	p.Uint16Var(&f.cfg.StorePort, "store-port", 2379, "port of the embedded etcd, on the underlay address")
	p.BoolVar(&f.cfg.StoreNoSync, "store-no-sync", false, "let the embedded etcd skip fsync: for labs")
	p.Uint16Var(&f.cfg.PeerPort, "peer-port", peerapi.DefaultPort, "port of the underlay address on which other nodes' agents ask this one what it knows (docs/security.md); 0: it answers none")
	p.BoolVar(&f.cfg.TakeOver, "take-over", false, "take the node's name from a live agent elsewhere, which ends")
	p.DurationVar(&f.cfg.ForgetAfter, "forget-nodes-after", node.DefaultForgetAfter, "remove nodes from the network whose agent is gone and that answer no probes for this long; 0: never")
	p.Uint64Var(&f.cfg.EndpointSockets, "endpoint-sockets", node.DefaultEndpointSockets, "how many TCP sockets a container's endpoint may have")
	p.Uint32Var(&f.cfg.EndpointPorts, "endpoint-ports", 0, "how many of the node's ephemeral ports a container's endpoint may hold by bind or listen (default a quarter of them)")
	p.DurationVar(&f.cfg.Firewall, "overlay-firewall", 0, "have connections between containers go by the nodes' forward chains, where your own rules are, but for those to which a like one has passed in this time, such as 10s; 0: none does (docs/howto/firewall.md)")
	p.StringVar((*string)(&f.cfg.FirewallLive), "overlay-firewall-live", string(model.FirewallLiveEnd), "live connections that went past the forward chains, when these forbid them: 'end' them, or 'keep' them and name them in the status (docs/howto/firewall.md)")
	p.StringVar((*string)(&f.cfg.Packets), "packets", string(model.PacketsAuto), "packets between containers, of what sockets of the node do not carry: 'redirect' past the node's stack and its FORWARD rules, 'route' through them, or 'auto': redirect unless there are such rules (docs/howto/packets.md)")
	p.StringVar((*string)(&f.cfg.Tunnel), "tunnel", string(model.TunnelAlways), "how packets that are redirected (--packets) travel to other nodes: 'always' in VXLAN, or 'auto': as they are to nodes that share this one's network and take them so, else in VXLAN (docs/howto/packets.md)")
	p.StringVar(&f.stackModules, "stack-modules", module.DefaultOwnModules, "the folder with stack modules of your own, which profiles call module/NAME (docs/howto/own-stacks.md)")
	p.DurationVar(&f.stackDrain, "stack-drain", 0, "end a stack module of an earlier build than the one installed after this long, with the connections that live by it; 0: when none does (docs/howto/stacks.md)")
	p.StringVar(&f.rdmaDevice, "rdma-device", "", "RDMA card that queue pairs of containers go by between nodes, as ibv_devices names it (docs/howto/rdma-card.md)")
	p.StringSliceVar(&f.rdmaOutside, "rdma-outside", nil, "addresses of peers without Heddle, as `prefixes`, that containers reach by the RDMA card, if 'heddle endpoints verbs --outside' lets them (docs/howto/rdma-card.md)")
	for _, q := range []struct {
		to          *uint32
		name, usage string
	}{
		{&f.verbs.QPs, "verbs-qps", "how many queue pairs a container's RDMA device may have"},
		{&f.verbs.CQs, "verbs-cqs", "how many completion queues a container's RDMA device may have"},
		{&f.verbs.MRs, "verbs-mrs", "how many memory regions a container's RDMA device may have"},
		{&f.verbs.MemoryMiB, "verbs-memory", "how many MiB the queues of a container's RDMA device may share with the router"},
		{&f.verbs.Messages, "verbs-messages", "how many send requests a container's RDMA device may take a second"},
	} {
		p.Uint32Var(q.to, q.name, 0, q.usage+" (default the router's own: docs/howto/rdma.md)")
	}
	p.Uint32Var(&f.verbsSpin, "verbs-spin-us", verbs.DefaultSpinMicros(runtime.NumCPU()), "for how many microseconds programs with an RDMA device whose containers say nothing of it look for work before they sleep, and the router for any at most; if not given, 0 on fewer than four processors, else 20 (docs/howto/rdma-library.md)")
	p.StringVar(&f.cfg.StateDir, "state-dir", "/var/lib/heddle", "the agent's own files")
	p.StringVar(&f.cfg.PinDir, "bpf-dir", "/sys/fs/bpf/heddle", "directory on a BPF file system for pins")
	p.StringVar(&f.cfg.Cgroup, "cgroup", "/sys/fs/cgroup/heddle", "the agent's own cgroup (version 2), or '"+delegatedCgroup+"': below the one that the service manager delegated to it")
	p.StringVar(&f.cfg.APISocket, "api-socket", api.DefaultSocket, "Unix socket of the API")
	p.StringVar(&f.cfg.SeccompSocket, "seccomp-socket", "/run/heddle/seccomp.sock", "Unix socket where container runtimes hand over seccomp listeners")
	p.StringVar(&f.cfg.DockerPlugin, "docker-plugin", "", "Unix socket for Docker's network and IPAM driver, such as /run/docker/plugins/heddle.sock for drivers called heddle")
	p.BoolVar(&f.noKeeper, "no-holder", false, "do not keep seccomp listeners across restarts of the agent")
	p.StringVar(&f.cfg.Export.Endpoint, "otlp-endpoint", "", "URL of a collector of OpenTelemetry that takes what heddle observe shows, as log records by OTLP over HTTP: https://HOST:4318 (docs/howto/observe.md)")
	p.StringVar(&f.cfg.Export.CA, "otlp-ca", "", "PEM file of who signed the collector's certificate (default: the machine's authorities)")
	p.StringVar(&f.cfg.Export.Cert, "otlp-cert", "", "PEM file of the certificate that the collector asks for")
	p.StringVar(&f.cfg.Export.Key, "otlp-key", "", "PEM file of the key of --otlp-cert")
	p.StringVar(&f.cfg.Export.HeadersFile, "otlp-headers-file", "", "file with headers for the collector, lines such as Authorization: Bearer TOKEN; mode 0600")
	p.StringVar(&f.logLevel, "log-level", "info", "debug, info, warn or error")
	p.StringVar(&f.logFormat, "log-format", logform.Text, "text (name=value) or json, a line for each message")
}

func (f *flags) config() (node.Config, error) {
	cfg := f.cfg
	cfg.Name, cfg.Store, cfg.Version = f.name, f.store, version.String()
	var err error
	if cfg.Cgroup == delegatedCgroup {
		if cfg.Cgroup, err = systemd.Delegated(); err != nil {
			return cfg, fmt.Errorf("--cgroup %s: %w", delegatedCgroup, err)
		}
	}
	if err := f.setUnderlay(&cfg); err != nil {
		return cfg, err
	}
	if cfg.DirectPorts, err = model.ParsePortRange(f.directPorts); err != nil {
		return cfg, fmt.Errorf("--direct-ports: %w", err)
	}
	cfg.Network = store.Network{ID: model.NetworkID(f.networkID), VNI: f.vni}
	if cfg.Network.Pool, err = parsePrefixes("--pool", f.pool); err != nil {
		return cfg, err
	}
	if err := f.setPrefix6(&cfg.Network); err != nil {
		return cfg, err
	}
	if cfg.Prefixes, err = parsePrefixes("--prefix", f.prefixes); err != nil {
		return cfg, err
	}
	if err := f.setEncryption(&cfg); err != nil {
		return cfg, err
	}
	if f.rdmaDevice != "" {
		if err := verbs.CheckDevice(f.rdmaDevice); err != nil {
			return cfg, fmt.Errorf("--rdma-device: %w", err)
		}
		if cfg.Verbs.Card, err = verbs.ReadCard(f.rdmaDevice); err != nil {
			return cfg, fmt.Errorf("--rdma-device: %w", err)
		}
	}
	if f.verbsSpin > model.MaxSpinMicros {
		return cfg, fmt.Errorf("--verbs-spin-us %d: want at most %d", f.verbsSpin, model.MaxSpinMicros)
	}
	if f.stackDrain < 0 {
		return cfg, fmt.Errorf("--stack-drain %s: less than 0", f.stackDrain)
	}
	outside, err := parsePrefixes("--rdma-outside", f.rdmaOutside)
	if err != nil {
		return cfg, err
	}
	if len(outside) > 0 && f.rdmaDevice == "" {
		return cfg, errors.New("--rdma-outside: it needs --rdma-device, by which such peers are reached")
	}
	self, err := os.Executable()
	if err != nil {
		return cfg, fmt.Errorf("find own program: %w", err)
	}
	cfg.Planes = func(h plane.Host) ([]plane.Plane, error) { return f.planes(h, cfg, self, outside) }
	if !f.noKeeper {
		cfg.KeeperExe = self
		if s := systemd.OpenFDStore(); s != nil {
			cfg.Storage = s
		}
	}
	// Without a service manager nobody hears it; what goes wrong shows at Ready.
	cfg.Progress = func() { _ = systemd.Notify(systemd.ExtendTimeout(moreTime)) }
	cfg.Log, err = logform.New(os.Stderr, f.logLevel, f.logFormat)
	return cfg, err
}

// planes opens those beside the TCP plane; outside are the prefixes of --rdma-outside.
func (f *flags) planes(h plane.Host, cfg node.Config, self string, outside []netip.Prefix) ([]plane.Plane, error) {
	modules, err := stacks.Open(stacks.Config{
		Config:       module.Config{Programs: module.Programs{Self: self, StateDir: cfg.StateDir, Own: f.stackModules}, Drain: f.stackDrain, Log: h.Log},
		StackModules: h.StackModules, Traps: h.Traps, Keeper: h.Keeper, StacksChanged: h.StacksChanged, Faults: h.Faults, Observe: h.Observe,
	})
	if err != nil {
		return nil, err
	}
	memory, err := lanes.Open(lanes.Config{Self: self, Traps: h.Traps, Log: h.Log})
	if err != nil {
		return nil, errors.Join(err, modules.Close())
	}
	service, err := queues.Open(queues.Config{StateDir: cfg.StateDir, Self: self, Traps: h.Traps, Sockets: h.Sockets, Modules: modules, Log: h.Log})
	if err != nil {
		return nil, errors.Join(err, modules.Close(), memory.Close())
	}
	return []plane.Plane{modules, memory, service, verbs.Open(verbs.Config{
		StateDir: cfg.StateDir, SeccompSocket: cfg.SeccompSocket, Self: self, Device: f.rdmaDevice, Outside: outside, Decide: h.StackModules.Decide, Limits: f.verbs, SpinMicros: f.verbsSpin, Sockets: h.Sockets, SetGroups: h.SetGroups, Faults: h.Faults,
		Log: h.Log,
	})}, nil
}

// setUnderlay reads the node's address, and where its inner one is to be from if that is IPv6.
func (f *flags) setUnderlay(cfg *node.Config) (err error) {
	if cfg.Underlay, err = netip.ParseAddr(f.underlay); err != nil {
		return fmt.Errorf("--underlay %q: give the address other nodes reach this node by", f.underlay)
	}
	if !cfg.Underlay.Is6() {
		return nil
	}
	got, err := parsePrefixes("--inner-prefix", []string{f.innerPrefix})
	if err == nil {
		cfg.InnerPrefix = got[0]
	}
	return err
}

// setPrefix6 makes --prefix6 a wish: nothing, none or a prefix.
func (f *flags) setPrefix6(n *store.Network) error {
	switch f.prefix6 {
	case "":
		return nil
	case "none":
		n.NoPrefix6 = true
		return nil
	}
	got, err := parsePrefixes("--prefix6", []string{f.prefix6})
	if err != nil {
		return err
	}
	n.Prefix6 = got[0]
	if err := model.ValidatePrefix6(n.Prefix6); err != nil {
		return fmt.Errorf("--prefix6: %w", err)
	}
	return nil
}

func parsePrefixes(flag string, in []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range in {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, fmt.Errorf("%s %q: want an address prefix, such as 10.244.0.0/16 or fd48:6464:1::/96", flag, s)
		}
		if p != p.Masked() {
			return nil, fmt.Errorf("%s %s: has bits behind the prefix; did you mean %s?", flag, p, p.Masked())
		}
		out = append(out, p)
	}
	return out, nil
}

// sayFiles lets this process have as many files open as it may need, and says so if they are fewer.
func sayFiles(ctx context.Context, log *slog.Logger) {
	files, err := fdkeep.RaiseFiles()
	if err != nil {
		log.Error("the limit of open files is not known, or not raised", "err", err)
	}
	room := fdkeep.RoomFor(files)
	if room >= trap.DefaultMaxListeners {
		return
	}
	level := slog.LevelInfo // hardly anybody has so many containers
	if files < fdkeep.LeastFiles {
		level = slog.LevelWarn
	}
	log.Log(ctx, level, "files that this process may have open: socket() fails with ENFILE in containers beyond what there is room for; give it CAP_SYS_RESOURCE, or LimitNOFILE=131072 in its unit, for more",
		"limit", files, "containers", room)
}

func run(ctx context.Context, cfg node.Config, card string) error {
	for _, p := range model.Protections {
		if !p.Protection.On() {
			cfg.Log.Warn("built for the attack suite: runs without a protection", "protection", p.Name)
		}
	}
	defer boundEnd(ctx, endTime, os.Stderr, os.Exit)()
	// A thread that waits in a system call keeps its processor of Go's scheduler for up to 10 ms.
	// The threads that answer do so all the time, and with few such processors others would wait
	// for theirs (docs/decisions/0041).
	if os.Getenv("GOMAXPROCS") == "" && runtime.GOMAXPROCS(0) < leastProcs {
		runtime.GOMAXPROCS(leastProcs) // from now on it does not follow changes of the cgroup's limit
	}
	go giveBack(ctx)
	sayFiles(ctx, cfg.Log)
	cfg.Features = doctor.Run(ctx, card)
	if missing := doctor.Missing(cfg.Features); len(missing) > 0 {
		cfg.Log.Error("this host lacks what Heddle needs: run `heddle doctor`", "missing", missing)
	}
	agent, err := node.Start(ctx, cfg)
	if err != nil {
		return err
	}
	if err := systemd.Notify(systemd.Ready); err != nil {
		cfg.Log.Error("the service manager does not hear that the agent is ready", "err", err)
	}
	err = agent.Run(ctx)
	_ = systemd.Notify(systemd.Stopping) // it sees the process end, too
	return errors.Join(err, agent.Close())
}

// newFDKeepCommand is the fd keeper: a process of its own that keeps seccomp listeners open while
// no agent runs. Agents start it as `park`, its name in earlier builds: what looks for it, theirs
// too, goes by that.
func newFDKeepCommand() *cobra.Command {
	var socket string
	cmd := &cobra.Command{
		Use: "fdkeep", Aliases: []string{"park"}, Short: "Keep seccomp listeners while no agent runs (started by heddled itself)",
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true, Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, _ = fdkeep.RaiseFiles() // the agent says so if it cannot
			return fdkeep.Run(cmd.Context(), socket)
		},
	}
	cmd.Flags().StringVar(&socket, "socket", "", "Unix socket to serve")
	return cmd
}

// newConfineCommand becomes a program that is not Heddle's own (process.Confined).
func newConfineCommand() *cobra.Command {
	return &cobra.Command{
		Use: process.Confine + " PROGRAM [ARGUMENT]...", Short: "Become a program that may do little (started by heddled itself)",
		Args: cobra.MinimumNArgs(1), DisableFlagParsing: true, SilenceUsage: true, SilenceErrors: true, Hidden: true,
		RunE: func(_ *cobra.Command, args []string) error { return process.Become(args[0], args[1:]) },
	}
}

// newListenCommand calls listen() for the agent and ends: nothing that a container has leads to a
// process that listens.
func newListenCommand() *cobra.Command {
	return &cobra.Command{
		Use: "listen", Short: "Listen on an inherited socket and end (started by heddled itself)",
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true, Hidden: true,
		RunE: func(*cobra.Command, []string) error { return fdkeep.ListenInherited() },
	}
}
