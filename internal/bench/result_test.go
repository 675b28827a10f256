package bench

import (
	"bytes"
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestMedian(t *testing.T) {
	for _, tt := range []struct {
		values []float64
		want   float64
	}{
		{[]float64{4}, 4},
		{[]float64{9, 1, 5}, 5},
		{[]float64{4, 1, 2, 100}, 3},
	} {
		before := slices.Clone(tt.values)
		if got := median(tt.values); got != tt.want || !slices.Equal(before, tt.values) {
			t.Errorf("median(%v) = %v (values now %v), want %v", before, got, tt.values, tt.want)
		}
	}
}

// sampleResults makes results of three runs: overlay is twice as slow as host, heddle 4 % faster.
func sampleResults(t testing.TB, workloads ...string) []Result {
	t.Helper()
	w, err := ParseWorkloads(workloads)
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Workloads: w, Scopes: Scopes, Modes: Modes}
	factor := map[Mode]float64{Host: 1, Overlay: 2, Heddle: 0.96}
	base := map[Unit]float64{BitsPerSecond: 33e9, SecondsPerGB: 0.3, Microseconds: 60, PerSecond: 15000, Bytes: 9000}
	s := newSeries()
	for _, spread := range []float64{1, 0.9, 1.2} {
		for _, cell := range o.schedule(0) {
			sample := Sample{}
			for _, m := range cell.Workload.Metrics {
				v := base[m.Unit] * spread * factor[cell.Mode]
				if m.Higher {
					v = base[m.Unit] * spread / factor[cell.Mode]
				}
				sample[m.Name] = v
			}
			if err := s.add(cell, sample); err != nil {
				t.Fatal(err)
			}
		}
	}
	results, err := s.results(o)
	if err != nil {
		t.Fatal(err)
	}
	return results
}

func TestResultsAggregate(t *testing.T) {
	results := sampleResults(t, "rr")
	i := slices.IndexFunc(results, func(r Result) bool { return r.Mode == Overlay && r.Metric == "rtt_p50_us" && r.Scope == Intra })
	want := Result{"rr", Intra, Overlay, "rtt_p50_us", Microseconds, 120, 108, 144, 3, 2, []float64{120, 108, 144}}
	if i < 0 || !reflect.DeepEqual(results[i], want) {
		t.Errorf("got %+v, want %+v", results[max(i, 0)], want)
	}
}

func TestSeriesRefusesWhatIsNoNumber(t *testing.T) {
	cell := Cell{workloadNamed("memory"), Inter, Host}
	for _, sample := range []Sample{{}, {"connection_bytes": math.NaN()}, {"connection_bytes": math.Inf(1)}, {"connection_bytes": -1}} {
		if err := newSeries().add(cell, sample); err == nil {
			t.Errorf("add(%v): no error", sample)
		}
	}
}

func TestNoRatioToZero(t *testing.T) {
	o := Options{Workloads: []Workload{workloadNamed("memory")}, Scopes: Scopes[:1], Modes: Modes[:1]}
	s := newSeries()
	if err := s.add(o.schedule(0)[0], Sample{"connection_bytes": 0}); err != nil {
		t.Fatal(err)
	}
	if r, err := s.results(o); err == nil || !strings.Contains(err.Error(), "longer --duration") {
		t.Errorf("got %v, %v", r, err)
	}
}

// TestJSONShape ties the record's fields to what other programs read.
func TestJSONShape(t *testing.T) {
	var b bytes.Buffer
	if err := WriteJSON(&b, sampleResults(t)); err != nil {
		t.Fatal(err)
	}
	var list []map[string]any
	if err := json.Unmarshal(b.Bytes(), &list); err != nil {
		t.Fatal(err)
	}
	want := []string{"max", "median", "metric", "min", "mode", "ratio_to_host", "runs", "scope", "unit", "values", "workload"}
	if len(list) != (2+4+5)*2*3 {
		t.Errorf("%d entries, want 66", len(list))
	}
	for _, entry := range list {
		var fields []string
		for name, value := range entry {
			fields = append(fields, name)
			if value == nil {
				t.Errorf("%s is null in %v", name, entry)
			}
		}
		slices.Sort(fields)
		if !slices.Equal(fields, want) {
			t.Fatalf("fields %v, want %v", fields, want)
		}
	}
}

func TestJudge(t *testing.T) {
	verdicts := Judge(sampleResults(t))
	if len(verdicts) != 8 {
		t.Fatalf("%d verdicts, want 4 targets in 2 scopes: %v", len(verdicts), verdicts)
	}
	for _, v := range verdicts {
		if !v.Met {
			t.Errorf("missed: %s", v)
		}
	}
	slow := sampleResults(t)
	for i, r := range slow {
		if r.Mode == Heddle {
			slow[i].RatioToHost, slow[i].Median = 1.2, r.Median*10
			if m, _ := MetricNamed(r.Workload, r.Metric); m.Higher {
				slow[i].RatioToHost = 0.9
			}
		}
	}
	for _, v := range Judge(slow) {
		if v.Met {
			t.Errorf("met though slow: %s", v)
		}
	}
	if v := Judge(sampleResults(t, "memory")); len(v) != 0 {
		t.Errorf("verdicts without targets: %v", v)
	}
}

func TestTargetsNameMetrics(t *testing.T) {
	for _, target := range Targets {
		if _, ok := MetricNamed(target.Workload, target.Metric); !ok {
			t.Errorf("target %+v names no metric", target)
		}
	}
}

func TestWriteTable(t *testing.T) {
	var b bytes.Buffer
	if err := WriteTable(&b, sampleResults(t, "iperf3")); err != nil {
		t.Fatal(err)
	}
	want := strings.Join([]string{
		"throughput of one TCP stream (iperf3), between nodes (n1/c1 to n2/c1), median of 3 (min..max), ratio to host",
		"                       host                 overlay                   heddle",
		"  throughput, Gb/s ↑   33.0 (29.7..39.6)    16.5 (14.8..19.8) 0.50x   34.4 (30.9..41.2) 1.04x",
		"  CPU per GB, s/GB ↓   0.30 (0.27..0.36)    0.60 (0.54..0.72) 2.00x   0.29 (0.26..0.35) 0.96x",
	}, "\n")
	if !strings.HasPrefix(b.String(), want) {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
	if !strings.Contains(b.String(), "met     throughput on one node: 1.04 (wanted at least 0.97 of host)") {
		t.Errorf("no verdicts in\n%s", b.String())
	}
}

func TestWriteMarkdown(t *testing.T) {
	var b bytes.Buffer
	if err := WriteMarkdown(&b, sampleResults(t, "crr")); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| | host | overlay | heddle |\n|---|---:|---:|---:|\n",
		"| socket+connect p50, us ↓ | 60.0 (54.0..72.0) | 120 (108..144) **2.00x** | 57.6 (51.8..69.1) **0.96x** |\n",
		"- met     socket+connect p50 between nodes: 0.48 (wanted better than 1.00 of overlay)\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}
