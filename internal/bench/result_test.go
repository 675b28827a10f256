package bench

import (
	"math"
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
		if got := Median(tt.values); got != tt.want || !slices.Equal(before, tt.values) {
			t.Errorf("median(%v) = %v (values now %v), want %v", before, got, tt.values, tt.want)
		}
	}
}

func TestSeriesRefusesWhatIsNoNumber(t *testing.T) {
	cell := Cell{WorkloadNamed("rr"), Inter, Host}
	for _, bad := range []float64{math.NaN(), math.Inf(1), -1} {
		sample := every(cell, 1)
		sample["rtt_p50_us"] = bad
		if err := NewSeries().Add(cell, sample); err == nil {
			t.Errorf("add(%v): no error", sample)
		}
	}
	if err := NewSeries().Add(cell, Sample{}); err == nil {
		t.Error("add nothing: no error")
	}
}

// every gives each metric of a cell one value.
func every(cell Cell, value float64) Sample {
	sample := Sample{}
	for _, m := range cell.Workload.Metrics {
		sample[m.Name] = value
	}
	return sample
}

func TestNoRatioToZero(t *testing.T) {
	o := Options{Workloads: []Workload{WorkloadNamed("rr")}, Scopes: Scopes[:1], Modes: Modes[:1]}
	s := NewSeries()
	if err := s.Add(o.Schedule(0)[0], every(o.Schedule(0)[0], 0)); err != nil {
		t.Fatal(err)
	}
	if r, err := s.Results(o); err == nil || !strings.Contains(err.Error(), "longer --duration") {
		t.Errorf("got %v, %v", r, err)
	}
}

func TestTargetsNameMetrics(t *testing.T) {
	for _, target := range Targets {
		if _, ok := MetricNamed(target.Workload, target.Metric); !ok {
			t.Errorf("target %+v names no metric", target)
		}
	}
}
