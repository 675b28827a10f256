package node

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/store/etcd"
	"heddle.dev/heddle/internal/testutil"
)

// flaky is a store that does not answer the first time that it is told of an endpoint.
type flaky struct {
	memory
	puts int
}

func (f *flaky) InitNetwork(_ context.Context, want store.Network) (store.Network, error) {
	return want, nil
}

func (f *flaky) PutEndpoint(ctx context.Context, e model.Endpoint) error {
	if f.puts++; f.puts == 1 {
		return fmt.Errorf("put endpoint: %w", &etcd.UnreachableError{Reason: "a test"})
	}
	return f.memory.PutEndpoint(ctx, e)
}

// topologyOf gives the parts of an agent that has s for its store and a plane that has policy only,
// and to which routes and stacks of state are applied.
func topologyOf(h *host, s store.Store, policy *fakeVerdicts, state store.State) *Agent {
	h.store = s
	h.enforcer = newEnforcer(policy, "n1", nil, netip.Prefix{}, h.log)
	h.stacker = newStacker("n1", newAway(func() {}), &h.faults, h.log)
	h.stacker.settled = true
	a := compose(h)
	a.topology.applied.state, a.topology.applied.known = state, true
	return a
}

// TestForgottenAndBack: a node that others have forgotten joins again, and tells the store of all of
// its endpoints, also of those of which it could not be told at once.
func TestForgottenAndBack(t *testing.T) {
	testutil.NeedRoot(t, "makes a network namespace")
	name := fmt.Sprintf("hdt-%d-back", os.Getpid())
	testutil.NoError(t, netns.Create(name))
	t.Cleanup(func() { testutil.NoError(t, netns.Delete(name)) })
	s, h := &flaky{}, recordingHost(t.TempDir())
	back := store.State{Nodes: []model.Node{h.ownRecord()}}
	a := topologyOf(h, s, &fakeVerdicts{}, back)
	defer h.enforcer.close()
	e := endpointOf(1, "e", "10.244.1.2")
	e.NetnsPath = netns.Path(name)
	h.known.add(e)
	history := 0
	testutil.NoError(t, a.topology.follow(t.Context(), store.State{}, nil, &history))
	if len(s.joins) != 1 || s.puts != 1 {
		t.Fatalf("joined %d times, with %d endpoints", len(s.joins), s.puts)
	}
	testutil.NoError(t, a.topology.follow(t.Context(), back, nil, &history))
	if s.puts != 2 || s.state.Endpoints.Len() != 1 {
		t.Errorf("told of endpoints %d times; the store has %v", s.puts, s.state.Endpoints)
	}
}
