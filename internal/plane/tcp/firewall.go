package tcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

// peersFirewall is for how long what passed counts on a node that only its peer's firewall
// concerns: FIREWALL_PEERS_NS of bpf/sock/firewall.h.
const peersFirewall = 10 * time.Second

// firewallLooks is how often within that time live connections are looked at: a look takes some
// seconds where nothing answers.
const firewallLooks = 4

// firewallAnswer is what the nodes' firewalls made of a probe.
type firewallAnswer uint8

const (
	firewallUnknown firewallAnswer = iota // it could not be asked
	firewallPassed
	firewallForbids
)

// firewallWatch has live connections that went past the nodes' firewalls judged by them again and
// again, as new ones would be, and ends those that are forbidden now (decision 0103). One goroutine
// looks; the rest any may call.
type firewallWatch struct {
	window time.Duration // of this node; 0: its forward chain is to see none
	live   model.FirewallLive
	log    *slog.Logger
	// past lists what is live. ask asks about some of it, and gives no answer to what nobody wants
	// to be asked about; end ends what is forbidden.
	past func() (map[datapath.FirewallKey]int, error)
	ask  func(context.Context, []datapath.FirewallKey) map[datapath.FirewallKey]firewallAnswer
	end  func([]datapath.FirewallKey) (int, error)

	mu        sync.Mutex
	forbidden map[datapath.FirewallKey]int
	attached  map[netip.Addr]string        // container's IPv4 overlay address -> its network namespace
	nodes     map[netip.Addr]model.TCPNode // by underlay address
	gateways  map[netip.Addr]netip.Addr    // likewise
	wanted    bool                         // some node wants its forward chain to see connections
}

// attach and detach note where an endpoint's own stack is.
func (w *firewallWatch) attach(e model.Endpoint) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.attached == nil {
		w.attached = make(map[netip.Addr]string)
	}
	w.attached[e.Addr4()] = e.NetnsPath
}

func (w *firewallWatch) detach(e model.Endpoint) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.attached, e.Addr4())
}

// setNodes says which nodes there are.
func (w *firewallWatch) setNodes(nodes []model.Node) {
	byUnderlay, gateways, wanted := make(map[netip.Addr]model.TCPNode, len(nodes)), make(map[netip.Addr]netip.Addr, len(nodes)), w.window > 0
	for _, n := range nodes {
		wanted = wanted || n.Planes.TCP.Firewall
		byUnderlay[n.Underlay] = n.Planes.TCP
		if len(n.Prefixes) > 0 {
			gateways[n.Underlay] = model.Gateway(n.Prefixes[0])
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nodes, w.gateways, w.wanted = byUnderlay, gateways, wanted
}

// run looks until ctx ends.
func (w *firewallWatch) run(ctx context.Context) {
	every := cmp.Or(w.window, peersFirewall) / firewallLooks
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(every):
		}
		w.mu.Lock()
		wanted := w.wanted
		w.mu.Unlock()
		if !wanted {
			continue
		}
		if err := w.look(ctx); err != nil && ctx.Err() == nil {
			w.log.Error("live connections past the firewalls are not judged; will look again", "err", err)
		}
	}
}

// look judges what is live. What is forbidden is asked about twice: one probe may be lost.
func (w *firewallWatch) look(ctx context.Context) error {
	live, err := w.past()
	if err != nil {
		return err
	}
	doubtful := slices.SortedFunc(maps.Keys(live), compareFirewallKeys)
	for range 2 {
		answers := w.ask(ctx, doubtful)
		doubtful = slices.DeleteFunc(doubtful, func(k datapath.FirewallKey) bool { return answers[k] != firewallForbids })
	}
	if ctx.Err() != nil {
		return nil // what was not answered is not forbidden
	}
	now := make(map[datapath.FirewallKey]int, len(doubtful))
	for _, k := range doubtful {
		now[k] = live[k]
	}
	w.mu.Lock()
	before := w.forbidden
	w.forbidden = now
	w.mu.Unlock()
	if w.live == model.FirewallLiveKeep {
		for _, k := range doubtful {
			if _, known := before[k]; !known {
				w.log.Warn("live connections are kept that the nodes' firewalls forbid now", "src", k.Src, "dst", k.Dst, "connections", now[k])
			}
		}
		return nil
	}
	return w.endAll(doubtful)
}

func (w *firewallWatch) endAll(forbidden []datapath.FirewallKey) error {
	if len(forbidden) == 0 {
		return nil
	}
	ended, err := w.end(forbidden)
	if err = unlessStuck(err); err != nil {
		return err
	}
	for _, k := range forbidden {
		w.log.Info("live connections ended: the nodes' firewalls forbid them now", "src", k.Src, "dst", k.Dst)
	}
	w.log.Debug("live connections ended that the firewalls forbid", "connections", ended)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.forbidden = nil
	return nil
}

// status is nil where there is nothing to judge.
func (w *firewallWatch) status() *api.Firewall {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.wanted {
		return nil
	}
	out := &api.Firewall{Seconds: w.window.Seconds(), Live: cmp.Or(w.live, model.FirewallLiveEnd)}
	for _, k := range slices.SortedFunc(maps.Keys(w.forbidden), compareFirewallKeys) {
		out.Forbidden = append(out.Forbidden, model.Forbidden{Src: k.Src, Dst: k.Dst, Connections: w.forbidden[k]})
	}
	return out
}

func compareFirewallKeys(a, b datapath.FirewallKey) int {
	return cmp.Or(a.Src.Compare(b.Src), a.Dst.Compare(b.Dst))
}

// askedAbout says how connections with a key are judged: in which container, and by which gateway
// the other node is reached, which is not valid if both are on this one. False: nobody wants them
// to be, or nobody would answer.
func (p *Plane) askedAbout(k datapath.FirewallKey) (netns string, gateway netip.Addr, ok bool, err error) {
	w := &p.firewall
	dst := k.Dst.Addr()
	if a := model.Overlay4(p.cfg.Prefix6, dst); a.IsValid() {
		dst = a
	}
	r, found, err := p.datapath.RouteTo(dst)
	if err != nil || !found || r.NodeAddr || dst == k.Src {
		return "", netip.Addr{}, false, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	netns, ok = w.attached[k.Src]
	if !r.Self {
		ok = ok && w.nodes[r.Underlay].AnswersFirewall
		gateway = w.gateways[r.Underlay]
	}
	return netns, gateway, ok && (w.window > 0 || r.Firewall && !r.Self), nil
}

// askFirewalls implements firewallWatch.ask.
func (p *Plane) askFirewalls(ctx context.Context, keys []datapath.FirewallKey) map[datapath.FirewallKey]firewallAnswer {
	byNetns, gateways := make(map[string][]datapath.FirewallKey), make(map[datapath.FirewallKey]netip.Addr)
	for _, k := range keys {
		netns, gateway, ok, err := p.askedAbout(k)
		if err != nil {
			p.log.Warn("not known how a live connection is judged", "src", k.Src, "dst", k.Dst, "err", err)
		}
		if ok {
			byNetns[netns], gateways[k] = append(byNetns[netns], k), gateway
		}
	}
	answers := make(map[datapath.FirewallKey]firewallAnswer)
	for _, netns := range slices.Sorted(maps.Keys(byNetns)) {
		for some := range slices.Chunk(byNetns[netns], firewallProbesAtOnce) {
			found, err := p.probeFirewalls(ctx, netns, some)
			if err != nil && !errors.Is(err, netcfg.ErrNoContainer) {
				p.log.Warn("live connections past the firewalls could not be judged", "netns", netns, "err", err)
			}
			maps.Copy(answers, found)
		}
	}
	// What another node does not answer says nothing while the overlay does not reach it.
	reached := make(map[netip.Addr]bool)
	for k, answer := range answers {
		gateway := gateways[k]
		if answer != firewallForbids || !gateway.IsValid() {
			continue
		}
		if _, known := reached[gateway]; !known {
			reached[gateway] = p.reachGateway(ctx, gateway)
		}
		if !reached[gateway] {
			answers[k] = firewallUnknown
		}
	}
	return answers
}

// endFirewalled implements firewallWatch.end.
func (p *Plane) endFirewalled(keys []datapath.FirewallKey) (int, error) {
	ended, err := p.datapath.EndForbidden(keys)
	if err != nil {
		err = fmt.Errorf("end what the firewalls forbid: %w", err)
	}
	return ended, err
}
