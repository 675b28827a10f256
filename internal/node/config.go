// Package node is the agent of one node: it brings the node's devices and routes to what the store
// says, makes endpoints, tells the planes (internal/plane) of them, and answers the API. It decides
// nothing that a plane could decide for itself.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/fdkeep"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/otlp"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/trust"
)

// rulePref is the priority of Heddle's routing rules.
const rulePref = 100

// nameAnswers bounds the question for the addresses of a store's name.
const nameAnswers = 5 * time.Second

// EmbeddedStore as a store address runs etcd inside the agent.
const EmbeddedStore = "embedded"

// Config is what an agent is started with.
type Config struct {
	// Name is the node's name in the network.
	Name string
	// Underlay is the address other nodes reach this one by.
	Underlay netip.Addr
	// InnerPrefix holds the inner addresses of the network's nodes, by which sockets know them, if
	// Underlay is an IPv6 address and the node does not encrypt; else it is not looked at.
	InnerPrefix netip.Prefix
	// EncryptPrefix holds the inner addresses of the network's nodes, by which they send each other
	// what is encrypted by WireGuard; EncryptPort is the UDP port, at Underlay, that the node takes
	// it at. The zero Prefix: the node does not encrypt. EncryptKeyAge is after what time it takes
	// another key; 0: when it is asked to.
	EncryptPrefix netip.Prefix
	EncryptPort   uint16
	EncryptKeyAge time.Duration
	// EncryptOpen says what becomes of direct connections that stand when a node begins to encrypt.
	// "" means that they are ended.
	EncryptOpen model.ClearConnections
	// DirectPorts is where the node takes direct connections.
	DirectPorts model.PortRange
	// Verbs is what other nodes are told for their verbs planes.
	Verbs model.VerbsNode
	// Network is what this node wishes the network's parameters to be; zero fields take what is in
	// force. Network.ID must be set.
	Network store.Network
	// Prefixes fixes the node's overlay prefixes; empty takes free ones.
	Prefixes []netip.Prefix
	// Store is EmbeddedStore or a comma-separated list of etcd addresses. Empty is that of
	// JoinFile.
	Store string
	// JoinFile is the path of the join file that the network's first node made, for the others.
	JoinFile string
	// StoreFiles are the certificates for an etcd of somebody else's; StoreUser and the word in
	// StorePasswordFile its login. All may be empty.
	StoreFiles                   trust.ClientFiles
	StoreUser, StorePasswordFile string
	// StoreDir is where the embedded etcd keeps its data; StorePort is the port it serves.
	StoreDir  string
	StorePort uint16
	// StoreNoSync lets the embedded etcd lose data in a crash of the machine. For labs.
	StoreNoSync bool
	// PeerPort is where other nodes' agents ask this one, on the underlay address. 0: nowhere.
	PeerPort uint16
	// TakeOver takes the node's name from an agent that holds it.
	TakeOver bool
	// ForgetAfter is how long a node may be offline and silent before it is removed from the
	// network. 0: for ever.
	ForgetAfter time.Duration
	// CompareMaps is how often the programs' maps are compared with the endpoints. 0 means once a
	// minute.
	CompareMaps time.Duration
	// EndpointSockets is how many TCP sockets an endpoint may have. 0 means DefaultEndpointSockets.
	EndpointSockets uint64
	// EndpointPorts is how many of the node's ephemeral ports an endpoint may keep from all others
	// by bind() or listen(). 0 means a quarter of those that containers may have.
	EndpointPorts uint32
	// Firewall is for how long what the nodes' forward chains have let pass goes past them. 0: this
	// node's do not see its containers' connections at all.
	Firewall time.Duration
	// FirewallLive says what becomes of live connections past them that they forbid now. "" means
	// that they are ended.
	FirewallLive model.FirewallLive
	// Packets says whether packets between containers go past the node's stack. "" means auto.
	Packets model.PacketMode
	// Tunnel says how they travel between nodes. "" means always in a tunnel.
	Tunnel model.TunnelMode
	// StateDir holds the agent's own files.
	StateDir string
	// PinDir is a directory on a BPF file system.
	PinDir string
	// Cgroup is the agent's cgroup, version 2, as a path in the file system.
	Cgroup string
	// APISocket and SeccompSocket are Unix sockets that the agent makes.
	APISocket, SeccompSocket string
	// DockerPlugin is the Unix socket by which Docker finds its drivers, in Docker's plugin
	// directory. Empty: none.
	DockerPlugin string
	// KeeperExe is the program that, started with "park", keeps seccomp listeners across restarts
	// of the agent: this one. Empty does without.
	KeeperExe string
	// Progress, if not nil, is called now and then while Start takes over an earlier agent's
	// endpoints: every ProgressEvery, or after one that took longer.
	Progress func()
	// Storage, if not nil, has a second copy of what the fd keeper keeps.
	Storage fdkeep.Storage
	// Export is the collector of OpenTelemetry that has the node's flows; none without an endpoint.
	// Node, Version, Failed and Log are the agent's to set.
	Export otlp.Config
	// Planes opens planes beside TCP's, to which endpoints are attached after it, in order. nil:
	// none. What it gives with an error is closed.
	Planes  func(plane.Host) ([]plane.Plane, error)
	Version string
	// Features are the outcomes of the probes of this host, for the status.
	Features []api.Check
	Log      *slog.Logger
}

// DefaultEndpointSockets is how many TCP sockets an endpoint may have unless the operator says
// otherwise: more than there are ports.
const DefaultEndpointSockets = 65536

// DefaultForgetAfter is how long a node may be offline and silent unless the operator says
// otherwise.
const DefaultForgetAfter = 24 * time.Hour

// minForgetAfter is more than a lease of a name and a few probes take.
const minForgetAfter = time.Minute

// minFirewall and maxFirewall bound how long a new rule of the operator's may go unnoticed.
const minFirewall, maxFirewall = time.Second, time.Hour

// maxEndpointSockets is more than any machine can have.
const maxEndpointSockets = 1 << 40

// Validate reports the first field an agent cannot start with.
func (c Config) Validate() error {
	if err := model.ValidateName("node name", c.Name); err != nil {
		return err
	}
	if !c.Underlay.IsValid() {
		return errors.New("underlay: missing; give the address other nodes reach this node by")
	}
	if !c.Underlay.Is4() {
		if err := c.validateUnderlay6(); err != nil {
			return err
		}
	}
	if err := c.validateEncryption(); err != nil {
		return err
	}
	if err := c.DirectPorts.Validate(); err != nil {
		return fmt.Errorf("direct ports: %w", err)
	}
	if c.DirectPorts.Contains(c.PeerPort) || c.Store == EmbeddedStore && c.PeerPort == c.StorePort && c.PeerPort != 0 {
		return fmt.Errorf("peer API's port %d: is one of the direct ports, or the embedded store's; choose another", c.PeerPort)
	}
	if c.Packets != "" {
		if err := c.Packets.Validate(); err != nil {
			return err
		}
	}
	if c.Tunnel != "" {
		if err := c.Tunnel.Validate(); err != nil {
			return err
		}
	}
	if c.Packets == model.PacketsRedirect && c.Firewall > 0 {
		return errors.New("packets redirect: goes past the forward chains that overlay-firewall has connections pass; leave out one of them")
	}
	if err := c.Network.ID.Validate(); err != nil {
		return err
	}
	if c.ForgetAfter < 0 || c.ForgetAfter > 0 && c.ForgetAfter < minForgetAfter {
		return fmt.Errorf("forget nodes after %s: want at least %s, or 0 for never", c.ForgetAfter, minForgetAfter)
	}
	if c.CompareMaps < 0 {
		return fmt.Errorf("compare maps every %s: want more than 0", c.CompareMaps)
	}
	if c.Firewall != 0 && (c.Firewall < minFirewall || c.Firewall > maxFirewall) {
		return fmt.Errorf("overlay firewall %s: want %s to %s, or 0 for none", c.Firewall, minFirewall, maxFirewall)
	}
	if c.FirewallLive != "" {
		if err := c.FirewallLive.Validate(); err != nil {
			return err
		}
	}
	if c.EndpointSockets > maxEndpointSockets {
		return fmt.Errorf("sockets of an endpoint: %d: want at most %d", c.EndpointSockets, uint64(maxEndpointSockets))
	}
	for _, f := range []struct{ name, path string }{
		{"state directory", c.StateDir}, {"BPF directory", c.PinDir}, {"cgroup", c.Cgroup},
		{"API socket", c.APISocket}, {"seccomp socket", c.SeccompSocket},
	} {
		if !filepath.IsAbs(f.path) {
			return fmt.Errorf("%s %q: want an absolute path", f.name, f.path)
		}
	}
	if c.DockerPlugin != "" && (!filepath.IsAbs(c.DockerPlugin) || filepath.Ext(c.DockerPlugin) != ".sock") {
		return fmt.Errorf("docker plugin %q: want an absolute path that ends in .sock; its name before that is the driver's", c.DockerPlugin)
	}
	return c.validateStore()
}

// translates reports whether the node has an inner address for an IPv6 one.
func (c Config) translates() bool { return c.Underlay.Is6() && !c.Encrypts() }

// inner is the prefix of inner addresses, or the zero Prefix if the node has none.
func (c Config) inner() netip.Prefix {
	switch {
	case c.Encrypts():
		return c.EncryptPrefix
	case c.translates():
		return c.InnerPrefix
	}
	return netip.Prefix{}
}

func (c Config) validateUnderlay6() error {
	if err := model.CheckUnderlay6(c.Underlay); err != nil {
		return fmt.Errorf("underlay %w", err)
	}
	if !c.translates() {
		return nil
	}
	if err := model.ValidateInner(c.InnerPrefix); err != nil {
		return fmt.Errorf("--inner-prefix: %w", err)
	}
	if c.Verbs.Card != nil {
		return fmt.Errorf("underlay %s, --rdma-device: cards have been tried with IPv4 underlays only; leave out --rdma-device", c.Underlay)
	}
	return nil
}

// Encrypts reports whether the node is to encrypt what it sends to others.
func (c Config) Encrypts() bool { return c.EncryptPrefix.IsValid() }

func (c Config) encryptedEndpoint() netip.AddrPort {
	return netip.AddrPortFrom(c.Underlay, c.EncryptPort)
}

// minKeyAge is more than the change of a key takes.
const minKeyAge = time.Minute

func (c Config) validateEncryption() error {
	if c.EncryptOpen != "" {
		if err := c.EncryptOpen.Validate(); err != nil {
			return err
		}
	}
	if !c.Encrypts() {
		return nil
	}
	if err := model.ValidateInner(c.EncryptPrefix); err != nil {
		return fmt.Errorf("inner addresses: %w", err)
	}
	switch {
	case c.EncryptPort == 0:
		return errors.New("encrypt port 0: want 1..65535")
	case c.EncryptPrefix.Contains(c.Underlay):
		return fmt.Errorf("inner addresses %s: the underlay address %s is among them; choose another --encrypt-prefix, equal on all nodes", c.EncryptPrefix, c.Underlay)
	case c.EncryptKeyAge < 0 || c.EncryptKeyAge > 0 && c.EncryptKeyAge < minKeyAge:
		return fmt.Errorf("key age %s: want at least %s, or 0 for keys that are changed when asked", c.EncryptKeyAge, minKeyAge)
	}
	return nil
}

// validateStore reports settings of the store that cannot be meant.
func (c Config) validateStore() error {
	if c.Store == "" && c.JoinFile == "" {
		return fmt.Errorf("store: missing; give %q on the first node and --join-file on others, or https://ADDRESS:PORT of an etcd", EmbeddedStore)
	}
	none := trust.ClientFiles{}
	if c.JoinFile != "" && (c.StoreFiles != none || c.StoreUser != "") {
		return errors.New("--join-file: it has everything for the store of the network's first node; leave out --store-ca, --store-cert, --store-key and --store-user, or it")
	}
	if c.Store == EmbeddedStore && (c.JoinFile != "" || c.StoreFiles != none || c.StoreUser != "") {
		return fmt.Errorf("--store %s: it has certificates of its own; leave out the other --store flags and --join-file", EmbeddedStore)
	}
	if (c.StoreUser == "") != (c.StorePasswordFile == "") {
		return errors.New("--store-user, --store-password-file: give both or neither")
	}
	return nil
}

func (c Config) storeEndpoints() []string { return strings.Split(c.Store, ",") }

// embeddedURL is where the embedded etcd serves other nodes.
func (c Config) embeddedURL() string {
	return "https://" + netip.AddrPortFrom(c.Underlay, c.StorePort).String()
}

// storeAddrs gives where the store answers, for the guards that keep containers from it. A name
// stands for the addresses it has now.
func (c Config) storeAddrs(log *slog.Logger) []netip.AddrPort {
	if c.Store == EmbeddedStore {
		return []netip.AddrPort{netip.AddrPortFrom(c.Underlay, c.StorePort)}
	}
	var out []netip.AddrPort
	for _, e := range c.storeEndpoints() {
		u, err := url.Parse(e)
		if err != nil {
			continue // the store has refused it
		}
		port, err := strconv.ParseUint(u.Port(), 10, 16)
		if err != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), nameAnswers)
		addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", u.Hostname())
		cancel()
		if err != nil {
			log.Error("containers are not kept from this store address, because its name is not known: give --store an address", "store", e, "err", err)
		}
		for _, a := range addrs {
			out = append(out, netip.AddrPortFrom(a.Unmap(), uint16(port)))
		}
	}
	return out
}

// setDefaults fills in what was left out.
func (c *Config) setDefaults() {
	if c.Packets == "" {
		c.Packets = model.PacketsAuto
	}
	if c.Tunnel == "" {
		c.Tunnel = model.TunnelAlways
	}
	if c.EndpointSockets == 0 {
		c.EndpointSockets = DefaultEndpointSockets
	}
	if c.CompareMaps == 0 {
		c.CompareMaps = defaultCompareMaps
	}
}
