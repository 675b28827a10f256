package store

import (
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
)

// BenchmarkCrowdedNode is a change of one endpoint of a node that has so many: what every agent of
// the network does for it.
func BenchmarkCrowdedNode(b *testing.B) {
	for _, n := range []int{100, 1000, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			keys := KeysOf(1)
			v := NewView(keys, slog.New(slog.DiscardHandler), func() { b.Fatal("a value is invalid") })
			node := model.Node{Name: "n1", Underlay: netip.MustParseAddr("192.0.2.1"), Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}}
			raw, err := EncodeNode(node)
			if err != nil {
				b.Fatal(err)
			}
			v.Set(keys.Node("n1"), raw, 1)
			encode := func(i int) []byte {
				addr := netip.AddrFrom4([4]byte{10, 0, byte((i + 2) >> 8), byte(i + 2)})
				raw, err := EncodeEndpoint(model.Endpoint{ID: model.EndpointID(i + 1), Name: fmt.Sprint("pods/", i), Node: "n1", Addrs: []netip.Addr{addr},
					NetnsPath: fmt.Sprint("/run/netns/", i), Labels: map[string]string{"app": "web"}, Created: time.Unix(1, 0).UTC()})
				if err != nil {
					b.Fatal(err)
				}
				return raw
			}
			for i := range n {
				v.Set(keys.Endpoint("n1", model.EndpointID(i+1)), encode(i), 1)
			}
			v.State(1)
			changed := encode(n / 2)
			for b.Loop() {
				v.Set(keys.Endpoint("n1", model.EndpointID(n/2+1)), changed, 1)
				v.State(2)
			}
		})
	}
}
