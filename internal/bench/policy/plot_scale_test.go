package policy

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/plot"
)

func TestWriteScale(t *testing.T) {
	result := ScaleResult{Endpoints: 10000, Nodes: 100, Rounds: 5}
	spread := func(v float64) bench.Spread { return bench.Spread{Median: v, Min: v / 2, Max: v * 2} }
	for _, scope := range bench.Scopes {
		for _, mode := range bench.Modes {
			for _, rules := range []int{0, 100, 100000} {
				result.Connects = append(result.Connects, ScaleConnect{Rules: rules, Scope: scope, Mode: mode, P50Us: spread(50), P99Us: spread(90)})
			}
		}
	}
	for _, rules := range []int{0, 100, 100000} {
		result.Changes = append(result.Changes, ScaleChange{Rules: rules, What: "one <rule>", InForceMs: spread(7), FirstCPUMs: spread(0), SecondCPUMs: spread(3)})
	}
	var out strings.Builder
	if err := WriteScalePlot(&out, result, plot.Text{Title: "A & B"}); err != nil {
		t.Fatal(err)
	}
	for d := xml.NewDecoder(strings.NewReader(out.String())); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	// Two scopes of three modes with p50 and p99; latency; the processor time of two agents.
	if got, want := strings.Count(out.String(), "<circle"), 3*(2*3*2+1+2); got != want {
		t.Errorf("%d points, want %d", got, want)
	}
	for _, bad := range []string{"NaN", "Inf"} {
		if strings.Contains(out.String(), bad) {
			t.Errorf("the drawing has %s in it", bad)
		}
	}
	if err := WriteScalePlot(io.Discard, ScaleResult{}, plot.Text{}); err == nil {
		t.Error("drew nothing")
	}
}
