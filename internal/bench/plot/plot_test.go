package plot

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"strconv"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
)

// example makes results like those of a full bench: ratios of the design's measurements, with
// spread.
func example() []bench.Result {
	type row struct {
		workload, metric string
		host             float64
		overlay, heddle  float64 // ratios
	}
	rows := []row{
		{"iperf3", "throughput_bps", 33.3e9, 0.50, 1.04},
		{"iperf3", "cpu_s_per_gb", 0.31, 1.93, 0.97},
		{"rr", "rtt_p50_us", 56, 1.57, 1.01},
		{"rr", "rtt_p99_us", 120, 1.6, 1.1},
		{"rr", "cpu_us_per_transaction", 66, 1.62, 1.02},
		{"crr", "socket_connect_p50_us", 32, 1.6, 1.42},
		{"crr", "connections_per_s", 15000, 0.61, 0.70},
		{"crr", "cpu_us_per_connection", 130, 1.8, 1.5},
	}
	var results []bench.Result
	for _, scope := range bench.Scopes {
		for _, r := range rows {
			m, _ := bench.MetricNamed(r.workload, r.metric)
			for mode, ratio := range map[bench.Mode]float64{bench.Host: 1, bench.Overlay: r.overlay, bench.Heddle: r.heddle} {
				v := r.host * ratio
				results = append(results, bench.Result{Workload: r.workload, Scope: scope, Mode: mode, Metric: r.metric, Unit: m.Unit,
					Median: v, Min: v * 0.93, Max: v * 1.08, Runs: 5, RatioToHost: ratio})
			}
		}
	}
	return results
}

// draw writes a plot and gives the texts and numbers of its elements.
func draw(t *testing.T, results []bench.Result) (texts []string, elements []xml.StartElement) {
	t.Helper()
	var b bytes.Buffer
	if err := Write(&b, results, Text{Title: "a < b & c", Subtitle: "5 runs"}); err != nil {
		t.Fatal(err)
	}
	decoder := xml.NewDecoder(&b)
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return texts, elements
		}
		if err != nil {
			t.Fatalf("not well-formed: %v", err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			elements = append(elements, token.Copy())
		case xml.CharData:
			texts = append(texts, string(token))
		}
	}
}

// checkInside wants every element within the drawing and no rectangle turned over.
func checkInside(t *testing.T, elements []xml.StartElement) {
	t.Helper()
	for _, e := range elements {
		for _, a := range e.Attr {
			v, err := strconv.ParseFloat(a.Value, 64)
			if err != nil {
				continue
			}
			switch a.Name.Local {
			case "x", "x1", "x2", "y", "y1", "y2", "width", "height":
				if v < 0 || v > Width {
					t.Errorf("%s: %s=%q is outside", e.Name.Local, a.Name.Local, a.Value)
				}
			}
		}
	}
}

// TestWildRunStaysOnTheScale cuts a whisker that would dwarf the bars, and a bar that would dwarf
// the others. (TestCommittedDocuments draws results without any.)
func TestWildRunStaysOnTheScale(t *testing.T) {
	results := example()
	for i, r := range results {
		if r.Mode == bench.Overlay && r.Metric == "rtt_p50_us" && r.Scope == bench.Intra {
			results[i].Min, results[i].Median, results[i].Max, results[i].RatioToHost = 100*r.Min, 100*r.Median, 100*r.Max, 100*r.RatioToHost
		}
	}
	for i, r := range results {
		if r.Mode == bench.Heddle && r.Metric == "cpu_s_per_gb" && r.Scope == bench.Inter {
			results[i].Max = r.Median * 50
		}
	}
	_, elements := draw(t, results)
	checkInside(t, elements)
	arrows := 0
	for _, e := range elements {
		if e.Name.Local == "path" {
			arrows++
		}
	}
	if arrows != 2 {
		t.Errorf("%d arrows, want 2", arrows)
	}
}

func TestPartsOfABench(t *testing.T) {
	var part, hostOnly []bench.Result
	for _, r := range example() {
		if r.Scope == bench.Intra && r.Workload == "rr" && r.Mode != bench.Overlay {
			part = append(part, r)
		}
		if r.Mode == bench.Host {
			hostOnly = append(hostOnly, r)
		}
	}
	texts, elements := draw(t, part)
	checkInside(t, elements)
	if all := strings.Join(texts, "\n"); strings.Contains(all, "Between nodes") || strings.Contains(all, "overlay") || strings.Contains(all, "higher") {
		t.Errorf("drawn though not measured: %s", all)
	}
	if err := Write(io.Discard, hostOnly, Text{}); err == nil {
		t.Error("host alone: no error")
	}
}
