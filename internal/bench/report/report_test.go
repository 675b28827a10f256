package report

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench/benchtest"
)

// TestJSONShape ties the record's fields to what other programs read.
func TestJSONShape(t *testing.T) {
	var b bytes.Buffer
	if err := WriteJSON(&b, benchtest.SampleResults(t)); err != nil {
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

func TestWriteTable(t *testing.T) {
	var b bytes.Buffer
	if err := WriteTable(&b, benchtest.SampleResults(t, "iperf3")); err != nil {
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
