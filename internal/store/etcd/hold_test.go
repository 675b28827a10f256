package etcd

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/store"
)

// nameLease is that of an agent that calls itself n1.
func nameLease(instance string) store.NameLease {
	return store.NameLease{Node: "n1", Instance: strings.Repeat(instance, 32), Underlay: netip.MustParseAddr("10.0.0.1"), Since: time.Now().UTC()}
}

// heldBy waits for a state in which n1 is held by an instance, or by nobody.
func heldBy(t *testing.T, states <-chan store.State, instance string) {
	t.Helper()
	await(t, states, "n1 held by "+instance, func(s store.State) bool {
		h, held := s.NameLeases["n1"]
		return held == (instance != "") && strings.HasPrefix(h.Instance, instance)
	})
}

func TestNameIsHeld(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	initNetwork(t, s, store.Network{})
	states := watch(t, s)
	live, other := connect(t, s), connect(t, s)
	if err := live.HoldName(t.Context(), nameLease("a"), false); err != nil {
		t.Fatal(err)
	}
	heldBy(t, states, "a")
	var held *store.NameHeldError
	err := other.HoldName(t.Context(), nameLease("b"), false)
	if !errors.As(err, &held) || !strings.Contains(err.Error(), "10.0.0.1") || !strings.Contains(err.Error(), "--take-over") {
		t.Fatalf("another agent: %v", err)
	}
	leases, err := s.client.Leases(t.Context())
	if err != nil || len(leases.Leases) != 1 {
		t.Errorf("leases %v, %v: want one, the refused agent's is given back", leases, err)
	}
	t.Run("the same node returns at once", func(t *testing.T) {
		again := connect(t, s)
		if err := again.HoldName(t.Context(), nameLease("a"), false); err != nil {
			t.Error(err)
		}
	})
	t.Run("it is taken over", func(t *testing.T) {
		if err := other.HoldName(t.Context(), nameLease("b"), true); err != nil {
			t.Fatal(err)
		}
		heldBy(t, states, "b")
		// What the first one gives up is no longer its own.
		if err := live.ReleaseName(t.Context(), nameLease("a")); err != nil {
			t.Error(err)
		}
		if err := other.ReleaseName(t.Context(), nameLease("b")); err != nil {
			t.Error(err)
		}
		heldBy(t, states, "")
	})
	t.Run("it is free", func(t *testing.T) {
		if err := live.HoldName(t.Context(), nameLease("a"), false); err != nil {
			t.Error(err)
		}
	})
}

// TestNameOfTheDead: the store forgets an agent that does not say that it lives.
func TestNameOfTheDead(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	initNetwork(t, s, store.Network{})
	dead := connect(t, s)
	if _, err := dead.takeName(t.Context(), nameLease("a"), false); err != nil { // and nobody keeps it alive
		t.Fatal(err)
	}
	states := watch(t, s)
	heldBy(t, states, "a")
	began := time.Now()
	heldBy(t, states, "")
	t.Logf("free after %s", time.Since(began))
	if err := s.HoldName(t.Context(), nameLease("b"), false); err != nil {
		t.Error(err)
	}
}

// TestNameIsHeldAgain: an owner of a name that lost its lease, with all of the store or alone, gets
// another.
func TestNameIsHeldAgain(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	initNetwork(t, s, store.Network{})
	live := connect(t, s)
	if err := live.HoldName(t.Context(), nameLease("a"), false); err != nil {
		t.Fatal(err)
	}
	states := watch(t, s)
	heldBy(t, states, "a")
	got, err := s.client.Get(t.Context(), s.keys.NameLease("n1"))
	if err != nil || len(got.Kvs) != 1 {
		t.Fatal(got, err)
	}
	if _, err := s.client.Revoke(t.Context(), clientv3.LeaseID(got.Kvs[0].Lease)); err != nil {
		t.Fatal(err)
	}
	heldBy(t, states, "")
	heldBy(t, states, "a")
}
