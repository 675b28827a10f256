package pool

import (
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/session"
)

func TestPoolPlace(t *testing.T) {
	p := Place{Lab: session.Lab{Heddle: "heddle", Name: "x"}, Client: "/tmp/c"}
	for mode, want := range map[bench.Mode][]string{
		bench.Pooled: {"--mode", "heddle", "n1/c1", "--", "/tmp/c", "-to", "a"},
		bench.Heddle: {"--mode", "heddle", "n1/c1", "--", "env", "-u", "LD_PRELOAD", "/tmp/c", "-to", "a"},
		bench.Host:   {"--mode", "host", "n1/c1", "--", "/tmp/c", "-to", "a"},
	} {
		got := p.Exec(t.Context(), mode, "n1/c1", "peer", "x", "crr", "-to", "a").Args
		if i := slices.Index(got, "--mode"); i < 0 || !slices.Equal(got[i:], want) {
			t.Errorf("%s: %q, want %q at the end", mode, got, want)
		}
	}
	if got := p.Exec(t.Context(), bench.Pooled, "n1/c1", "peer", "server").Args; !slices.Equal(got[len(got)-2:], []string{"peer", "server"}) {
		t.Errorf("server: %q", got)
	}
}

func TestPoolSection(t *testing.T) {
	r := Result{Machine: "a machine", Background: 0.9}
	add := func(w string, m bench.Mode, metric string, unit bench.Unit, v, ratio float64) {
		r.Results = append(r.Results, bench.Result{Workload: w, Scope: bench.Inter, Mode: m, Metric: metric, Unit: unit, Median: v, Min: v / 2, Max: v * 2, Runs: 1, RatioToHost: ratio})
	}
	for _, m := range []struct {
		mode           bench.Mode
		p50, p99, rate float64
	}{{bench.Host, 1, 1, 1}, {bench.Overlay, 2, 2, 0.5}, {bench.Heddle, 3, 3, 0.4}, {bench.Pooled, 1.3, 1.4, 0.5}} {
		for _, w := range []string{"crr", "crr8"} {
			add(w, m.mode, "socket_p50_us", bench.Microseconds, 2*m.p50, m.p50)
			add(w, m.mode, "socket_connect_p50_us", bench.Microseconds, 40*m.p50, m.p50)
			add(w, m.mode, "socket_connect_p99_us", bench.Microseconds, 100*m.p99, m.p99)
			add(w, m.mode, "connections_per_s", bench.PerSecond, 10000*m.rate, m.rate)
		}
	}
	got := section(r)
	for _, want := range []string{
		"a machine", "busy machine", "2 (p50), 0 (p99) and 2 (connections a second) of 2 cases",
		"| between nodes, 1 caller: `socket()` p50, us | 2.00 (1.00..4.00) | 4.00 (2.00..8.00) | 2.00 | 6.00 (3.00..12.0) | 3.00 | 2.60 (1.30..5.20) | 1.30 |",
		"| between nodes, 8 callers: `socket()` p50, us |", "| connections a second, k | 10.0 (5.00..20.0) |",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("lacks %q:\n%s", want, got)
		}
	}
	if strings.Contains(got, "on one node") {
		t.Errorf("%s", got)
	}
}
