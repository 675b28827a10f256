package density

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/plot"
)

func TestWriteDensity(t *testing.T) {
	spread := bench.Spread{Median: 50, Min: 40, Max: 70}
	latency := func(modes ...bench.Mode) (out []Latency) {
		for _, mode := range modes {
			for _, clients := range []string{"one", "all"} {
				out = append(out, Latency{Mode: mode, Clients: clients, P50Us: spread, P99Us: spread})
			}
		}
		return out
	}
	var r Result
	for _, n := range []int{1, 1000} {
		r.Containers = append(r.Containers, Step{Containers: n, NamespaceBytes: -1, EndpointBytes: 1e5, InterceptedBytes: 2e4, AgentBytes: 3e4,
			Latency: latency(bench.Modes...), Paced: []Paced{{Callers: 1, Rate: 1000, CPU: 0.1}, {Callers: 40, Rate: 1000, CPU: 0.2}}})
	}
	for _, scope := range bench.Scopes {
		for _, mode := range bench.Modes {
			for _, n := range []int{0, 1000} {
				r.Connections = append(r.Connections, Live{Scope: scope, Mode: mode, Connections: n, KernelBytes: 8000, Latency: latency(mode)})
			}
		}
	}
	var out strings.Builder
	if err := WritePlot(&out, r, plot.Text{Title: "A & B"}); err != nil {
		t.Fatal(err)
	}
	for d := xml.NewDecoder(strings.NewReader(out.String())); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	// Memory without the namespace's, which came out below zero; connects, by containers and by
	// connections of two scopes; the agent; memory of connections.
	if got, want := strings.Count(out.String(), "<circle"), 2*3+2*2*3+2*2*3*2+2*2+2*3; got != want {
		t.Errorf("%d points, want %d", got, want)
	}
	for _, bad := range []string{"NaN", "Inf"} {
		if strings.Contains(out.String(), bad) {
			t.Errorf("the drawing has %s in it", bad)
		}
	}
	if err := WritePlot(io.Discard, Result{}, plot.Text{}); err == nil {
		t.Error("drew nothing")
	}
	// A short run has one step and no connections.
	if err := WritePlot(io.Discard, Result{Containers: r.Containers[:1]}, plot.Text{}); err != nil {
		t.Error(err)
	}
}
