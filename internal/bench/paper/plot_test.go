package paper

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/histogram"
)

// result makes up results of every application: overlay at twice, heddle at one and a half times
// the host's cost.
func result() (r Result) {
	for _, a := range Apps {
		e := Entry{Name: a.Name, Title: a.Title, Rate: a.Rate, Rounds: 1, DurationS: 1, Machine: "a & b"}
		for i, mode := range bench.Modes {
			cost := []float64{1, 2, 1.5}[i]
			m := Mode{Mode: mode, Metrics: map[string]Value{}, Latency: map[string]*histogram.Histogram{}}
			for _, metric := range []string{MetricCPU, MetricUser, MetricSystem, MetricSoftIRQ, MetricServerCPU,
				MetricClientCPU, MetricCPUPerOp, LatencyMetric("all", "mean")} {
				m.Metrics[metric] = Value{Median: cost, Min: cost / 2, Max: cost * 2, Values: []float64{cost}}
			}
			m.Metrics[MetricRate] = Value{Median: 1000 / cost, Values: []float64{1000 / cost}}
			m.Metrics[MetricThroughput] = Value{Median: a.Rate * 8e6 / cost}
			for _, kind := range []string{"set", "get"} {
				m.Latency[kind] = &histogram.Histogram{}
				for n := range 1000 {
					m.Latency[kind].Add(time.Duration(cost*float64(n+1)) * time.Microsecond)
				}
			}
			e.Modes = append(e.Modes, m)
		}
		r.Apps = append(r.Apps, e)
	}
	return r
}

func TestPaperFigures(t *testing.T) {
	result := result()
	for _, f := range Figures {
		var out strings.Builder
		if err := f.Write(&out, result); err != nil {
			t.Errorf("figure %s: %v", f.Number, err)
			continue
		}
		for d := xml.NewDecoder(strings.NewReader(out.String())); ; {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Errorf("figure %s: %v", f.Number, err)
				break
			}
		}
		if strings.Contains(out.String(), "NaN") || strings.Contains(out.String(), "Inf") {
			t.Errorf("figure %s has lengths that are no numbers", f.Number)
		}
		for _, mode := range bench.Modes {
			if !strings.Contains(out.String(), colours[mode]) {
				t.Errorf("figure %s does not show %s", f.Number, mode)
			}
		}
		if err := f.Write(io.Discard, Result{}); !errors.Is(err, ErrNotMeasured) {
			t.Errorf("figure %s of nothing: %v", f.Number, err)
		}
	}
}
