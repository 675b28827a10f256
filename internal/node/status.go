package node

import (
	"context"
	"os"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
)

// storeProbe bounds the question whether the store answers.
const storeProbe = time.Second

// Status reports the node's state.
func (a *Agent) Status(ctx context.Context) (api.Status, error) {
	counters, err := a.counters()
	if err != nil {
		return api.Status{}, err
	}
	interception, err := a.tcp.Interception(ctx)
	if err != nil {
		return api.Status{}, err
	}
	state, applyErr := a.view.last()
	enforced, _ := a.enforcer.snapshot()
	return api.Status{
		Node: a.self, Policy: enforced,
		Network: api.Network{
			ID: a.network.ID, Pool: a.network.Pool, Prefix6: a.network.Prefix6, VNI: a.network.VNI, VXLANPort: a.network.VXLANPort,
		},
		Version: a.cfg.Version, PID: os.Getpid(), Started: a.started,
		IPv6:         a.ipv6,
		Store:        a.storeStatus(ctx, state.Revision, applyErr),
		Endpoints:    a.known.len(),
		Peers:        max(len(state.Nodes)-1, 0),
		Direct:       a.tcp.Paths(),
		PeersAway:    away(state, a.self.Name),
		Interception: interception,
		Counters:     counters,
		Features:     a.cfg.Features,
		Faults:       a.faults.List(),
	}, nil
}

// counters gives the planes' counters, with what nftables counted.
func (a *Agent) counters() ([]api.Counter, error) {
	counters, err := a.planes.Counters()
	if err != nil {
		return nil, err
	}
	guards, err := netcfg.GuardCounts()
	if err != nil {
		return nil, err
	}
	for i := range counters {
		counters[i].Value += guards[counters[i].Name]
	}
	return counters, nil
}

// storeStatus asks the store for something small.
func (a *Agent) storeStatus(ctx context.Context, revision int64, applyErr error) api.Store {
	s := api.Store{Kind: "etcd", Endpoints: a.cfg.storeEndpoints(), Healthy: true, Revision: revision}
	if a.cfg.Store == EmbeddedStore {
		s.Kind, s.Endpoints = EmbeddedStore, []string{a.cfg.embeddedURL()}
	}
	ctx, cancel := context.WithTimeout(ctx, storeProbe)
	defer cancel()
	if _, err := a.store.Network(ctx); err != nil {
		s.Healthy, s.Error = false, err.Error()
	} else if applyErr != nil {
		s.Healthy, s.Error = false, applyErr.Error()
	}
	return s
}

// Endpoints lists this node's endpoints by id.
func (a *Agent) Endpoints(context.Context) ([]model.Endpoint, error) {
	return a.known.all(), nil
}

// Connections lists the sockets of this node's endpoints.
func (a *Agent) Connections(_ context.Context, f api.ConnectionFilter) ([]model.Connection, error) {
	if f.Endpoint != "" {
		if _, ok := a.known.named(f.Endpoint); !ok {
			return nil, api.ErrNotFound
		}
	}
	all, err := a.planes.Connections()
	if err != nil {
		return nil, err
	}
	out := make([]model.Connection, 0, len(all))
	for _, c := range all {
		c.Name = a.known.nameOf(c.Endpoint)
		if c.Path == model.PathListen && !f.Listeners || f.Endpoint != "" && c.Name != f.Endpoint {
			continue
		}
		out = append(out, c)
	}
	return out, nil
}

// Traffic reports what the sockets of each of this node's endpoints did.
func (a *Agent) Traffic(context.Context) ([]model.Traffic, error) {
	return a.planes.Traffic(a.known.all())
}

// Services lists the services in force on this node. They are in the planes only, where an earlier agent's are
// found: whoever makes them compares, after it or the agent was away.
func (a *Agent) Services(context.Context) ([]model.Service, error) { return a.planes.Services() }

// EditServices changes them, one after the other.
func (a *Agent) EditServices(ctx context.Context, edit api.ServiceEdit) error {
	return a.planes.EditServices(ctx, edit)
}
