package node

import (
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"testing"

	"heddle.dev/heddle/internal/endpointfile"
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

// recordingHost is as much of a node as writes down its endpoints, beside sockets in dir.
func recordingHost(dir string) *host {
	cfg := Config{Name: "n1", Network: store.Network{ID: 3}, APISocket: filepath.Join(dir, "api.sock")}
	h := &host{cfg: cfg, known: newRegistry(), files: endpointfile.In(dir), log: slog.New(slog.DiscardHandler)}
	h.self.Name, h.self.Prefixes, h.network.ID = "n1", prefixes("10.244.1.0/24"), 3
	return h
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
			h := recordingHost(b.TempDir())
			for _, ep := range all {
				h.known.add(ep)
				h.known.setNetns(ep.ID, uint64(ep.ID))
			}
			h.saveAll()
			for b.Loop() {
				h.known.add(more)
				h.known.setNetns(more.ID, uint64(more.ID))
				h.saveEndpoint(more.ID)
				h.dropEndpoint(more.ID)
				h.known.remove(more)
			}
		})
	}
}
