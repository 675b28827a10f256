package populate

import (
	"fmt"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/store/etcd"
)

// TestFillAndRemove: everything made up is there for every reader of the store, and gone afterwards.
func TestFillAndRemove(t *testing.T) {
	s, err := etcd.Embedded(t.Context(), etcd.EmbeddedConfig{NetworkID: 3, Dir: t.TempDir(), ClientURL: "http://127.0.0.1:0", UnsafeNoFsync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	if _, err := s.InitNetwork(t.Context(), store.Network{}); err != nil {
		t.Fatal(err)
	}
	states, err := s.Watch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	await := func(nodes, endpoints int) store.State {
		t.Helper()
		for timeout := time.After(time.Minute); ; {
			select {
			case state := <-states:
				if len(state.Nodes) == nodes && len(state.Endpoints) == endpoints {
					return state
				}
			case <-timeout:
				t.Fatalf("no state with %d nodes and %d endpoints", nodes, endpoints)
			}
		}
	}
	o := Options{Nodes: 3, Endpoints: 25}
	if err := fill(t.Context(), s, o); err != nil {
		t.Fatal(err)
	}
	apps, plain := map[string]int{}, 0
	for _, e := range await(3, 25).Endpoints {
		apps[e.Labels[AppLabel]]++
		if !e.Intercepted {
			plain++
		}
	}
	if got := fmt.Sprint(apps); got != "map[a0:10 a1:10 a2:5]" || plain != 3 {
		t.Errorf("apps %s, %d not intercepted", got, plain)
	}
	if err := remove(t.Context(), s, o); err != nil {
		t.Fatal(err)
	}
	await(0, 0)
	if n := s.InvalidValues(); n != 0 {
		t.Errorf("%d values are against the schema", n)
	}
}

func TestMisuse(t *testing.T) {
	for _, o := range []Options{{Nodes: 0}, {Nodes: MaxNodes + 1}, {Nodes: 1, Endpoints: perNode + 1}, {Nodes: 2, Endpoints: -1}} {
		o.JoinFile, o.NetworkID = "/nowhere", model.NetworkID(1)
		if o.Validate() == nil {
			t.Errorf("%+v is taken", o)
		}
	}
	if err := (Options{Nodes: MaxNodes, Endpoints: MaxEndpoints}).Validate(); err != nil {
		t.Error(err)
	}
}
