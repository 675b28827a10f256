package etcd

import (
	"fmt"
	"os"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// TestWatchNoticesARestoredStore: a store is set back to an earlier time, and has gone on since, so
// that its revision is not lower than what a watch has seen. The watch must not miss what is
// different before that revision.
func TestWatchNoticesARestoredStore(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		// afterwards is how many endpoints are put into the restored store before the watch sees
		// it; there were 3.
		afterwards int
	}{
		{"revision is lower", 0}, {"revision is higher", 6},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, snapshot := t.TempDir(), t.TempDir()
			server := embedded(t, EmbeddedConfig{Dir: dir})
			initNetwork(t, server, store.Network{})
			join(t, server, node(1))
			closeStore(t, server)
			if err := os.CopyFS(snapshot, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			server = restart(t, server, dir)
			var log logBuffer
			client := connect(t, server, withVerifyEvery(50*time.Millisecond), logTo(&log))
			states := watch(t, client)
			for i := range 3 {
				put(t, server, endpoint("n1", model.EndpointID(i+1), fmt.Sprintf("10.244.0.%d", i+2)))
			}
			if s := await(t, states, "3 endpoints", counts(1, 3)); s.History != 0 {
				t.Errorf("history %d", s.History)
			}
			closeStore(t, server)
			hidden := embedded(t, EmbeddedConfig{Dir: snapshot})
			for i := range c.afterwards {
				put(t, hidden, endpoint("n1", model.EndpointID(i+11), fmt.Sprintf("10.244.0.%d", i+12)))
			}
			closeStore(t, hidden)
			server = restart(t, server, snapshot)
			s := await(t, states, "what the restored store has", func(s store.State) bool {
				return s.History == 1 && len(s.Nodes) == 1 && s.Endpoints.Len() == c.afterwards
			})
			for e := range s.Endpoints.All() {
				if e.ID < 11 {
					t.Errorf("endpoint %d is of the time before; log:\n%s", e.ID, log.String())
				}
			}
			// And it goes on from there.
			put(t, server, endpoint("n1", 20, "10.244.0.20"))
			await(t, states, "a new endpoint", counts(1, c.afterwards+1))
		})
	}
}

// TestHistoryGoesOn: a store that is only restarted, or from which old revisions are removed, is no
// other one.
func TestHistoryGoesOn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	server := embedded(t, EmbeddedConfig{Dir: dir})
	client := connect(t, server, withVerifyEvery(10*time.Millisecond))
	initNetwork(t, server, store.Network{})
	join(t, server, node(1))
	states := watch(t, client)
	await(t, states, "1 node", counts(1, 0))
	closeStore(t, server)
	server = restart(t, server, dir)
	put(t, server, endpoint("n1", 1, "10.244.0.2"))
	await(t, states, "1 endpoint", counts(1, 1))
	resp, err := server.client.Get(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		put(t, server, endpoint("n1", 1, fmt.Sprintf("10.244.0.%d", i+3)))
	}
	if _, err := server.client.Compact(t.Context(), resp.Header.Revision+2); err != nil {
		t.Fatal(err)
	}
	put(t, server, endpoint("n1", 2, "10.244.0.2"))
	s := await(t, states, "2 endpoints", counts(1, 2))
	for range 5 { // looks
		seen := history{revision: s.Revision, cluster: resp.Header.ClusterId, created: 2}
		if err := client.verify(t.Context(), seen); err != nil {
			t.Errorf("verify: %v", err)
		}
	}
	if s.History != 0 {
		t.Errorf("history %d", s.History)
	}
}

// TestLoadByPages: a network of more keys than are read at once.
func TestLoadByPages(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	initNetwork(t, s, store.Network{})
	var endpoints []model.Endpoint
	for n := range 6 {
		join(t, s, node(n+1))
		for i := range 200 {
			endpoints = append(endpoints, endpoint(fmt.Sprintf("n%d", n+1), model.EndpointID(i+1), fmt.Sprintf("10.244.%d.%d", n, i+2)))
		}
	}
	for _, e := range endpoints {
		put(t, s, e)
	}
	if len(endpoints) <= pageKeys {
		t.Fatalf("%d endpoints are one page", len(endpoints))
	}
	states := watch(t, s)
	if got := <-states; len(got.Nodes) != 6 || got.Endpoints.Len() != len(endpoints) {
		t.Errorf("%d nodes, %d endpoints, want 6 and %d", len(got.Nodes), got.Endpoints.Len(), len(endpoints))
	}
	put(t, s, endpoint("n1", 999, "10.244.0.250"))
	await(t, states, "one more", counts(6, len(endpoints)+1))
}
