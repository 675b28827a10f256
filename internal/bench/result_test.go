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
	cell := Cell{WorkloadNamed("memory"), Inter, Host}
	for _, sample := range []Sample{{}, {"connection_bytes": math.NaN()}, {"connection_bytes": math.Inf(1)}, {"connection_bytes": -1}} {
		if err := NewSeries().Add(cell, sample); err == nil {
			t.Errorf("add(%v): no error", sample)
		}
	}
}

func TestNoRatioToZero(t *testing.T) {
	o := Options{Workloads: []Workload{WorkloadNamed("memory")}, Scopes: Scopes[:1], Modes: Modes[:1]}
	s := NewSeries()
	if err := s.Add(o.Schedule(0)[0], Sample{"connection_bytes": 0}); err != nil {
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
