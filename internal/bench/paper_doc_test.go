package bench

import (
	"strings"
	"testing"
)

func TestReplacePaperDoc(t *testing.T) {
	got, err := ReplacePaperDoc([]byte("a\n"+PaperDocBegin+"old\n"+PaperDocEnd+"b\n"), []byte("new\n"))
	if want := "a\n" + PaperDocBegin + "new\n" + PaperDocEnd + "b\n"; err != nil || string(got) != want {
		t.Errorf("got %q, %v", got, err)
	}
	for _, bad := range []string{"", PaperDocBegin, PaperDocEnd + PaperDocBegin} {
		if _, err := ReplacePaperDoc([]byte(bad), nil); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}

// TestWritePaperDoc checks rows, the rounds' spread of ratios, and both verdicts.
func TestWritePaperDoc(t *testing.T) {
	value := func(v ...float64) PaperValue { return PaperValue{Median: median(v), Values: v} }
	mode := func(m Mode, rate, cost PaperValue) PaperMode {
		return PaperMode{Mode: m, Metrics: map[string]PaperValue{MetricRate: rate, MetricCPUPerOp: cost}}
	}
	paper := PaperResult{Apps: []PaperEntry{
		{Name: "memcached", Rounds: 3, DurationS: 2, Machine: "here", Modes: []PaperMode{
			mode(Host, value(100, 100, 100), value(10, 10, 10)), mode(Overlay, value(60, 50, 40), value(20, 20, 20)),
			mode(Heddle, value(90, 100, 120), value(11, 12, 10)),
		}},
		{Name: "kafka", Skipped: "no jars"},
	}}
	core := []Result{{Workload: "crr", Scope: Inter, Mode: Host, Metric: "socket_connect_p50_us", Median: 50},
		{Workload: "crr", Scope: Inter, Mode: Overlay, Metric: "socket_connect_p50_us", Median: 80},
		{Workload: "crr", Scope: Inter, Mode: Heddle, Metric: "socket_connect_p50_us", Median: 60}}
	var b strings.Builder
	if err := WritePaperDoc(&b, paper, core); err != nil {
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
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, &b)
		}
	}
	b.Reset()
	paper.Apps[0].Background = 2
	if err := WritePaperDoc(&b, paper, core); err != nil || !strings.Contains(b.String(), "not judged: busy") || !strings.Contains(b.String(), "1 of 1 goals met") {
		t.Errorf("results of a busy machine: %v\n%s", err, &b)
	}
	if err := WritePaperDoc(&b, PaperResult{}, nil); err == nil {
		t.Error("a document of nothing")
	}
}

func TestHighestKept(t *testing.T) {
	entry := func(rate, unkept float64) PaperEntry {
		return PaperEntry{Rate: rate, Modes: []PaperMode{{Mode: Overlay, Metrics: map[string]PaperValue{MetricUnkept: {Median: unkept}}}}}
	}
	if e, ok := HighestKept([]PaperEntry{entry(1, 0), entry(2, 0.02), entry(4, 0.3), entry(0, 0)}, Overlay); !ok || e.Rate != 2 {
		t.Errorf("got %v, %v: want the rate 2", e.Rate, ok)
	}
	if _, ok := HighestKept(nil, Overlay); ok {
		t.Error("the highest of none")
	}
}
