package bench_test

import (
	"reflect"
	"slices"
	"testing"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/benchtest"
)

func TestResultsAggregate(t *testing.T) {
	results := benchtest.SampleResults(t, "rr")
	i := slices.IndexFunc(results, func(r bench.Result) bool {
		return r.Mode == bench.Overlay && r.Metric == "rtt_p50_us" && r.Scope == bench.Intra
	})
	want := bench.Result{"rr", bench.Intra, bench.Overlay, "rtt_p50_us", bench.Microseconds, 120, 108, 144, 3, 2, []float64{120, 108, 144}}
	if i < 0 || !reflect.DeepEqual(results[i], want) {
		t.Errorf("got %+v, want %+v", results[max(i, 0)], want)
	}
}

func TestJudge(t *testing.T) {
	verdicts := bench.Judge(benchtest.SampleResults(t))
	if len(verdicts) != 8 {
		t.Fatalf("%d verdicts, want 4 targets in 2 scopes: %v", len(verdicts), verdicts)
	}
	for _, v := range verdicts {
		if !v.Met {
			t.Errorf("missed: %s", v)
		}
	}
	slow := benchtest.SampleResults(t)
	for i, r := range slow {
		if r.Mode == bench.Heddle {
			slow[i].RatioToHost, slow[i].Median = 1.2, r.Median*10
			if m, _ := bench.MetricNamed(r.Workload, r.Metric); m.Higher {
				slow[i].RatioToHost = 0.9
			}
		}
	}
	for _, v := range bench.Judge(slow) {
		if v.Met {
			t.Errorf("met though slow: %s", v)
		}
	}
	if v := bench.Judge(benchtest.SampleResults(t, "crr64")); len(v) != 0 {
		t.Errorf("verdicts without targets: %v", v)
	}
}
