package endpoint

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
)

func prefixes(texts ...string) (ps []netip.Prefix) {
	for _, s := range texts {
		ps = append(ps, netip.MustParsePrefix(s))
	}
	return ps
}

func newLeases(t *testing.T, cfg Config) *Leases {
	t.Helper()
	cfg.Node = "n1"
	l, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func lease(t *testing.T, l *Leases, name string) Lease {
	t.Helper()
	got, err := l.Lease(name, netip.Addr{})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func existing(id model.EndpointID, name, addr string, created int64) model.Endpoint {
	return model.Endpoint{ID: id, Name: name, Node: "n1", Addrs: []netip.Addr{netip.MustParseAddr(addr)}, Created: time.Unix(created, 0)}
}

func TestReservedAddressesAreSkippedAndExhaustionNamesThePrefix(t *testing.T) {
	l := newLeases(t, Config{Prefixes: prefixes("10.0.0.0/29")})
	var got []string
	for i := range 5 {
		got = append(got, lease(t, l, fmt.Sprintf("c%d", i)).Addrs[0].String())
	}
	if s := strings.Join(got, " "); s != "10.0.0.2 10.0.0.3 10.0.0.4 10.0.0.5 10.0.0.6" {
		t.Errorf("addresses %s", s)
	}
	_, err := l.Lease("more", netip.Addr{})
	var exhausted *ExhaustedError
	if !errors.Is(err, ErrExhausted) || !errors.As(err, &exhausted) || exhausted.InUse != 5 || !strings.Contains(err.Error(), "10.0.0.0/29") {
		t.Errorf("sixth lease: %v", err)
	}
	if _, ok := l.ByName("more"); ok || l.LastID() != 5 {
		t.Errorf("a lease that was refused took something: last id %d", l.LastID())
	}
	l.Release(3)
	if again := lease(t, l, "more"); again.Addrs[0].String() != "10.0.0.4" || again.ID != 6 {
		t.Errorf("after a release: %+v, want the only free address and a new id", again)
	}
}

func TestReleasedAddressesComeLast(t *testing.T) {
	l := newLeases(t, Config{Prefixes: prefixes("10.0.0.0/29", "10.0.1.0/30")})
	var order []string
	for i := range 8 {
		got := lease(t, l, "c")
		if got.ID != model.EndpointID(i+1) {
			t.Errorf("id %d, want %d", got.ID, i+1)
		}
		order = append(order, got.Addrs[0].String())
		if !l.Release(got.ID) {
			t.Fatal("release of an existing lease")
		}
	}
	want := "10.0.0.2 10.0.0.3 10.0.0.4 10.0.0.5 10.0.0.6 10.0.1.2 10.0.0.2 10.0.0.3"
	if got := strings.Join(order, " "); got != want {
		t.Errorf("order %s, want %s", got, want)
	}
	if l.Release(99) {
		t.Error("release of a lease that does not exist")
	}
}

func TestBothFamilies(t *testing.T) {
	old := model.Endpoint{ID: 1, Name: "old", Node: "n1", Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.3")}}
	l := newLeases(t, Config{Prefixes: prefixes("10.0.0.0/29"), Prefix6: netip.MustParsePrefix("fd00::/96"), Endpoints: []model.Endpoint{old}})
	if got, ok := l.ByName("old"); !ok || fmt.Sprint(got.Addrs) != "[10.0.0.3 fd00::a00:3]" {
		t.Errorf("endpoint from before there was IPv6: %v", got.Addrs)
	}
	if got := lease(t, l, "c1"); fmt.Sprint(got.Addrs) != "[10.0.0.4 fd00::a00:4]" {
		t.Errorf("addresses %v", got.Addrs)
	}
	if got, err := l.Lease("c2", netip.MustParseAddr("fd00::a00:2")); err != nil || fmt.Sprint(got.Addrs) != "[10.0.0.2 fd00::a00:2]" {
		t.Errorf("IPv6 address asked for: %v, %v", got.Addrs, err)
	}
	for _, bad := range []string{"fd00::a00:2", "10.0.0.2", "fd00::a00:1", "fd00::a00:7", "fd01::a00:5", "fd00::5"} {
		if got, err := l.Lease("c3", netip.MustParseAddr(bad)); !errors.Is(err, ErrAddr) {
			t.Errorf("%s: got %v, %v; want ErrAddr", bad, got, err)
		}
	}
	l.Release(1)
	if got, err := l.Lease("c3", netip.MustParseAddr("fd00::a00:3")); err != nil {
		t.Errorf("released address: %v, %v", got.Addrs, err)
	}
}

func TestAddressSpaceEnd(t *testing.T) {
	l := newLeases(t, Config{Prefixes: prefixes("255.255.255.252/30")})
	if got := lease(t, l, "c1"); fmt.Sprint(got.Addrs) != "[255.255.255.254]" {
		t.Errorf("addresses %v", got.Addrs)
	}
	if _, err := l.Lease("c2", netip.Addr{}); !errors.Is(err, ErrExhausted) {
		t.Errorf("second lease: %v, want ErrExhausted", err)
	}
}

func TestNames(t *testing.T) {
	l := newLeases(t, Config{Prefixes: prefixes("10.0.0.0/24")})
	first := lease(t, l, "n1/c1")
	_, err := l.Lease("n1/c1", netip.Addr{})
	var inUse *NameInUseError
	if !errors.Is(err, ErrNameInUse) || !errors.As(err, &inUse) || inUse.ID != first.ID {
		t.Errorf("second lease of a name: %v", err)
	}
	if got, ok := l.ByName("n1/c1"); !ok || !reflect.DeepEqual(got, first) {
		t.Errorf("ByName = %+v, %v", got, ok)
	}
	for _, bad := range []string{"", "/", "a/", "/a", "a//b", "-a", "a b", "a/../b", "é", "a\x00", "@netns", strings.Repeat("abc/", 50) + "a"} {
		if _, err := l.Lease(bad, netip.Addr{}); err == nil {
			t.Errorf("name %q was accepted", bad)
		}
	}
}

func TestRestoreContinuesBehindTheNewestEndpoint(t *testing.T) {
	old := []model.Endpoint{existing(9, "c9", "10.0.0.9", 100), existing(2, "c2", "10.0.0.4", 200)}
	l := newLeases(t, Config{Prefixes: prefixes("10.0.0.0/24"), Endpoints: old})
	if got := lease(t, l, "new"); got.ID != 3 || got.Addrs[0].String() != "10.0.0.5" {
		t.Errorf("%+v, want id 3 and 10.0.0.5", got)
	}
	if _, err := l.Lease("c9", netip.Addr{}); !errors.Is(err, ErrNameInUse) {
		t.Errorf("restored name: %v", err)
	}
	if got := l.All(); len(got) != 3 || got[0].ID != 2 || got[2].ID != 9 {
		t.Errorf("All = %+v", got)
	}
	l = newLeases(t, Config{Prefixes: prefixes("10.0.0.0/24"), Endpoints: old, LastID: 40})
	if got := lease(t, l, "new"); got.ID != 41 {
		t.Errorf("id %d after LastID 40", got.ID)
	}
}

func TestIDsWrapAndSkipThoseInUseOrBusy(t *testing.T) {
	l := newLeases(t, Config{
		Prefixes:  prefixes("10.0.0.0/24"),
		Endpoints: []model.Endpoint{existing(1, "c1", "10.0.0.2", 1)},
		LastID:    model.MaxEndpointID - 1,
		Busy:      func(id model.EndpointID) bool { return id == 2 },
	})
	if a, b := lease(t, l, "a"), lease(t, l, "b"); a.ID != model.MaxEndpointID || b.ID != 3 {
		t.Errorf("ids %d and %d, want %d and 3", a.ID, b.ID, model.MaxEndpointID)
	}
	l = newLeases(t, Config{Prefixes: prefixes("10.0.0.0/24"), Busy: func(model.EndpointID) bool { return true }})
	if _, err := l.Lease("a", netip.Addr{}); !errors.Is(err, ErrNoID) {
		t.Errorf("all ids busy: %v", err)
	}
}

func TestNewRefusesContradictions(t *testing.T) {
	ok := existing(1, "c1", "10.0.0.2", 1)
	elsewhere := existing(2, "c2", "10.0.0.3", 1)
	elsewhere.Node = "n2"
	for what, cfg := range map[string]Config{
		"no prefixes":         {},
		"host bits":           {Prefixes: prefixes("10.0.0.1/24")},
		"overlap":             {Prefixes: prefixes("10.0.0.0/24", "10.0.0.0/25")},
		"IPv6 prefix":         {Prefixes: prefixes("fd00::/120")},
		"IPv6 only endpoint":  {Prefixes: prefixes("10.0.0.0/24"), Endpoints: []model.Endpoint{existing(2, "c2", "fd00::a00:2", 1)}},
		"invalid prefix":      {Prefixes: []netip.Prefix{{}}},
		"other node":          {Prefixes: prefixes("10.0.0.0/24"), Endpoints: []model.Endpoint{elsewhere}},
		"same id":             {Prefixes: prefixes("10.0.0.0/24"), Endpoints: []model.Endpoint{ok, existing(1, "c2", "10.0.0.3", 1)}},
		"same name":           {Prefixes: prefixes("10.0.0.0/24"), Endpoints: []model.Endpoint{ok, existing(2, "c1", "10.0.0.3", 1)}},
		"same address":        {Prefixes: prefixes("10.0.0.0/24"), Endpoints: []model.Endpoint{ok, existing(2, "c2", "10.0.0.2", 1)}},
		"gateway":             {Prefixes: prefixes("10.0.0.0/24"), Endpoints: []model.Endpoint{existing(2, "c2", "10.0.0.1", 1)}},
		"outside the prefix":  {Prefixes: prefixes("10.0.0.0/24"), Endpoints: []model.Endpoint{existing(2, "c2", "10.0.1.2", 1)}},
		"id 0":                {Prefixes: prefixes("10.0.0.0/24"), Endpoints: []model.Endpoint{existing(0, "c2", "10.0.0.3", 1)}},
		"id that is too high": {Prefixes: prefixes("10.0.0.0/24"), Endpoints: []model.Endpoint{existing(model.MaxEndpointID+1, "c2", "10.0.0.3", 1)}},
	} {
		cfg.Node = "n1"
		if _, err := New(cfg); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
}

// TestRandomUse checks after each of many random steps what must always hold.
func TestRandomUse(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	ps := prefixes("10.0.0.0/28", "10.0.9.0/30")
	const size = 13 + 1
	l := newLeases(t, Config{Prefixes: ps})
	var held []Lease
	for step := range 5000 {
		if rng.IntN(2) == 0 {
			got, err := l.Lease(fmt.Sprintf("c%d", step), netip.Addr{})
			if (err != nil) != (len(held) == size) {
				t.Fatalf("step %d: %v with %d of %d held", step, err, len(held), size)
			}
			if err == nil {
				held = append(held, got)
			}
		} else if len(held) > 0 {
			i := rng.IntN(len(held))
			l.Release(held[i].ID)
			held = append(held[:i], held[i+1:]...)
		}
		seen := make(map[any]bool)
		for _, h := range held {
			if seen[h.ID] || seen[h.Addrs[0]] || !usable(ps[0], h.Addrs[0]) && !usable(ps[1], h.Addrs[0]) {
				t.Fatalf("step %d: %+v among %+v", step, h, held)
			}
			seen[h.ID], seen[h.Addrs[0]] = true, true
		}
		if len(l.All()) != len(held) {
			t.Fatalf("step %d: %d leases, want %d", step, len(l.All()), len(held))
		}
	}
}

func TestConcurrentLeasesDiffer(t *testing.T) {
	l := newLeases(t, Config{Prefixes: prefixes("10.0.0.0/24")})
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 20 {
				if _, err := l.Lease(fmt.Sprintf("w%d/c%d", w, i), netip.Addr{}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	seen := make(map[netip.Addr]bool)
	for _, h := range l.All() {
		seen[h.Addrs[0]] = true
	}
	if len(seen) != 160 {
		t.Errorf("%d different addresses, want 160", len(seen))
	}
}

// TestLeaseOfWantedAddress checks that an endpoint may ask for its address, and what it may not ask
// for.
func TestLeaseOfWantedAddress(t *testing.T) {
	l, err := New(Config{Node: "n1", Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")}})
	if err != nil {
		t.Fatal(err)
	}
	want := netip.MustParseAddr("10.244.1.77")
	lease, err := l.Lease("c1", want)
	if err != nil || len(lease.Addrs) != 1 || lease.Addrs[0] != want {
		t.Fatalf("got %v, %v; want %s", lease.Addrs, err, want)
	}
	for _, bad := range []string{"10.244.1.77", "10.244.1.1", "10.244.1.255", "10.244.2.5", "2001:db8::1"} {
		if got, err := l.Lease("c2", netip.MustParseAddr(bad)); !errors.Is(err, ErrAddr) {
			t.Errorf("%s: got %v, %v; want ErrAddr", bad, got, err)
		}
	}
	if _, err := l.Lease("c2", netip.Addr{}); err != nil {
		t.Errorf("after refusals: %v", err)
	}
}
