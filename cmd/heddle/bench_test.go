package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/bench"
)

func TestBenchFlagsAreCheckedFirst(t *testing.T) {
	good := benchSettings{scopes: []string{"inter"}, modes: []string{"host", "heddle"}, runs: 1, duration: time.Second}
	if o, err := good.options(io.Discard); err != nil || len(o.Workloads) != 3 {
		t.Fatalf("good flags: %v, %v", o, err)
	}
	for want, change := range map[string]func(*benchSettings){
		"--workloads":         func(s *benchSettings) { s.workloads = []string{"netperf"} },
		"--scopes":            func(s *benchSettings) { s.scopes = []string{"galaxy"} },
		"--modes":             func(s *benchSettings) { s.modes = []string{"overlay"} },
		"--runs":              func(s *benchSettings) { s.runs = 0 },
		"--duration":          func(s *benchSettings) { s.duration = time.Hour },
		"/nonexistent/r.json": func(s *benchSettings) { s.jsonFile = "/nonexistent/r.json" },
		"/nonexistent/p.svg":  func(s *benchSettings) { s.plotFile = "/nonexistent/p.svg" },
	} {
		s := good
		change(&s)
		if _, err := s.options(io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", want, err)
		}
	}
}

func TestBenchReportWritesFiles(t *testing.T) {
	dir := t.TempDir()
	s := benchSettings{runs: 1, duration: time.Second, jsonFile: filepath.Join(dir, "r.json"), plotFile: filepath.Join(dir, "p.svg")}
	var results []bench.Result
	for _, mode := range bench.Modes {
		results = append(results, bench.Result{Workload: "rr", Scope: bench.Inter, Mode: mode, Metric: "rtt_p50_us",
			Unit: bench.Microseconds, Median: 50, Min: 49, Max: 52, Runs: 1, RatioToHost: 1})
	}
	var out strings.Builder
	if err := s.report(results, &out); err != nil {
		t.Fatal(err)
	}
	for file, mark := range map[string]string{s.jsonFile: `"ratio_to_host": 1`, s.plotFile: "</svg>"} {
		b, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(b), mark) || !strings.Contains(out.String(), file) {
			t.Errorf("%s: %v, %d bytes", file, err, len(b))
		}
	}
}

func TestWriteFileLeavesNoHalf(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "results.json")
	broken := errors.New("broken")
	err := writeFile(path, func(w io.Writer) error {
		_, err := io.WriteString(w, "[")
		return errors.Join(err, broken)
	})
	if !errors.Is(err, broken) || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
