package test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
)

// TestBenchDensity runs a small `heddle bench density` in this lab: it measures every step in every mode, and leaves no endpoint,
// no listener and no network namespace.
func TestBenchDensity(t *testing.T) {
	before, err := filepath.Glob("/run/netns/" + labName + "-*")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "density.json")
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, heddleBin, "bench", "density", "--lab", labName, "--containers", "1,2", "--connections", "0,20", "--scopes", "inter",
		"--rates", "100", "--rounds", "1", "--duration", "50ms", "--json", file)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // so that it cleans up
	cmd.WaitDelay = patience
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := bench.ReadDensity(f)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Containers) != 2 || len(r.Connections) != 2*3 {
		t.Fatalf("%d steps of containers, want 2; %d of connections, want 6", len(r.Containers), len(r.Connections))
	}
	for _, s := range r.Containers {
		if len(s.Latency) != 2*3 || len(s.Accept) != 3 || len(s.Paced) != 2 || s.AgentMB <= 0 || s.MapsMB <= 0 || s.AgentThreads == 0 || s.MakeMs.Median <= 0 {
			t.Errorf("%+v", s)
		}
		for _, p := range s.Paced {
			if p.PerS <= 0 || p.CPU <= 0 {
				t.Errorf("%+v", p)
			}
		}
	}
	for _, l := range r.Connections {
		if l.Accept.PerS <= 0 || len(l.Latency) != 2 || l.Latency[0].P50Us.Median <= 0 {
			t.Errorf("%+v", l)
		}
	}
	if out := heddle(t, "endpoints", "--lab", labName); strings.Count(out, "/c") != 4 {
		t.Errorf("endpoints are left:\n%s", out)
	}
	after, err := filepath.Glob("/run/netns/" + labName + "-*")
	if err != nil || len(after) != len(before) {
		t.Errorf("network namespaces %v, before %v; %v", after, before, err)
	}
}
