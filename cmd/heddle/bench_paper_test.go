package main

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/histogram"
)

func TestBenchPaperFlagsAreCheckedFirst(t *testing.T) {
	good := paperSettings{benchSettings: benchSettings{modes: []string{"host", "heddle"}, runs: 1, duration: time.Second}, scale: 1}
	if o, err := good.options(io.Discard); err != nil || len(o.Apps) != len(bench.PaperApps) {
		t.Fatalf("good flags: %d apps, %v", len(o.Apps), err)
	}
	for want, change := range map[string]func(*paperSettings){
		"--workloads":         func(s *paperSettings) { s.workloads = []string{"apache"} },
		"--modes":             func(s *paperSettings) { s.modes = []string{"overlay"} },
		"--rounds":            func(s *paperSettings) { s.runs = 0 },
		"--duration":          func(s *paperSettings) { s.duration = time.Millisecond },
		"--scale":             func(s *paperSettings) { s.scale = 0 },
		"/nonexistent/r.json": func(s *paperSettings) { s.jsonFile = "/nonexistent/r.json" },
	} {
		s := good
		change(&s)
		if _, err := s.options(io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", want, err)
		}
	}
}

func TestReportPaper(t *testing.T) {
	folder := t.TempDir()
	h := &histogram.Histogram{}
	h.Add(time.Millisecond)
	e := bench.PaperEntry{Name: "memcached", Rounds: 1}
	for _, mode := range bench.Modes {
		e.Modes = append(e.Modes, bench.PaperMode{Mode: mode, Latency: map[string]*histogram.Histogram{"get": h, "set": h},
			Metrics: map[string]bench.PaperValue{bench.MetricRate: {Median: 5, Values: []float64{5}}}})
	}
	raw, err := json.Marshal(bench.PaperResult{Apps: []bench.PaperEntry{e}})
	if err != nil {
		t.Fatal(err)
	}
	document := filepath.Join(folder, "doc.md")
	for file, text := range map[string]string{filepath.Join(folder, "paper.json"): string(raw), document: "# A\n" + bench.PaperDocBegin + bench.PaperDocEnd + "end\n"} {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // the second time replaces what the first wrote
		if err := reportPaper(folder, document, io.Discard); err != nil {
			t.Fatal(err)
		}
	}
	written, err := os.ReadFile(document)
	if err != nil || strings.Count(string(written), "| 8a |") != 1 || !strings.HasSuffix(string(written), bench.PaperDocEnd+"end\n") {
		t.Errorf("%v, document:\n%s", err, written)
	}
	for figure, want := range map[string]bool{"8": true, "9": true, "11": false} {
		if _, err := os.Stat(filepath.Join(folder, "paper-"+figure+".svg")); (err == nil) != want {
			t.Errorf("figure %s: %v", figure, err)
		}
	}
}
