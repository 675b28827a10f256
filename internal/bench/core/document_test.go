package core

import (
	"reflect"
	"testing"

	"heddle.dev/heddle/internal/bench"
)

func TestCompare(t *testing.T) {
	result := func(m bench.Mode, median, ratio float64) bench.Result {
		return bench.Result{Workload: "rr", Scope: bench.Inter, Mode: m, Metric: "rtt_p50_us", Median: median, Min: median / 2, Max: 2 * median, RatioToHost: ratio}
	}
	earlier := []bench.Result{result(bench.Host, 50, 1), result(bench.Heddle, 50, 1)}
	now := []bench.Result{result(bench.Host, 100, 1), result(bench.Overlay, 200, 2), result(bench.Heddle, 110, 1.1), {Workload: "crr", Mode: bench.Heddle, RatioToHost: 1}}
	want := [][]string{{"", "earlier", "now", "change"}, {"rr inter rtt_p50_us", "1.00 (0.50..2.00)", "1.10 (0.55..2.20)", "+10 %"}}
	if got := compare(earlier, now).Rows; !reflect.DeepEqual(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
