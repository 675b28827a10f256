package endpoint

import (
	"errors"
	"net/netip"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// TestMoved: an address that has moved away is not given out, and one that has moved here is
// restored.
func TestMoved(t *testing.T) {
	away, here := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.9.0.7")
	cfg := Config{Prefixes: prefixes("10.0.0.0/29"), Node: "n1", MovedAway: []netip.Addr{away}, MovedHere: []netip.Addr{here},
		Endpoints: []model.Endpoint{{ID: 3, Name: "moved", Node: "n1", Addrs: []netip.Addr{here}}}}
	l, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Lease("x", away); !errors.Is(err, ErrAddr) {
		t.Errorf("an address that has moved away: %v", err)
	}
	for want := away.Next(); want != netip.MustParseAddr("10.0.0.7"); want = want.Next() {
		if got, err := l.Lease(want.String(), netip.Addr{}); err != nil || got.Addrs[0] != want {
			t.Errorf("got %+v, %v; want %s", got, err, want)
		}
	}
	if _, err := l.Lease("x", netip.Addr{}); !errors.Is(err, ErrExhausted) {
		t.Errorf("all others are taken: %v", err)
	}
	l.SetMovedAway(nil)
	if got, err := l.Lease("x", netip.Addr{}); err != nil || got.Addrs[0] != away {
		t.Errorf("after it came home: %+v, %v", got, err)
	}
	cfg.MovedHere = nil
	if _, err := New(cfg); err == nil {
		t.Error("an endpoint outside the prefixes was restored")
	}
}
