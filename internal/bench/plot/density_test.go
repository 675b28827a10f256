package plot

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
)

func TestWriteDensity(t *testing.T) {
	spread := bench.Spread{Median: 50, Min: 40, Max: 70}
	latency := func(modes ...bench.Mode) (out []bench.DensityLatency) {
		for _, mode := range modes {
			for _, clients := range []string{"one", "all"} {
				out = append(out, bench.DensityLatency{Mode: mode, Clients: clients, P50Us: spread, P99Us: spread})
			}
		}
		return out
	}
	var r bench.DensityResult
	for _, n := range []int{1, 1000} {
		r.Containers = append(r.Containers, bench.DensityStep{Containers: n, NamespaceBytes: -1, EndpointBytes: 1e5, InterceptedBytes: 2e4, AgentBytes: 3e4,
			Latency: latency(bench.Modes...), Paced: []bench.DensityPaced{{Callers: 1, Rate: 1000, CPU: 0.1}, {Callers: 40, Rate: 1000, CPU: 0.2}}})
	}
	for _, scope := range bench.Scopes {
		for _, mode := range bench.Modes {
			for _, n := range []int{0, 1000} {
				r.Connections = append(r.Connections, bench.DensityLive{Scope: scope, Mode: mode, Connections: n, KernelBytes: 8000, Latency: latency(mode)})
			}
		}
	}
	var out strings.Builder
	if err := WriteDensity(&out, r, Text{Title: "A & B"}); err != nil {
		t.Fatal(err)
	}
	for d := xml.NewDecoder(strings.NewReader(out.String())); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	// Memory without the namespace's, which came out below zero; connects, by containers and by connections of two scopes;
	// the agent; memory of connections.
	if got, want := strings.Count(out.String(), "<circle"), 2*3+2*2*3+2*2*3*2+2*2+2*3; got != want {
		t.Errorf("%d points, want %d", got, want)
	}
	for _, bad := range []string{"NaN", "Inf"} {
		if strings.Contains(out.String(), bad) {
			t.Errorf("the drawing has %s in it", bad)
		}
	}
	if err := WriteDensity(io.Discard, bench.DensityResult{}, Text{}); err == nil {
		t.Error("drew nothing")
	}
	// A short run has one step and no connections.
	if err := WriteDensity(io.Discard, bench.DensityResult{Containers: r.Containers[:1]}, Text{}); err != nil {
		t.Error(err)
	}
}
