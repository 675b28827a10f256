package bench

import (
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/cost"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestBenchCost runs a small `heddle bench cost` in this lab: each part gives figures, and nothing
// is left.
func TestBenchCost(t *testing.T) {
	r := benchCommand[cost.Result](t, 4*testutil.WaitTimeout, t.TempDir(), "cost", "--scopes", "inter", "--runs", "1", "--duration", "100ms",
		"--connections", "50", "--trips", "50", "--starts", "1", "--profile", "../../internal/runtime/testdata/docker29.json")
	runs := make(map[string]float64) // of Heddle's, by step and program
	for _, s := range r.Steps {
		for _, p := range s.Programs {
			if s.Mode == bench.Heddle {
				runs[s.Step+" "+p.Name] = p.Runs
			}
		}
	}
	// Every packet between nodes meets one program, where it arrives; every connect and every close
	// one.
	for step, least := range map[string]float64{"round trip from_underlay": 1.5, "connect connect4": 0.9, "connect tcp_events": 2, "close sock_release": 0.9} {
		if runs[step] < least {
			t.Errorf("%s: %.2f runs an operation, want %.1f or more; all: %v", step, runs[step], least, runs)
		}
	}
	// Other programs' connects on the node count, too, in a measurement as short as this one, each
	// with all of its events: 13 or so for both ends, 20 to be on the safe side.
	others := runs["round trip connect4"]
	if others > 0.5 || runs["round trip tcp_events"] > 0.5+20*others {
		t.Errorf("programs of connections run for round trips: %v", runs)
	}
	for _, f := range r.Filters {
		if f.Name == "heddle" && (f.Missing != "" || f.Instructions == 0 || f.Executed["socket TCP"] == 0 || f.Executed["getpid"] != 0) {
			t.Errorf("Heddle's filter: %+v", f)
		}
	}
	if len(r.Filters) != 4 || len(r.Syscalls) != 4*5 || len(r.Starts) != 16 || len(r.Programs) == 0 || len(r.Workloads) == 0 {
		t.Errorf("%d filters, %d system calls, %d starts, %d programs, %d results", len(r.Filters), len(r.Syscalls), len(r.Starts), len(r.Programs), len(r.Workloads))
	}
	for _, s := range r.Starts {
		if s.Median <= 0 {
			t.Errorf("%s: %g ms", s.Name, s.Median)
		}
	}
	if out := lab.Heddle(t, "endpoints"); strings.Contains(out, "bench") {
		t.Errorf("endpoints are left:\n%s", out)
	}
	if left, err := filepath.Glob("/run/netns/heddle-bench-*"); err != nil || len(left) > 0 {
		t.Errorf("network namespaces are left: %v, %v", left, err)
	}
}
