package node

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/store"
)

// retryTopology is how long a state that could not be applied waits for another try.
const retryTopology = time.Second

// followTopology applies each state of the network that the store reports, and tries again what fails.
// It owns the overlay's routes and the datapath's topology.
func (a *Agent) followTopology(ctx context.Context, states <-chan store.State) error {
	var (
		state store.State
		retry <-chan time.Time
	)
	for {
		select {
		case next, ok := <-states:
			if !ok {
				return nil
			}
			state = next
		case <-retry:
		case <-ctx.Done():
			return nil
		}
		retry = nil
		err := a.applyTopology(state)
		if err != nil {
			a.log.Error("apply topology; will try again", "revision", state.Revision, "err", err)
			retry = time.After(retryTopology)
		}
		a.mu.Lock()
		a.state, a.applyErr = state, err
		a.mu.Unlock()
	}
}

// applyTopology brings routes and programs to state. Routes first: a connection that the programs send
// over the overlay needs them.
func (a *Agent) applyTopology(state store.State) error {
	return errors.Join(
		netcfg.SetPeers(a.devices, a.self.Name, withOverlay6(a.prefix6, state.Nodes)),
		a.datapath.SetTopology(a.self.Name, []netip.Addr{a.self.Underlay}, state.Nodes, state.Endpoints),
	)
}

// withOverlay6 gives nodes with the IPv6 forms of their prefixes beside these.
func withOverlay6(prefix6 netip.Prefix, nodes []model.Node) []model.Node {
	out := make([]model.Node, len(nodes))
	for i, n := range nodes {
		n.Prefixes = model.WithOverlay6(prefix6, n.Prefixes)
		out[i] = n
	}
	return out
}
