package node

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/endpointfile"
	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/trap"
)

// host is what Start finds out about the node, and what the parts of an agent share that has a lock
// of its own. Start's goroutine sets it; nobody changes it after.
type host struct {
	cfg     Config
	log     *slog.Logger
	started time.Time
	group   *cgroup
	record  record // an earlier agent's

	store   store.Store
	network store.Network
	prefix6 netip.Prefix // the network's, if this node can have IPv6 addresses
	ipv6    api.IPv6
	self    model.Node
	wanted  netcfg.NodeConfig // what the node's network is to be
	devices netcfg.NodeDevices
	stores  []netip.AddrPort // what containers are kept from
	planes  plane.Set        // TCP's first
	// setGroups and observe are for planes.
	setGroups plane.SetGroups
	observe   func(flow.Observation)
	traps     *trap.Server
	keeper    trap.Keeper // nil: none

	enforcer *enforcer
	stacker  *stacker
	away     *away
	known    *registry
	files    *endpointfile.Files // of the record; whoever uses it holds endpoints.change
	// encryption is shared by what follows the network, and what keeps the keys.
	encryption encryption
	view       view
	faults     faults
	mended     mended
}

// checkHost finds what would make a later step fail, before anything outside this process is
// changed: the store must not hear of a node that cannot be.
func (h *host) checkHost() error {
	if err := netcfg.CheckUnderlay(h.cfg.Underlay); err != nil {
		return err
	}
	if h.cfg.Encrypts() {
		if err := netcfg.CheckWireGuard(); err != nil {
			return fmt.Errorf("--encrypt wireguard: %w", err)
		}
	}
	if err := h.checkPlanes(); err != nil {
		return err
	}
	return h.checkDirectPorts()
}

// checkDirectPorts refuses a range in which something on the node already listens: its clients
// would be told apart from Heddle's by the option alone.
func (h *host) checkDirectPorts() error {
	taken, err := netcfg.ListenersIn(h.cfg.DirectPorts)
	if err != nil {
		return fmt.Errorf("direct ports: %w", err)
	}
	for _, at := range taken {
		// Listeners of containers, bound to overlay addresses and aliases, are in nobody's way.
		if addr := at.Addr().Unmap(); addr.IsUnspecified() || addr == h.cfg.Underlay {
			return fmt.Errorf("direct ports %s: in use by a listener at %s; choose another range with --direct-ports, equal or different on other nodes",
				h.cfg.DirectPorts, at)
		}
	}
	return nil
}

// chooseFamilies decides whether this node has IPv6 overlay addresses. A node that cannot goes on
// with IPv4.
func (h *host) chooseFamilies() error {
	if !h.network.Prefix6.IsValid() {
		h.ipv6 = api.IPv6{Reason: api.IPv6NetworkOff, Detail: "the network was made without an IPv6 prefix"}
		return nil
	}
	err := netcfg.CheckIPv6(h.self.VTEP())
	var lacking *netcfg.IPv6Error
	if errors.As(err, &lacking) {
		h.ipv6 = api.IPv6{Reason: lacking.Check, Detail: lacking.Err.Error()}
		h.log.Warn("no IPv6 overlay addresses on this node: run `heddle doctor`", "reason", lacking.Check, "err", lacking.Err)
		return nil
	}
	if err != nil {
		return fmt.Errorf("check IPv6: %w", err)
	}
	h.prefix6 = h.network.Prefix6
	h.ipv6 = api.IPv6{Enabled: true}
	for _, p := range h.self.Prefixes {
		h.ipv6.Prefixes = append(h.ipv6.Prefixes, model.OverlayPrefix6(h.prefix6, p))
	}
	return nil
}

// pools gives the addresses of the whole overlay, in the families that this node has.
func (h *host) pools() []netip.Prefix {
	if !h.prefix6.IsValid() {
		return h.network.Pool
	}
	return append(slices.Clone(h.network.Pool), h.prefix6)
}
