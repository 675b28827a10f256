package bench

import (
	"bytes"
	"slices"
	"strings"
	"testing"
)

// TestLocalModes runs a stream and round trips on loopback in the modes that compare on one node.
func TestLocalModes(t *testing.T) {
	o := quickOptions(t, "stream-1k", "rr")
	o.Scopes, o.Modes = []Scope{Intra}, []Mode{Host, Unix}
	place := loopPlace{prefix: func(mode Mode, _ string) []string {
		if mode != Host {
			t.Errorf("asked to run in mode %s", mode)
		}
		return nil
	}}
	results, err := Run(t.Context(), place, o)
	if err != nil {
		t.Fatal(err)
	}
	checkResults(t, o, results)
	if slices.ContainsFunc(Modes, func(m Mode) bool { return m.place() != m || m.flags() != nil }) {
		t.Error("a mode of labs is run as another")
	}
}

func TestLocalModesRefused(t *testing.T) {
	o := quickOptions(t, "rr")
	o.Modes = []Mode{Host, Reno}
	if err := o.Validate(); err == nil || !strings.Contains(err.Error(), "--scopes intra") {
		t.Errorf("between nodes: %v", err)
	}
	o = quickOptions(t, "rr", "crr")
	o.Scopes, o.Modes = []Scope{Intra}, []Mode{Host, Unix}
	if err := o.Validate(); err == nil || !strings.Contains(err.Error(), "crr") {
		t.Errorf("a workload without: %v", err)
	}
	for _, name := range LocalWorkloads {
		if !workloadNamed(name).instead {
			t.Errorf("%s cannot be measured in every mode", name)
		}
	}
}

// localResult has a metric that is better, one that is worse and one that is neither.
func localResult() LocalResult {
	one := func(mode Mode, metric string, unit Unit, low, middle, high, ratio float64) Result {
		return Result{Workload: "stream", Scope: Intra, Mode: mode, Metric: metric, Unit: unit, Median: middle, Min: low, Max: high, Runs: 3, RatioToHost: ratio, Values: []float64{low, middle, high}}
	}
	trip := func(mode Mode, low, middle, high, ratio float64) Result {
		r := one(mode, "rtt_p50_us", Microseconds, low, middle, high, ratio)
		r.Workload = "rr"
		return r
	}
	return LocalResult{
		Machine: "here", Congestion: "bbr", Runs: 3, DurationS: 1,
		Results: []Result{
			one(Host, "throughput_bps", BitsPerSecond, 9e9, 10e9, 11e9, 1), one(Host, "cpu_s_per_gb", SecondsPerGB, 1, 1.2, 1.3, 1),
			one(Heddle, "throughput_bps", BitsPerSecond, 12e9, 30e9, 40e9, 3), one(Heddle, "cpu_s_per_gb", SecondsPerGB, 1.4, 1.5, 1.6, 1.25),
			trip(Host, 50, 60, 70, 1), trip(Heddle, 49, 60, 70, 1),
		},
	}
}

func TestWriteLocalDoc(t *testing.T) {
	var file, doc bytes.Buffer
	if err := WriteLocal(&file, localResult()); err != nil {
		t.Fatal(err)
	}
	r, err := ReadLocal(&file)
	if err != nil {
		t.Fatal(err)
	}
	if err := WriteLocalDoc(&doc, r); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"here. 3 runs of 1 s", "The node gives its sockets bbr.", "| | host | heddle | Heddle to host |\n",
		"| throughput, 64 KB, Gb/s | 10.0 (9.00..11.0) | 30.0 (12.0..40.0) 3.00x | 3.00 (1.33..3.64), better in 3 of 3 |\n",
		"| CPU per GB, 64 KB, s/GB | 1.20 (1.00..1.30) | 1.50 (1.40..1.60) 1.25x | 1.25 (1.23..1.40), better in 0 of 3 |\n",
		"| round trip p50, us | 60.0 (50.0..70.0) | 60.0 (49.0..70.0) 1.00x | 1.00 (0.98..1.00), better in 1 of 3 |\n",
	} {
		if !strings.Contains(doc.String(), want) {
			t.Errorf("no %q in\n%s", want, &doc)
		}
	}
	doc.Reset()
	r.Background = 1.5
	if err := WriteLocalDoc(&doc, r); err != nil || !strings.Contains(doc.String(), "not to be judged by") {
		t.Errorf("results of a busy machine: %v\n%s", err, &doc)
	}
	if err := WriteLocalDoc(&doc, LocalResult{}); err == nil {
		t.Error("a document of nothing")
	}
	if _, err := ReadLocal(strings.NewReader("{")); err == nil {
		t.Error("half a file was read")
	}
}
