package tcp

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/netcfg/firewall"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

// lookForRules is how often the node's firewall is asked whether it has got rules that are to see
// packets between containers.
const lookForRules = 10 * time.Second

// packets says whether packets between containers go past the node's stack (bpf/tc/redirect.h,
// decision 0097).
type packets struct {
	mode     model.PacketMode
	tunnel   model.TunnelMode
	datapath *datapath.Datapath
	// reserved says why they must not, whatever the mode; "" if nothing is in the way.
	reserved string
	// device says why the overlay's device is to send and receive what goes between nodes, whatever
	// the firewall; "" if programs may.
	device string

	mu    sync.Mutex
	state api.Packets
	nodes []model.Node // all, as SetTopology had them
	// native: the programs send without a tunnel where they may.
	native bool
}

// setNodes says which nodes there are.
func (p *packets) setNodes(nodes []model.Node) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.nodes = nodes
}

// choose looks at the node's firewall, if that matters, and tells the programs.
func (p *packets) choose() error {
	state := api.Packets{Mode: p.mode, Tunnel: p.tunnel}
	switch {
	case p.mode == model.PacketsRoute:
		state.Reason = "--packets " + string(p.mode)
	case p.reserved != "":
		state.Reason = p.reserved
	case p.mode == model.PacketsAuto:
		rules, err := firewall.ForwardRules()
		if err != nil {
			state.Reason = fmt.Sprintf("the firewall's rules are not known: %v", err)
		} else if rules != "" {
			state.Reason = rules + " has rules that are to see them (--packets redirect goes past these)"
		}
	}
	state.Redirected = state.Reason == ""
	if state.Redirected {
		state.DeviceReason = p.whyDevice()
	}
	past := state.Redirected && state.DeviceReason == ""
	native := past && p.tunnel == model.TunnelAuto
	was := p.native
	if p.state.Mode == "" { // an earlier agent's programs may have answered
		was = past
	}
	if err := p.datapath.SetPackets(datapath.Packets{Redirected: state.Redirected, Tunnelled: past, Native: native, NativeStill: !native && was}); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state, p.native = state, native
	return nil
}

// follow looks again, until ctx ends; changed is called with what is new.
func (p *packets) follow(ctx context.Context, changed func(api.Packets, error)) {
	if p.mode == model.PacketsRoute || p.reserved != "" {
		return
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(lookForRules):
		}
		before := p.status()
		err := p.choose()
		if now := p.status(); err != nil || now != before {
			changed(now, err)
		}
	}
}

// whyDevice says why redirected packets pass the overlay's device on their way between nodes, and
// with it what the node has for its own packets; "" if they do not.
func (p *packets) whyDevice() string {
	if p.device != "" {
		return p.device
	}
	p.mu.Lock()
	nodes := make([]netip.Addr, len(p.nodes))
	for i, n := range p.nodes {
		nodes[i] = n.Underlay
	}
	p.mu.Unlock()
	rules, err := firewall.TunnelRules()
	if err == nil && rules != "" {
		return rules + " is to see them"
	}
	narrow := ""
	if err == nil {
		narrow, err = netcfg.NarrowRoute(nodes)
	}
	if err != nil {
		return fmt.Sprintf("what holds for the node's own packets is not known: %v", err)
	}
	return narrow
}

func (p *packets) status() api.Packets {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state
}

// whyRouted says what of the node's settings only its stack does.
func whyRouted(cfg Config) string {
	if cfg.Firewall > 0 {
		return "--overlay-firewall has rules of its forward chains see them"
	}
	for _, at := range cfg.Stores {
		for _, p := range cfg.Pool {
			if p.Contains(at.Addr()) {
				return fmt.Sprintf("store %v is at an overlay address, where the node's stack refuses it to containers", at)
			}
		}
	}
	return ""
}

// whyDevice says what of the underlay only the overlay's device does.
func whyDevice(devices netcfg.NodeDevices, underlay netip.Addr) string {
	switch {
	case devices.Encrypted():
		return "WireGuard encrypts them"
	case devices.Outer.IsValid() || !underlay.Is4():
		return "the underlay is IPv6"
	}
	return ""
}

// packetsChanged tells the operator.
func (p *Plane) packetsChanged(now api.Packets, err error) {
	switch {
	case err != nil:
		p.log.Error("not known whether packets go past the node's stack; will look again", "err", err)
	case now.Redirected && now.DeviceReason != "":
		p.log.Info("packets between containers go past the node's stack, but by the overlay's device", "reason", now.DeviceReason)
	case now.Redirected:
		p.log.Info("packets between containers go past the node's stack")
	default:
		p.log.Info("packets between containers go through the node's stack", "reason", now.Reason)
	}
}
