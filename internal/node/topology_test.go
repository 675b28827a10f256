package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/policy"
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
func topologyOf(h *host, s store.Store, verdicts plane.Policy, state store.State) *Agent {
	h.store = s
	h.enforcer = newEnforcer(verdicts, "n1", nil, netip.Prefix{}, h.log)
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

// stubborn is a plane that takes no policy while it is full.
type stubborn struct {
	fakeVerdicts
	full  atomic.Bool
	tries atomic.Int64
}

func (s *stubborn) ApplyPolicy(model.PolicyChange) error {
	s.tries.Add(1)
	if s.full.Load() {
		return errors.New("map full")
	}
	return nil
}

// lines is a log that is counted by what it says.
type lines struct {
	mu  sync.Mutex // guards all
	all bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.Write(p)
}

func (l *lines) count(what string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.all.String(), what)
}

// TestStateThatFails: a state that cannot be applied is tried ever more rarely, and the log has one
// line of it; another state is tried at once.
func TestStateThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log lines
		full := &stubborn{}
		full.full.Store(true)
		h := recordingHost(t.TempDir())
		h.log = slog.New(slog.NewTextHandler(&log, nil))
		state := store.State{Nodes: []model.Node{h.ownRecord()}, Policies: []*policy.Policy{{Name: "p"}}}
		a := topologyOf(h, nil, full, state)
		local := prefixes("127.0.0.1/32")
		a.topology.applied.local = local
		states, locals := make(chan store.State), make(chan []netip.Prefix)
		done := make(chan error)
		go func() { done <- a.topology.followTopology(t.Context(), states, locals) }()
		states <- state
		locals <- local
		tries := func(d time.Duration) int64 {
			before := full.tries.Load()
			time.Sleep(d)
			synctest.Wait()
			return full.tries.Load() - before
		}
		if n := tries(10 * time.Second); n < 3 || n > 5 {
			t.Errorf("tried %d times in 10 s", n)
		}
		if n := tries(10 * time.Minute); n < 18 || n > 22 {
			t.Errorf("tried %d times in 10 minutes", n)
		}
		state.Revision++
		states <- state
		if n := tries(10 * time.Second); n < 3 || n > 5 {
			t.Errorf("another state was tried %d times in 10 s", n)
		}
		if told := log.count("not applied"); told != 1 {
			t.Errorf("%d lines in the log", told)
		}
		full.full.Store(false)
		if n := tries(2 * lastRepair); n != 1 || log.count("is applied") != 1 {
			t.Errorf("applied %d times at last, and told %d times", n, log.count("is applied"))
		}
		close(states)
		testutil.NoError(t, <-done)
		h.enforcer.close()
	})
}
