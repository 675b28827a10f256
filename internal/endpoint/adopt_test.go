package endpoint

import (
	"errors"
	"net/netip"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// An address of another network is held like a leased one, is not one of the pool, and does not
// move its search.
func TestAdopt(t *testing.T) {
	foreign := netip.MustParseAddr("10.88.0.7")
	cfg := Config{Prefixes: prefixes("10.0.0.0/24"), Node: "n1", Endpoints: []model.Endpoint{
		{ID: 3, Name: "old", Node: "n1", Addrs: []netip.Addr{foreign}, Adopted: &model.Adopted{}},
	}}
	l, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Adopt("new", foreign); !errors.Is(err, ErrAddr) {
		t.Errorf("an address twice: %v", err)
	}
	got, err := l.Adopt("new", foreign.Next())
	if err != nil || got.Addrs[0] != foreign.Next() {
		t.Fatalf("%+v %v", got, err)
	}
	if own, err := l.Lease("own", netip.Addr{}); err != nil || own.Addrs[0] != netip.MustParseAddr("10.0.0.2") {
		t.Errorf("a lease beside it: %+v %v", own, err)
	}
	if _, err := l.Lease("x", foreign.Next().Next()); !errors.Is(err, ErrAddr) {
		t.Errorf("another network's address as a lease: %v", err)
	}
	if !l.Release(got.ID) {
		t.Error("not released")
	}
	if _, err := l.Adopt("again", foreign.Next()); err != nil {
		t.Error(err)
	}
	cfg.Endpoints[0].Adopted = nil
	if _, err := New(cfg); err == nil {
		t.Error("an endpoint outside the prefixes was restored")
	}
}
