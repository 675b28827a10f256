package paper

import (
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
)

// TestWritePaperDoc checks rows, the rounds' spread of ratios, and both verdicts.
func TestWritePaperDoc(t *testing.T) {
	value := func(v ...float64) Value { return Value{Median: bench.Median(v), Values: v} }
	mode := func(m bench.Mode, rate, cost Value) Mode {
		return Mode{Mode: m, Metrics: map[string]Value{MetricRate: rate, MetricCPUPerOp: cost}}
	}
	paper := Result{Apps: []Entry{
		{Name: "memcached", Rounds: 3, DurationS: 2, Machine: "here", Modes: []Mode{
			mode(bench.Host, value(100, 100, 100), value(10, 10, 10)), mode(bench.Overlay, value(60, 50, 40), value(20, 20, 20)),
			mode(bench.Heddle, value(90, 100, 120), value(11, 12, 10)),
		}},
		{Name: "kafka", Skipped: "no jars"},
	}}
	core := []bench.Result{{Workload: "crr", Scope: bench.Inter, Mode: bench.Host, Metric: "socket_connect_p50_us", Median: 50},
		{Workload: "crr", Scope: bench.Inter, Mode: bench.Overlay, Metric: "socket_connect_p50_us", Median: 80},
		{Workload: "crr", Scope: bench.Inter, Mode: bench.Heddle, Metric: "socket_connect_p50_us", Median: 60}}
	text, err := section(paper, core)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| 8a | memcached, operations/s | 1.66 | 2.00 (1.50..3.00) | 0.98 | 1.00 (0.90..1.20) |",
		"| 6.1 | creation of a connection (`crr`) | 2.06 | 0.75 | 9.6 | 1.20 |",
		"| 12b | Kafka, CPU (paper: the server's) | 0.89 | not measured |",
		"| memcached: operations/s | at least 0.98 of host | 1.00 (0.90..1.20) | met |",
		"| memcached: CPU an operation | at most 1.03 of host | 1.10 (1.00..1.20) | **missed** |",
		"| memcached: operations/s | at least 1.50 of overlay | 2.00 (1.50..3.00) | met |",
		"3 of 4 goals met", "`kafka` (not measured: no jars)",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	paper.Apps[0].Background = 2
	if text, err := section(paper, core); err != nil || !strings.Contains(text, "not judged: busy") || !strings.Contains(text, "1 of 1 goals met") {
		t.Errorf("results of a busy machine: %v\n%s", err, text)
	}
	if _, err := section(Result{}, nil); err == nil {
		t.Error("a document of nothing")
	}
}

func TestHighestKept(t *testing.T) {
	entry := func(rate, unkept float64) Entry {
		return Entry{Rate: rate, Modes: []Mode{{Mode: bench.Overlay, Metrics: map[string]Value{MetricUnkept: {Median: unkept}}}}}
	}
	if e, ok := HighestKept([]Entry{entry(1, 0), entry(2, 0.02), entry(4, 0.3), entry(0, 0)}, bench.Overlay); !ok || e.Rate != 2 {
		t.Errorf("got %v, %v: want the rate 2", e.Rate, ok)
	}
	if _, ok := HighestKept(nil, bench.Overlay); ok {
		t.Error("the highest of none")
	}
}
