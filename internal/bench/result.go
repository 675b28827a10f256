package bench

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// Result is one metric of one workload, scope and mode over all runs. Its JSON form is the
// project's record of a benchmark; other programs read it.
type Result struct {
	Workload    string  `json:"workload"`
	Scope       Scope   `json:"scope"`
	Mode        Mode    `json:"mode"`
	Metric      string  `json:"metric"`
	Unit        Unit    `json:"unit"`
	Median      float64 `json:"median"`
	Min         float64 `json:"min"`
	Max         float64 `json:"max"`
	Runs        int     `json:"runs"`
	RatioToHost float64 `json:"ratio_to_host"` // of the medians; 1 for host itself
	// Values are those of the runs, in their order: modes of one run were measured next to each
	// other. Older files have none.
	Values []float64 `json:"values,omitempty"`
}

// key names a series of values.
type key struct {
	workload string
	scope    Scope
	mode     Mode
	metric   string
}

// ErrNoValue is a measurement that gave none. The growth of the kernel's memory is less than
// nothing when other programs free more.
var ErrNoValue = errors.New("no usable value")

// Series collects the values of every metric, run by run. It is not safe for concurrent use.
type Series struct{ values map[key][]float64 }

func NewSeries() *Series { return &Series{values: make(map[key][]float64)} }

// Add takes one run's sample; it must have a finite value, not negative, for each metric of the
// cell.
func (s *Series) Add(c Cell, sample Sample) error {
	for _, m := range c.Workload.Metrics {
		v, ok := sample[m.Name]
		if !ok || math.IsNaN(v) || math.IsInf(v, 0) || v < 0 {
			return fmt.Errorf("metric %s: %w (%v)", m.Name, ErrNoValue, v)
		}
		k := key{c.Workload.Name, c.Scope, c.Mode, m.Name}
		s.values[k] = append(s.values[k], v)
	}
	return nil
}

// Results aggregates the series in the order of reports: workload, scope, mode, metric.
func (s *Series) Results(o Options) ([]Result, error) {
	var results []Result
	for _, w := range o.Workloads {
		for _, scope := range o.Scopes {
			for _, mode := range o.modesIn(w, scope) {
				for _, m := range w.Metrics {
					r, err := s.result(w, scope, mode, m)
					if err != nil {
						return nil, err
					}
					results = append(results, r)
				}
			}
		}
	}
	return results, nil
}

func (s *Series) result(w Workload, scope Scope, mode Mode, m Metric) (Result, error) {
	values := s.values[key{w.Name, scope, mode, m.Name}]
	host := s.values[key{w.Name, scope, Host, m.Name}]
	if len(values) == 0 || len(host) == 0 {
		return Result{}, fmt.Errorf("%s %s %s: no runs of this mode and host", w.Name, scope, mode)
	}
	hostMedian := Median(host)
	if hostMedian == 0 {
		return Result{}, fmt.Errorf("%s %s %s: 0 in host mode, no ratio to it; use a longer --duration", w.Name, scope, m.Name)
	}
	mid := Median(values)
	return Result{
		Workload: w.Name, Scope: scope, Mode: mode, Metric: m.Name, Unit: m.Unit,
		Median: mid, Min: slices.Min(values), Max: slices.Max(values),
		Runs: len(values), RatioToHost: mid / hostMedian, Values: values,
	}, nil
}

// Median gives the middle value, or the mean of the two in the middle. values is not empty.
func Median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	middle := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[middle]
	}
	return (sorted[middle-1] + sorted[middle]) / 2
}
