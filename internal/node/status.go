package node

import (
	"context"
	"os"
	"slices"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
)

// storeProbe bounds the question whether the store answers.
const storeProbe = time.Second

// reports says how the node is. It has no state of its own.
type reports struct {
	*host
	seen *flows
}

// Status reports the node's state.
func (rp *reports) Status(ctx context.Context) (api.Status, error) {
	counters, err := rp.counters()
	if err != nil {
		return api.Status{}, err
	}
	state, applyErr := rp.view.last()
	enforced, _ := rp.enforcer.snapshot()
	calls := rp.traps.Stats()
	encrypted := rp.encryptionStatus(time.Now()) // before faults, of which it may make one
	st := api.Status{
		Node: rp.ownRecord(), Encryption: encrypted, Policy: enforced,
		Network: api.Network{
			ID: rp.network.ID, Pool: rp.network.Pool, Prefix6: rp.network.Prefix6, VNI: rp.network.VNI, VXLANPort: rp.network.VXLANPort,
		},
		Version: rp.cfg.Version, PID: os.Getpid(), Started: rp.started,
		Underlay:     rp.underlay(),
		IPv6:         rp.ipv6,
		Store:        rp.storeStatus(ctx, state.Revision, applyErr),
		Endpoints:    rp.known.len(),
		Peers:        max(len(state.Nodes)-1, 0),
		PeersAway:    offline(state, rp.self.Name),
		Interception: api.Interception{Listeners: calls.Listeners, Readers: calls.Readers, Continued: calls.Continued, Failed: calls.Failed},
		Flows:        rp.seen.stats(),
		Counters:     counters,
		Features:     rp.cfg.Features,
		Faults:       rp.faults.List(),
		Mended:       rp.mended.list(),
		FaultReasons: slices.Concat(api.FaultReasons, rp.planes.Declares().Faults),
	}
	return st, rp.planes.FillStatus(ctx, &st)
}

// underlay says which device the network that joins the nodes is reached by.
func (rp *reports) underlay() api.Underlay {
	u := api.Underlay{OverlayMTU: rp.devices.OverlayMTU}
	if name, mtu, err := netcfg.Device(rp.devices.OuterIfindex); err == nil {
		u.Device, u.MTU = name, mtu
		u.Narrowed = mtu < rp.devices.OuterMTU
	}
	return u
}

// counters gives the planes' counters, with what nftables counted and what was mended.
func (rp *reports) counters() ([]api.Counter, error) {
	counters, err := rp.planes.Counters()
	if err != nil {
		return nil, err
	}
	guards, err := rp.devices.Firewall.GuardCounts()
	if err != nil {
		return nil, err
	}
	mended := rp.mended.counts()
	for i := range counters {
		counters[i].Value += guards[counters[i].Name] + mended[counters[i].Name]
	}
	return counters, nil
}

// storeStatus asks the store for something small.
func (rp *reports) storeStatus(ctx context.Context, revision int64, applyErr error) api.Store {
	s := api.Store{Kind: "etcd", Endpoints: rp.cfg.storeEndpoints(), Healthy: true, Revision: revision}
	if rp.cfg.Store == EmbeddedStore {
		s.Kind, s.Endpoints = EmbeddedStore, []string{rp.cfg.embeddedURL()}
	}
	ctx, cancel := context.WithTimeout(ctx, storeProbe)
	defer cancel()
	if _, err := rp.store.Network(ctx); err != nil {
		s.Healthy, s.Error = false, err.Error()
	} else if applyErr != nil {
		s.Healthy, s.Error = false, applyErr.Error()
	}
	return s
}

// Endpoints lists this node's endpoints by id.
func (rp *reports) Endpoints(context.Context) ([]model.Endpoint, error) {
	return rp.known.all(), nil
}

// NetworkEndpoints lists a page of those of all nodes.
func (rp *reports) NetworkEndpoints(_ context.Context, q api.EndpointQuery) (api.EndpointPage, error) {
	state, _ := rp.view.last()
	return q.Page(state.Endpoints), nil
}

// Connections lists the sockets of this node's endpoints.
func (rp *reports) Connections(_ context.Context, f api.ConnectionFilter) ([]model.Connection, error) {
	if f.Endpoint != "" {
		if _, ok := rp.known.named(f.Endpoint); !ok {
			return nil, api.ErrNotFound
		}
	}
	all, err := rp.planes.Connections()
	if err != nil {
		return nil, err
	}
	out := make([]model.Connection, 0, len(all))
	for _, c := range all {
		c.Name = rp.known.nameOf(c.Endpoint)
		if c.Path == model.PathListen && !f.Listeners || f.Endpoint != "" && c.Name != f.Endpoint {
			continue
		}
		out = append(out, c)
	}
	return out, nil
}

// Traffic reports what the sockets of each of this node's endpoints did.
func (rp *reports) Traffic(context.Context) ([]model.Traffic, error) {
	return rp.planes.Traffic(rp.known.all())
}

// RDMA reports RDMA devices and queue pairs.
func (rp *reports) RDMA(ctx context.Context) (api.RDMA, error) { return rp.planes.RDMA(ctx) }

// Services lists the services in force on this node. They are in the planes only, where an earlier
// agent's are found: whoever makes them compares, after it or the agent was away.
func (rp *reports) Services(context.Context) ([]model.Service, error) { return rp.planes.Services() }

// EditServices changes them, one after the other.
func (rp *reports) EditServices(ctx context.Context, edit api.ServiceEdit) error {
	if len(edit.Put) > 0 {
		rp.away.hasServices() // before there is any: who is away does not hear
	}
	return rp.planes.EditServices(ctx, edit)
}
