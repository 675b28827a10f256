package etcd

import (
	"errors"
	"testing"
	"time"

	"heddle.dev/heddle/internal/store"
)

// TestOffline: what is noted of a node whose agent is gone, and when it may be forgotten.
func TestOffline(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	initNetwork(t, s, store.Network{})
	join(t, s, node(1))
	put(t, s, endpoint("n1", 1, "10.244.0.2"))
	states := watch(t, s)
	noted := func(what string, ok func(store.OfflineRecord, bool) bool) {
		t.Helper()
		await(t, states, what, func(s store.State) bool { a, is := s.Offline["n1"]; return ok(a, is) })
	}
	note := func(a store.OfflineRecord) {
		t.Helper()
		if err := s.NoteOffline(t.Context(), a); err != nil {
			t.Fatal(err)
		}
	}
	t0 := time.Now().UTC().Add(-time.Hour)
	at := func(minutes int) time.Time { return t0.Add(time.Duration(minutes) * time.Minute) }
	note(store.OfflineRecord{Node: "n9", Since: t0}) // nobody
	note(store.OfflineRecord{Node: "n1", Since: at(1)})
	note(store.OfflineRecord{Node: "n1", Since: at(2), Seen: at(10)}) // it is offline since the first time
	note(store.OfflineRecord{Node: "n1", Since: at(3), Seen: at(5)})
	noted("n1 offline since 1, seen at 10", func(a store.OfflineRecord, is bool) bool {
		return is && a.Since.Equal(at(1)) && a.Seen.Equal(at(10)) && a.Last().Equal(at(10))
	})
	var seen *store.NodeSeenError
	if err := s.ForgetNode(t.Context(), "n1", at(9)); !errors.As(err, &seen) {
		t.Errorf("forget although it was seen later: %v", err)
	}

	live := connect(t, s)
	if err := live.HoldName(t.Context(), nameLease("a"), false); err != nil {
		t.Fatal(err)
	}
	noted("n1 back", func(_ store.OfflineRecord, is bool) bool { return !is })
	note(store.OfflineRecord{Node: "n1", Since: at(4)}) // somebody who is late
	var held *store.NodeLiveError
	for _, quiet := range []time.Time{{}, time.Now().Add(time.Hour)} {
		if err := s.ForgetNode(t.Context(), "n1", quiet); !errors.As(err, &held) {
			t.Errorf("forget a live node: %v", err)
		}
	}
	if err := live.ReleaseName(t.Context(), nameLease("a")); err != nil {
		t.Fatal(err)
	}
	if err := s.ForgetNode(t.Context(), "n1", at(30)); !errors.As(err, &seen) {
		t.Errorf("forget for its age what nobody noted: %v", err)
	}
	note(store.OfflineRecord{Node: "n1", Since: at(20)})
	if err := s.ForgetNode(t.Context(), "n1", at(30)); err != nil {
		t.Fatal(err)
	}
	await(t, states, "nothing", counts(0, 0))
	if err := s.ForgetNode(t.Context(), "n1", time.Time{}); err != nil {
		t.Errorf("forget what is not there: %v", err)
	}
	if again := join(t, s, node(2)); again.Prefixes[0].String() != "10.244.0.0/24" {
		t.Errorf("its prefix is not free: %v", again.Prefixes)
	}
	put(t, s, endpoint("n2", 1, "10.244.0.2"))
}
