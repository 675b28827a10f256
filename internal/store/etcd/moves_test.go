package etcd

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// movesTo lists the moves as the store has them: "10.244.0.2 n2".
func movesTo(t *testing.T, s *Store) (out []string) {
	t.Helper()
	moves, err := s.Moves(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range moves {
		out = append(out, m.Addr.String()+" "+m.Node)
	}
	return out
}

func wantMoves(t *testing.T, s *Store, what string, want ...string) {
	t.Helper()
	if got := movesTo(t, s); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s: moves %v, want %v", what, got, want)
	}
}

func threeNodes(t *testing.T) *Store {
	s := embedded(t, EmbeddedConfig{})
	initNetwork(t, s, store.Network{})
	for i := range 3 { // 10.244.0.0/24, 10.244.1.0/24, 10.244.2.0/24
		join(t, s, node(i+1))
	}
	return s
}

// TestMigration follows an address from its node to another, to a third, and home.
func TestMigration(t *testing.T) {
	t.Parallel()
	s := threeNodes(t)
	e := endpoint("n1", 1, "10.244.0.2")
	e.Labels = map[string]string{"app": "web"}
	put(t, s, e)
	var unknown *store.UnknownNodeError
	if _, err := s.GiveUpEndpoint(t.Context(), e, "n9"); !errors.As(err, &unknown) {
		t.Errorf("to a node that is not there: %v", err)
	}
	for range 2 { // the second time it is done already
		m, err := s.GiveUpEndpoint(t.Context(), e, "n2")
		if err != nil || m.Node != "n2" || m.From != "n1" || m.Home != "n1" || m.Labels["app"] != "web" {
			t.Fatalf("%+v, %v", m, err)
		}
	}
	var moved *store.MovedError
	for _, other := range []model.Endpoint{e, endpoint("n1", 2, "10.244.0.2"), endpoint("n3", 1, "10.244.0.2")} {
		if err := s.PutEndpoint(t.Context(), other); !errors.As(err, &moved) || moved.Move.Node != "n2" {
			t.Errorf("endpoint %s/%d with an address of n2's: %v", other.Node, other.ID, err)
		}
	}
	there := endpoint("n2", 7, "10.244.0.2")
	put(t, s, there)
	put(t, s, there)
	var inUse *store.AddrInUseError
	if err := s.PutEndpoint(t.Context(), endpoint("n2", 8, "10.244.0.2")); !errors.As(err, &inUse) {
		t.Errorf("another endpoint of the same node: %v", err)
	}
	var attached *store.MoveInUseError
	if _, err := s.RedirectMove(t.Context(), there.Addr4(), "n3"); !errors.As(err, &attached) {
		t.Errorf("redirected in use: %v", err)
	}
	if err := s.DropMove(t.Context(), there.Addr4(), "n2"); !errors.As(err, &attached) {
		t.Errorf("dropped in use: %v", err)
	}
	join(t, s, node(2)) // its endpoint is outside its prefixes, and no reason to refuse it
	if m, err := s.GiveUpEndpoint(t.Context(), there, "n3"); err != nil || m.Home != "n1" || m.From != "n2" {
		t.Fatalf("%+v, %v", m, err)
	}
	wantMoves(t, s, "on n3", "10.244.0.2 n3")
	if m, err := s.RedirectMove(t.Context(), there.Addr4(), "n1"); err != nil || m.Node != "n1" {
		t.Fatalf("%+v, %v", m, err)
	}
	put(t, s, endpoint("n1", 3, "10.244.0.2"))
	wantMoves(t, s, "home")
	if _, err := s.RedirectMove(t.Context(), there.Addr4(), "n2"); err == nil {
		t.Error("redirected what has not moved")
	}
}

// TestMoveEnds: with its endpoint, its node, or by itself, and then the address is its home's
// again.
func TestMoveEnds(t *testing.T) {
	t.Parallel()
	s := threeNodes(t)
	for name, end := range map[string]func(addr netip.Addr) error{
		"endpoint deleted": func(addr netip.Addr) error {
			put(t, s, endpoint("n2", 7, addr.String()))
			return s.DeleteEndpoint(t.Context(), "n2", 7)
		},
		"node left": func(addr netip.Addr) error {
			put(t, s, endpoint("n2", 7, addr.String()))
			if err := s.LeaveNode(t.Context(), "n2"); err != nil {
				return err
			}
			join(t, s, node(2))
			return nil
		},
		"dropped": func(addr netip.Addr) error { return s.DropMove(t.Context(), addr, "n2") },
	} {
		e := endpoint("n1", 1, "10.244.0.2")
		put(t, s, e)
		if _, err := s.GiveUpEndpoint(t.Context(), e, "n2"); err != nil {
			t.Fatal(err)
		}
		if err := s.DropMove(t.Context(), e.Addr4(), "n3"); err != nil { // not its
			t.Fatal(err)
		}
		wantMoves(t, s, name, "10.244.0.2 n2")
		if err := end(e.Addr4()); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		wantMoves(t, s, name)
		put(t, s, e)
		if err := s.DeleteEndpoint(t.Context(), "n1", 1); err != nil {
			t.Fatal(err)
		}
	}
	resp, err := s.client.Get(t.Context(), s.keys.Addrs("n2"), clientv3.WithPrefix())
	if err != nil || len(resp.Kvs) != 0 {
		t.Errorf("left: %v, %v", resp.Kvs, err)
	}
}

// TestKeepMove: a store that was lost gets a move back, unless somebody else has the address by
// now.
func TestKeepMove(t *testing.T) {
	t.Parallel()
	s := threeNodes(t)
	m := model.Move{Addr: netip.MustParseAddr("10.244.0.2"), Node: "n2", From: "n1", Home: "n1", Name: "c"}
	put(t, s, endpoint("n1", 1, "10.244.0.2"))
	var inUse *store.AddrInUseError
	if err := s.KeepMove(t.Context(), m); !errors.As(err, &inUse) || inUse.Owner != 1 {
		t.Errorf("its home gave it out: %v", err)
	}
	if err := s.DeleteEndpoint(t.Context(), "n1", 1); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.KeepMove(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	put(t, s, endpoint("n2", 7, "10.244.0.2"))
	m.Node = "n3"
	var moved *store.MovedError
	if err := s.KeepMove(t.Context(), m); !errors.As(err, &moved) {
		t.Errorf("it moved to another: %v", err)
	}
	elsewhere := m
	elsewhere.Addr, elsewhere.Home = netip.MustParseAddr("10.244.1.9"), "n1"
	if err := s.KeepMove(t.Context(), elsewhere); !errors.As(err, &inUse) {
		t.Errorf("an address of a node that is not its home: %v", err)
	}
}

// TestMovesRace: whatever nodes do at once with one address, one of them has it at the end.
func TestMovesRace(t *testing.T) {
	t.Parallel()
	s := threeNodes(t)
	addr := "10.244.0.2"
	for round := range 20 {
		e := endpoint("n1", 1, addr)
		put(t, s, e)
		var wg sync.WaitGroup
		for i, do := range []func(context.Context) error{
			func(ctx context.Context) error { _, err := s.GiveUpEndpoint(ctx, e, "n2"); return err },
			func(ctx context.Context) error { _, err := s.GiveUpEndpoint(ctx, e, "n3"); return err },
			func(ctx context.Context) error { return s.PutEndpoint(ctx, endpoint("n2", 2, addr)) },
			func(ctx context.Context) error { return s.PutEndpoint(ctx, endpoint("n3", 3, addr)) },
			func(ctx context.Context) error { return s.PutEndpoint(ctx, e) },
		} {
			wg.Go(func() {
				if err := do(t.Context()); err != nil && t.Context().Err() != nil {
					t.Errorf("%d: %v", i, err)
				}
			})
		}
		wg.Wait()
		have := 0
		for i, id := range []model.EndpointID{1, 2, 3} {
			name := fmt.Sprint("n", i+1)
			resp, err := s.client.Get(t.Context(), s.keys.Endpoint(name, id))
			if err != nil {
				t.Fatal(err)
			}
			have += len(resp.Kvs)
			if err := s.DeleteEndpoint(t.Context(), name, id); err != nil {
				t.Fatal(err)
			}
		}
		if have > 1 {
			t.Fatalf("round %d: %d endpoints have the address", round, have)
		}
		for _, name := range []string{"n2", "n3"} {
			if err := s.DropMove(t.Context(), e.Addr4(), name); err != nil {
				t.Fatal(err)
			}
		}
		wantMoves(t, s, fmt.Sprint("round ", round))
	}
}
