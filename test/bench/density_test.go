package bench

import (
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench/density"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestBenchDensity runs a small `heddle bench density` in this lab: it measures every step in every
// mode, and leaves no endpoint, no listener and no network namespace.
func TestBenchDensity(t *testing.T) {
	before, err := filepath.Glob("/run/netns/" + lab.Name + "-*")
	testutil.NoError(t, err)
	r := benchCommand[density.Result](t, 4*testutil.WaitTimeout, t.TempDir(), "density", "--containers", "1,2", "--connections", "0,20", "--scopes", "inter",
		"--rates", "100", "--rounds", "1", "--duration", "50ms")
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
	if out := lab.Heddle(t, "endpoints"); strings.Count(out, "/c") != 4 {
		t.Errorf("endpoints are left:\n%s", out)
	}
	after, err := filepath.Glob("/run/netns/" + lab.Name + "-*")
	if err != nil || len(after) != len(before) {
		t.Errorf("network namespaces %v, before %v; %v", after, before, err)
	}
}
