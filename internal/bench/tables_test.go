package bench

import (
	"strings"
	"testing"
)

func TestReplaceTables(t *testing.T) {
	result := func(workload, metric string, unit Unit, m Mode, v, ratio float64) Result {
		return Result{Workload: workload, Scope: Intra, Mode: m, Metric: metric, Unit: unit, Median: v, Min: v / 2, Max: v * 2, Runs: 1, RatioToHost: ratio}
	}
	core := []Result{
		result("rr", "transactions_per_s", PerSecond, Host, 10000, 1), result("rr", "transactions_per_s", PerSecond, Heddle, 11000, 1.1),
		result("iperf3", "throughput_bps", BitsPerSecond, Host, 2e9, 1), result("iperf3", "throughput_bps", BitsPerSecond, Overlay, 1e9, 0.5), result("iperf3", "throughput_bps", BitsPerSecond, Heddle, 4e9, 2),
	}
	callers := []Result{
		result("crr8", "socket_p50_us", Microseconds, Host, 2, 1), result("crr8", "socket_p50_us", Microseconds, Overlay, 2, 1), result("crr8", "socket_p50_us", Microseconds, Heddle, 200, 100),
		result("crr8", "connections_per_s", PerSecond, Host, 20000, 1), result("crr8", "connections_per_s", PerSecond, Overlay, 10000, 0.5), result("crr8", "connections_per_s", PerSecond, Heddle, 15000, 0.75),
	}
	doc := "a\n" + CoreDocBegin + "old\n" + CoreDocEnd + "b\n" + CallersDocBegin + "old\n" + CallersDocEnd + "c\n"
	got, err := ReplaceTables([]byte(doc), core, callers)
	if err != nil {
		t.Fatal(err)
	}
	want := "a\n" + CoreDocBegin + `
| scope | metric | host | overlay | ratio | heddle | ratio |
|---|---|---|---|---|---|---|
| intra | ` + "`throughput_bps`" + `, Gb/s | 2.00 (1.00..4.00) | 1.00 (0.50..2.00) | 0.50 | 4.00 (2.00..8.00) | 2.00 |
| intra | ` + "`transactions_per_s`" + `, k/s | 10.0 (5.00..20.0) | - | - | 11.0 (5.50..22.0) | 1.10 |

` + CoreDocEnd + "b\n" + CallersDocBegin + `
| | host | overlay | ratio | heddle | ratio |
|---|---|---|---|---|---|
| on one node, 8 callers: ` + "`socket()`" + ` p50, us | 2.00 (1.00..4.00) | 2.00 (1.00..4.00) | 1.00 | 200 (100..400) | 100.00 |
| connections a second, k | 20.0 (10.0..40.0) | 10.0 (5.00..20.0) | 0.50 | 15.0 (7.50..30.0) | 0.75 |

` + CallersDocEnd + "c\n"
	if string(got) != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	for _, mark := range []string{CoreDocBegin, CoreDocEnd, CallersDocBegin, CallersDocEnd} {
		if _, err := ReplaceTables([]byte(strings.Replace(doc, mark, "", 1)), core, callers); err == nil {
			t.Errorf("a document without %q is taken", mark)
		}
	}
}
