package store

import (
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
)

// crowdedNode is a view of a node n1 with n endpoints, and what encodes endpoint i as it is or,
// changed, with another label.
func crowdedNode(t testing.TB, n int) (v *View, keys Keys, encode func(i int, label string) []byte) {
	t.Helper()
	keys = KeysOf(1)
	v = NewView(keys, slog.New(slog.DiscardHandler), func() { t.Fatal("a value is invalid") })
	node := model.Node{Name: "n1", Underlay: netip.MustParseAddr("192.0.2.1"), Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}}
	raw, err := EncodeNode(node)
	if err != nil {
		t.Fatal(err)
	}
	v.Set(keys.Node("n1"), raw, 1)
	encode = func(i int, label string) []byte {
		addr := netip.AddrFrom4([4]byte{10, 0, byte((i + 2) >> 8), byte(i + 2)})
		raw, err := EncodeEndpoint(model.Endpoint{ID: model.EndpointID(i + 1), Name: fmt.Sprint("pods/", i), Node: "n1", Addrs: []netip.Addr{addr},
			NetnsPath: fmt.Sprint("/run/netns/", i), Labels: map[string]string{"app": label}, Created: time.Unix(1, 0).UTC()})
		if err != nil {
			t.Fatal(err)
		}
		return raw
	}
	for i := range n {
		v.Set(keys.Endpoint("n1", model.EndpointID(i+1)), encode(i, "web"), 1)
	}
	return v, keys, encode
}

// TestChangeAmongMany: a change of one of 10,000 endpoints shows those who follow states no more
// than a group of them.
func TestChangeAmongMany(t *testing.T) {
	const n = 10000
	v, keys, encode := crowdedNode(t, n)
	before := v.State(1)
	v.Set(keys.Endpoint("n1", n/2), encode(n/2-1, "db"), 1)
	v.Delete(keys.Endpoint("n1", 7))
	after := v.State(2)
	if before.Endpoints.Len() != n || after.Endpoints.Len() != n-1 {
		t.Fatalf("%d endpoints, then %d", before.Endpoints.Len(), after.Endpoints.Len())
	}
	changes := after.Endpoints.ChangedSince(before.Endpoints)
	if len(changes) != 1 || changes[0].Before.Len() > 2*model.GroupSize || changes[0].After.Len() > 2*model.GroupSize {
		t.Fatalf("two endpoints have changed, and %d nodes; the first in %d groups", len(changes), len(changes[0].After))
	}
	if e := after.Endpoints.Of("n1")[n/2-2]; e.ID != n/2 || e.Labels["app"] != "db" {
		t.Errorf("the changed one is %+v", e)
	}
}

// BenchmarkCrowdedNode is a change of one endpoint of a node that has so many: what every agent of
// the network does for it.
func BenchmarkCrowdedNode(b *testing.B) {
	for _, n := range []int{100, 1000, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			v, keys, encode := crowdedNode(b, n)
			v.State(1)
			changed := encode(n/2, "web")
			for b.Loop() {
				v.Set(keys.Endpoint("n1", model.EndpointID(n/2+1)), changed, 1)
				v.State(2)
			}
		})
	}
}
