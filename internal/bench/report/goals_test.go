package report

import (
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
)

func TestJudgeConnects(t *testing.T) {
	// One caller's, then eight's: p50 and p99 in us, connections a second.
	modes := map[bench.Mode][2][3]float64{
		bench.Host:    {{20, 100, 9000}, {20, 100, 9000}},
		bench.Overlay: {{30, 100, 6000}, {30, 100, 6000}},
		bench.Floor:   {{25, 120, 7000}, {400, 120, 5000}},
		bench.Heddle:  {{27, 150, 6000}, {800, 160, 4000}},
	}
	var results []bench.Result
	for i, w := range ConnectWorkloads[:2] {
		for m, of := range modes {
			for j, metric := range []string{"socket_connect_p50_us", "socket_connect_p99_us", "connections_per_s"} {
				results = append(results, bench.Result{Workload: w, Scope: bench.Intra, Mode: m, Metric: metric, Median: of[i][j]})
			}
		}
	}
	want := []Outcome{Reached, Reached, Reached, Beyond, Missed, Beyond}
	verdicts := JudgeConnects(results, bench.Heddle, WithoutPool)
	if len(verdicts) != len(want) {
		t.Fatalf("%+v", verdicts)
	}
	for i, v := range verdicts {
		if v.Result != want[i] {
			t.Errorf("%+v, want %s", v, want[i])
		}
	}
	const said = "p50 at most 1.35 of host: reached in 1 of 2 cases, beyond the floor of this run in 1; " +
		"p99 at most 1.50 of host: reached in 1 of 2 cases, missed in 1; " +
		"connections a second at least the overlay's: reached in 1 of 2 cases, beyond the floor of this run in 1"
	if got := SummarizeConnects(verdicts); got != said {
		t.Errorf("got %q", got)
	}
	var b strings.Builder
	ConnectGoalsGrid(bench.Heddle, verdicts).Markdown(&b)
	if row := "| on one node, 8 callers | p99 at most 1.50 of host | 1.60 | 1.20 | missed |\n"; !strings.Contains(b.String(), row) {
		t.Errorf("no %q in\n%s", row, b.String())
	}
	for _, v := range JudgeConnects(results, bench.Heddle, WithPool) {
		if v.Case == "on one node, 1 caller" && (v.Result == Reached) != (v.Goal == "connections a second at least the overlay's") {
			t.Errorf("with a pool: %+v", v)
		}
	}
}
