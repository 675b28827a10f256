package core

import (
	"io"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/benchtest"
	"heddle.dev/heddle/internal/bench/report"
)

func TestReplaceTables(t *testing.T) {
	result := func(workload, metric string, unit bench.Unit, m bench.Mode, v, ratio float64) bench.Result {
		return bench.Result{Workload: workload, Scope: bench.Intra, Mode: m, Metric: metric, Unit: unit, Median: v, Min: v / 2, Max: v * 2, Runs: 1, RatioToHost: ratio}
	}
	core := []bench.Result{
		result("rr", "transactions_per_s", bench.PerSecond, bench.Host, 10000, 1), result("rr", "transactions_per_s", bench.PerSecond, bench.Heddle, 11000, 1.1),
		result("iperf3", "throughput_bps", bench.BitsPerSecond, bench.Host, 2e9, 1), result("iperf3", "throughput_bps", bench.BitsPerSecond, bench.Overlay, 1e9, 0.5), result("iperf3", "throughput_bps", bench.BitsPerSecond, bench.Heddle, 4e9, 2),
	}
	callers := []bench.Result{
		result("crr8", "socket_p50_us", bench.Microseconds, bench.Host, 2, 1), result("crr8", "socket_p50_us", bench.Microseconds, bench.Overlay, 2, 1), result("crr8", "socket_p50_us", bench.Microseconds, bench.Heddle, 200, 100),
		result("crr8", "connections_per_s", bench.PerSecond, bench.Host, 20000, 1), result("crr8", "connections_per_s", bench.PerSecond, bench.Overlay, 10000, 0.5), result("crr8", "connections_per_s", bench.PerSecond, bench.Heddle, 15000, 0.75),
	}
	coreMark, callersMark := report.Mark("bench report", "core"), report.Mark("bench report", "callers")
	const coreEnd, callersEnd = "<!-- to here: core -->\n", "<!-- to here: callers -->\n"
	doc := "a\n" + coreMark + "old\n" + coreEnd + "b\n" + callersMark + "old\n" + callersEnd + "c\n"
	folder := t.TempDir()
	for name, results := range map[string][]bench.Result{"core.json": core, "callers.json": callers} {
		if err := report.WriteFile(filepath.Join(folder, name), func(w io.Writer) error { return bench.WriteJSON(w, results) }); err != nil {
			t.Fatal(err)
		}
	}
	got, err := benchtest.Report(t, Command().WriteReport, folder, doc)
	if err != nil {
		t.Fatal(err)
	}
	want := "a\n" + coreMark + `
| scope | metric | host | overlay | ratio | heddle | ratio |
|---|---|---|---|---|---|---|
| intra | ` + "`throughput_bps`" + `, Gb/s | 2.00 (1.00..4.00) | 1.00 (0.50..2.00) | 0.50 | 4.00 (2.00..8.00) | 2.00 |
| intra | ` + "`transactions_per_s`" + `, k/s | 10.0 (5.00..20.0) | - | - | 11.0 (5.50..22.0) | 1.10 |

` + coreEnd + "b\n" + callersMark + `
| | host | overlay | ratio | heddle | ratio |
|---|---|---|---|---|---|
| on one node, 8 callers: ` + "`socket()`" + ` p50, us | 2.00 (1.00..4.00) | 2.00 (1.00..4.00) | 1.00 | 200 (100..400) | 100.00 |
| connections a second, k | 20.0 (10.0..40.0) | 10.0 (5.00..20.0) | 0.50 | 15.0 (7.50..30.0) | 0.75 |

` + callersEnd + "c\n"
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	for _, mark := range []string{coreMark, coreEnd, callersMark, callersEnd} {
		if _, err := benchtest.Report(t, Command().WriteReport, folder, strings.Replace(doc, mark, "", 1)); err == nil {
			t.Errorf("a document without %q is taken", mark)
		}
	}
}

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
