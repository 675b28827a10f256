package etcd

import (
	"context"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

func TestWatchSendsCompleteSortedStates(t *testing.T) {
	t.Parallel()
	a := embedded(t, EmbeddedConfig{})
	b := connect(t, a)
	initNetwork(t, a, store.Network{})
	n2 := join(t, a, node(2))
	states := watch(t, b)
	first := <-states
	if len(first.Nodes) != 1 || !reflect.DeepEqual(first.Nodes[0], n2) || first.Endpoints.Len() != 0 {
		t.Fatalf("first state %+v", first)
	}
	join(t, a, node(1))
	put(t, a, endpoint("n2", 10, "10.244.0.10"))
	put(t, a, endpoint("n2", 9, "10.244.0.9"))
	put(t, a, endpoint("n1", 30, "10.244.1.3"))
	s := await(t, states, "2 nodes and 3 endpoints", counts(2, 3))
	if s.Revision <= first.Revision {
		t.Errorf("revision %d after %d", s.Revision, first.Revision)
	}
	var order []string
	for e := range s.Endpoints.All() {
		order = append(order, fmt.Sprintf("%s/%d", e.Node, e.ID))
	}
	if got := strings.Join(order, " "); got != "n1/30 n2/9 n2/10" || s.Nodes[0].Name != "n1" {
		t.Errorf("order %s, first node %s", got, s.Nodes[0].Name)
	}
	if want := endpoint("n1", 30, "10.244.1.3"); !reflect.DeepEqual(s.Endpoints[0][0], want) {
		t.Errorf("endpoint %+v, want %+v", s.Endpoints[0][0], want)
	}
	if err := a.LeaveNode(t.Context(), "n2"); err != nil {
		t.Fatal(err)
	}
	await(t, states, "n1 and its endpoint", counts(1, 1))
	if b.InvalidValues() != 0 {
		t.Errorf("%d invalid values", b.InvalidValues())
	}
}

func TestWatchCoalesces(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	initNetwork(t, s, store.Network{})
	join(t, s, node(1))
	states := watch(t, s)
	const changes = 60
	for i := range changes {
		put(t, s, endpoint("n1", model.EndpointID(i+1), fmt.Sprintf("10.244.0.%d", i+2)))
	}
	received := 0
	await(t, states, "every endpoint", func(st store.State) bool {
		received++
		return st.Endpoints.Len() == changes
	})
	if received > changes/2 {
		t.Errorf("%d states for %d changes that nobody read", received, changes)
	}
}

func TestWatchEndsWithItsContextAndWithTheStore(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	c := connect(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	states, err := s.Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	other := watch(t, c)
	cancel()
	awaitEnd(t, states)
	closeStore(t, c)
	awaitEnd(t, other)
	if err := c.LeaveNode(t.Context(), "n1"); err == nil || !strings.Contains(err.Error(), "store is closed") {
		t.Errorf("call on a closed store: %v", err)
	}
}

func awaitEnd(t *testing.T, states <-chan store.State) {
	t.Helper()
	deadline := time.After(10 * time.Second)
	for {
		select {
		case _, open := <-states:
			if !open {
				return
			}
		case <-deadline:
			t.Fatal("watch goes on")
		}
	}
}

func TestInvalidValuesAreSkippedAndCounted(t *testing.T) {
	t.Parallel()
	var log logBuffer
	s := embedded(t, EmbeddedConfig{}, logTo(&log))
	initNetwork(t, s, store.Network{})
	join(t, s, node(1))
	put(t, s, endpoint("n1", 1, "10.244.0.2"))
	put(t, s, endpoint("n1", 2, "10.244.0.3"))
	states := watch(t, s)
	await(t, states, "2 endpoints", counts(1, 2))
	for _, kv := range [][2]string{
		{s.keys.Node("evil"), `{"name":"evil"`},
		{s.keys.Node("n9"), `{"name":"n9","underlay":"10.0.0.9","prefixes":["10.244.0.0/24"]}`}, // n1's
		{s.keys.Nodes() + "Bad Name", `{}`},
		{s.keys.Endpoint("n1", 1), `[]`},
		{s.keys.Root() + "future/thing", "\xff"},
	} {
		if _, err := s.client.Put(t.Context(), kv[0], kv[1]); err != nil {
			t.Fatal(err)
		}
	}
	put(t, s, endpoint("n1", 3, "10.244.0.4"))
	st := await(t, states, "endpoint 3", func(st store.State) bool {
		return slices.ContainsFunc(st.Endpoints.Of("n1"), func(e model.Endpoint) bool { return e.ID == 3 })
	})
	if len(st.Nodes) != 1 || st.Endpoints.Len() != 2 || st.Endpoints[0][0].ID != 2 {
		t.Errorf("state %+v", st)
	}
	if got := s.InvalidValues(); got != 4 {
		t.Errorf("%d invalid values, want 4; log:\n%s", got, log.String())
	}
	// An endpoint whose value was damaged gives its address back all the same.
	if err := s.DeleteEndpoint(t.Context(), "n1", 1); err != nil {
		t.Fatal(err)
	}
	put(t, s, endpoint("n1", 4, "10.244.0.2"))
}

func TestWatchRecoversFromCompaction(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	initNetwork(t, s, store.Network{})
	join(t, s, node(1))
	w := &watcher{store: s, view: store.NewView(s.keys, slog.Default(), func() {}), out: make(chan store.State)}
	if err := w.load(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The watch begins at a revision that is gone by then, as after a long time without a
	// connection.
	put(t, s, endpoint("n1", 1, "10.244.0.2"))
	put(t, s, endpoint("n1", 2, "10.244.0.3"))
	if err := s.DeleteEndpoint(t.Context(), "n1", 1); err != nil {
		t.Fatal(err)
	}
	resp, err := s.client.Get(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.Compact(t.Context(), resp.Header.Revision, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); w.run(ctx) }()
	st := await(t, w.out, "1 endpoint", counts(1, 1))
	if st.Endpoints[0][0].ID != 2 {
		t.Errorf("endpoint %d, want 2", st.Endpoints[0][0].ID)
	}
	cancel()
	<-done
}

// restart replaces a closed embedded store by one at the same address.
func restart(t *testing.T, old *Store, dir string) *Store {
	t.Helper()
	return embedded(t, EmbeddedConfig{Dir: dir, ClientURL: old.Endpoints()[0]})
}

func TestWatchSurvivesRestartOfTheServer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	server := embedded(t, EmbeddedConfig{Dir: dir})
	client := connect(t, server)
	initNetwork(t, server, store.Network{})
	n1 := join(t, server, node(1))
	states := watch(t, client)
	await(t, states, "1 node", counts(1, 0))
	began := time.Now()
	closeStore(t, server)
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("closing a server with watches took %s", took)
	}
	server = restart(t, server, dir)
	if again := join(t, server, node(1)); !reflect.DeepEqual(again, n1) {
		t.Errorf("after the restart %+v, want %+v", again, n1)
	}
	put(t, server, endpoint("n1", 1, "10.244.0.2"))
	await(t, states, "1 endpoint", counts(1, 1))
}

func TestWatchNoticesThatTheStoreWasWiped(t *testing.T) {
	t.Parallel()
	var log logBuffer
	server := embedded(t, EmbeddedConfig{})
	client := connect(t, server, withVerifyEvery(50*time.Millisecond), logTo(&log))
	initNetwork(t, server, store.Network{})
	join(t, server, node(1))
	for i := range 20 { // gets the revision ahead of what the new store will have
		put(t, server, endpoint("n1", model.EndpointID(i+1), fmt.Sprintf("10.244.0.%d", i+2)))
	}
	states := watch(t, client)
	await(t, states, "20 endpoints", counts(1, 20))
	closeStore(t, server)
	server = restart(t, server, t.TempDir())
	initNetwork(t, server, store.Network{})
	join(t, server, node(2))
	st := await(t, states, "the new store's node", counts(1, 0))
	if st.Nodes[0].Name != "n2" {
		t.Errorf("node %s, want n2; log:\n%s", st.Nodes[0].Name, log.String())
	}
}
