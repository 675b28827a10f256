package node

import (
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// crowd gives n endpoints of node n1.
func crowd(n int) (out []model.Endpoint) {
	for i := range n {
		e := endpointOf(model.EndpointID(i+1), fmt.Sprint("pods/", i), netip.AddrFrom4([4]byte{10, 244, byte((i + 2) >> 8), byte(i + 2)}).String())
		e.Labels = map[string]string{"app": "web"}
		out = append(out, e)
	}
	return out
}

// BenchmarkCrowdedNode is what the agent does, beside devices and maps, for one endpoint more of
// its node: policy, and the record.
func BenchmarkCrowdedNode(b *testing.B) {
	for _, n := range []int{100, 1000, 10000} {
		all := crowd(n)
		more := crowd(n + 1)[n]
		b.Run(fmt.Sprint("policy/", n), func(b *testing.B) {
			e, state := testEnforcer(&fakeVerdicts{})
			state.Endpoints = model.EndpointsOf(all...)
			for _, ep := range all {
				e.know(ep)
			}
			if err := e.follow(state, nil); err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				if err := e.set(more); err != nil {
					b.Fatal(err)
				}
				if err := e.remove(more.ID); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprint("record/", n), func(b *testing.B) {
			h := &host{cfg: Config{Name: "n1", Network: store.Network{ID: 3}, APISocket: filepath.Join(b.TempDir(), "api.sock")}, known: newRegistry(), log: slog.New(slog.DiscardHandler)}
			for _, ep := range all {
				h.known.add(ep)
			}
			for b.Loop() {
				h.known.add(more)
				h.saveRecord(0)
				h.known.remove(more)
			}
		})
	}
}
