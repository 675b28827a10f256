package populate

import (
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/store/etcd"
)

// TestFillAndRemove: everything made up is there for every reader of the store, and gone
// afterwards.
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
				if len(state.Nodes) == nodes && state.Endpoints.Len() == endpoints {
					return state
				}
			case <-timeout:
				t.Fatalf("no state with %d nodes and %d endpoints", nodes, endpoints)
			}
		}
	}
	p, err := newPopulation(t.Context(), s, Options{Nodes: 3, Endpoints: 25})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.fill(t.Context()); err != nil {
		t.Fatal(err)
	}
	apps, plain := map[string]int{}, 0
	state := await(3, 25)
	for e := range state.Endpoints.All() {
		apps[e.Labels[AppLabel]]++
		if !e.Planes.TCP.Intercepted {
			plain++
		}
	}
	if got := fmt.Sprint(apps); got != "map[a0:10 a1:10 a2:5]" || plain != 3 {
		t.Errorf("apps %s, %d not intercepted", got, plain)
	}
	revision := state.Revision
	for _, c := range []struct {
		command          string
		nodes, endpoints int
	}{{AddEndpoint, 3, 26}, {AddNode, 4, 26}, {DeleteNode, 3, 26}, {DeleteEndpoint, 3, 25}} {
		var out strings.Builder
		if err := p.command(t.Context(), c.command, &out); err != nil {
			t.Fatal(err)
		}
		state := await(c.nodes, c.endpoints)
		if got := strings.TrimSpace(out.String()); got != fmt.Sprint("revision ", state.Revision) || state.Revision <= revision {
			t.Errorf("%s: %s, the state after %d has %d", c.command, got, revision, state.Revision)
		}
		revision = state.Revision
	}
	if err := p.command(t.Context(), "stray", io.Discard); err == nil {
		t.Error("an unknown command is taken")
	}
	if err := p.remove(t.Context()); err != nil {
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
