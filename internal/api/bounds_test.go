package api

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"heddle.dev/heddle/internal/flow"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
)

// bounds says of each label how many values it can have on a node, whatever containers and peers
// do: a few that the programs know, or one for each thing that the operator has made.
var bounds = map[string]struct {
	most int    // values that the programs know
	each string // or what there is one for
}{
	"reason": {most: 300}, "kind": {most: len(model.Kinds)}, "state": {most: 16}, "outcome": {most: 8}, "cause": {most: 40}, "result": {most: 2},
	"feature": {most: 100}, "event": {most: len(flow.Events)}, "path": {most: 32}, "direction": {most: 4}, "object": {most: len(RDMAObjects)}, "role": {most: 2}, "stack": {most: 8},
	"node": {each: "node"}, "version": {each: "node"}, "endpoint": {each: "endpoint"}, "profile": {each: "profile"},
}

// crowd is a node with endpoints that do all there is to do.
type crowd struct {
	*fakeAgent
	endpoints int
}

func (c crowd) Status(ctx context.Context) (Status, error) {
	st, err := c.fakeAgent.Status(ctx)
	st.Router = &Router{State: RouterRuns}
	for i := range c.endpoints { // what grows with a network, and must not with the metrics
		st.PeersAway = append(st.PeersAway, fmt.Sprint("n", i))
		st.Direct.Overlay = append(st.Direct.Overlay, model.PeerPath{Node: fmt.Sprint("n", i), Underlay: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), State: model.PeerBlocked})
		st.Faults = append(st.Faults, Fault{Reason: FaultStack, Endpoint: fmt.Sprint("c", i), Error: fmt.Sprint("error ", i)})
	}
	return st, err
}

func (c crowd) Traffic(context.Context) (out []model.Traffic, err error) {
	for i := range c.endpoints {
		t := model.Traffic{Name: fmt.Sprint("c", i), Live: make(map[model.Path]uint64)}
		for _, p := range names.Paths {
			t.Live[p] = 1
		}
		out = append(out, t)
	}
	return out, nil
}

func (c crowd) LimitUse(context.Context) (out []model.LimitUse, err error) {
	for i := range c.endpoints {
		out = append(out, model.LimitUse{Endpoint: fmt.Sprint("c", i), Limits: model.Limits{Egress: 1e8, Ingress: 1e8}})
	}
	return out, nil
}

func (c crowd) RDMA(context.Context) (out RDMA, err error) {
	for i := range c.endpoints {
		d := RDMADevice{Endpoint: fmt.Sprint("c", i), Known: true, Traffic: map[RDMAPath]RDMATraffic{RDMAMemory: {}, RDMATCP: {}, RDMACard: {}}}
		out.Devices = append(out.Devices, d)
		for n := range 100 { // as many as a container makes
			out.QueuePairs = append(out.QueuePairs, QueuePair{Endpoint: d.Endpoint, Number: uint32(n), State: []string{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"}[n%7]})
		}
	}
	return out, nil
}

// TestLabelsAreBounded: no label of a metric has values that containers or peers choose, and a node
// with more endpoints has so many series more for each, and no others.
func TestLabelsAreBounded(t *testing.T) {
	type count struct{ all, perEndpoint int }
	counts := make(map[int]count)
	for _, n := range []int{1, 201} {
		registry := prometheus.NewRegistry()
		registry.MustRegister(NewCollector(crowd{newFakeAgent(), n}))
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		values := make(map[string][]string)
		var c count
		for _, f := range families {
			for _, m := range f.GetMetric() {
				c.all++
				if slices.ContainsFunc(m.GetLabel(), func(l *dto.LabelPair) bool { return l.GetName() == "endpoint" }) {
					c.perEndpoint++
				}
				for _, l := range m.GetLabel() {
					key := f.GetName() + " " + l.GetName()
					if !slices.Contains(values[key], l.GetValue()) {
						values[key] = append(values[key], l.GetValue())
					}
					b, known := bounds[l.GetName()]
					if !known {
						t.Fatalf("%s: nothing bounds the label %s", f.GetName(), l.GetName())
					}
					if most := map[string]int{"": b.most, "node": 1, "profile": 4, "endpoint": n + 4}[b.each]; len(values[key]) > most {
						t.Errorf("%s: the label %s has %d values, more than %d: %.5q", f.GetName(), l.GetName(), len(values[key]), most, values[key])
					}
				}
			}
		}
		counts[n] = c
	}
	few, many := counts[1], counts[201]
	if few.all-few.perEndpoint != many.all-many.perEndpoint {
		t.Errorf("%d series of the node with 1 endpoint, %d with 201", few.all-few.perEndpoint, many.all-many.perEndpoint)
	}
	each := (many.perEndpoint - few.perEndpoint) / 200
	if most := 80; each == 0 || each > most {
		t.Errorf("%d series for each endpoint, want at most %d", each, most)
	}
	t.Logf("%d series of the node, %d for each endpoint", few.all-few.perEndpoint, each)
}
