package local

import (
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/benchtest"
)

// TestLocalModes runs a stream and round trips on loopback in the modes that compare on one node.
func TestLocalModes(t *testing.T) {
	o := benchtest.QuickOptions(t, "stream-1k", "rr")
	o.Scopes, o.Modes = []bench.Scope{bench.Intra}, []bench.Mode{bench.Host, bench.Unix}
	place := benchtest.LoopPlace{Prefix: func(mode bench.Mode, _ string) []string {
		if mode != bench.Host {
			t.Errorf("asked to run in mode %s", mode)
		}
		return nil
	}}
	results, err := bench.Run(t.Context(), place, o)
	if err != nil {
		t.Fatal(err)
	}
	benchtest.CheckResults(t, o, results)
	if slices.ContainsFunc(bench.Modes, func(m bench.Mode) bool { return m.Place() != m || m.Flags() != nil }) {
		t.Error("a mode of labs is run as another")
	}
}

func TestLocalModesRefused(t *testing.T) {
	o := benchtest.QuickOptions(t, "rr")
	o.Modes = []bench.Mode{bench.Host, bench.Reno}
	if err := o.Validate(); err == nil || !strings.Contains(err.Error(), "--scopes intra") {
		t.Errorf("between nodes: %v", err)
	}
	o = benchtest.QuickOptions(t, "rr", "crr")
	o.Scopes, o.Modes = []bench.Scope{bench.Intra}, []bench.Mode{bench.Host, bench.Unix}
	if err := o.Validate(); err == nil || !strings.Contains(err.Error(), "crr") {
		t.Errorf("a workload without: %v", err)
	}
	for _, name := range Workloads {
		if !bench.WorkloadNamed(name).Instead {
			t.Errorf("%s cannot be measured in every mode", name)
		}
	}
}

// result has a metric that is better, one that is worse and one that is neither.
func result() Result {
	one := func(mode bench.Mode, metric string, unit bench.Unit, low, middle, high, ratio float64) bench.Result {
		return bench.Result{Workload: "stream", Scope: bench.Intra, Mode: mode, Metric: metric, Unit: unit, Median: middle, Min: low, Max: high, Runs: 3, RatioToHost: ratio, Values: []float64{low, middle, high}}
	}
	trip := func(mode bench.Mode, low, middle, high, ratio float64) bench.Result {
		r := one(mode, "rtt_p50_us", bench.Microseconds, low, middle, high, ratio)
		r.Workload = "rr"
		return r
	}
	return Result{
		Machine: "here", Congestion: "bbr", Runs: 3, DurationS: 1,
		Results: []bench.Result{
			one(bench.Host, "throughput_bps", bench.BitsPerSecond, 9e9, 10e9, 11e9, 1), one(bench.Host, "cpu_s_per_gb", bench.SecondsPerGB, 1, 1.2, 1.3, 1),
			one(bench.Heddle, "throughput_bps", bench.BitsPerSecond, 12e9, 30e9, 40e9, 3), one(bench.Heddle, "cpu_s_per_gb", bench.SecondsPerGB, 1.4, 1.5, 1.6, 1.25),
			trip(bench.Host, 50, 60, 70, 1), trip(bench.Heddle, 49, 60, 70, 1),
		},
	}
}

func TestWriteLocalDoc(t *testing.T) {
	r := result()
	doc, err := section(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"here. 3 runs of 1 s", "The node gives its sockets bbr.", "| | host | heddle | Heddle to host |\n",
		"| throughput, 64 KB, Gb/s | 10.0 (9.00..11.0) | 30.0 (12.0..40.0) 3.00x | 3.00 (1.33..3.64), better in 3 of 3 |\n",
		"| CPU per GB, 64 KB, s/GB | 1.20 (1.00..1.30) | 1.50 (1.40..1.60) 1.25x | 1.25 (1.23..1.40), better in 0 of 3 |\n",
		"| round trip p50, us | 60.0 (50.0..70.0) | 60.0 (49.0..70.0) 1.00x | 1.00 (0.98..1.00), better in 1 of 3 |\n",
	} {
		if !strings.Contains(doc, want) {
			t.Errorf("no %q in\n%s", want, doc)
		}
	}
	r.Background = 1.5
	if doc, err := section(r); err != nil || !strings.Contains(doc, "not to be judged by") {
		t.Errorf("results of a busy machine: %v\n%s", err, doc)
	}
	if _, err := section(Result{}); err == nil {
		t.Error("a document of nothing")
	}
}
