package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
)

// resultsOf makes results of one metric of rr between nodes: the host's is 50 us.
func resultsOf(workload string, heddle float64) []bench.Result {
	r := bench.Result{Workload: workload, Scope: bench.Inter, Mode: bench.Host, Metric: "rtt_p50_us", Unit: bench.Microseconds, Median: 50, Min: 49, Max: 51, Runs: 5, RatioToHost: 1}
	h := r
	h.Mode, h.Median, h.Min, h.Max, h.RatioToHost = bench.Heddle, heddle, heddle-1, heddle+1, heddle/50
	return []bench.Result{r, h}
}

func TestReportCheck(t *testing.T) {
	committed := []committedFile{{"core.json", resultsOf("rr", 50)}, {"callers.json", resultsOf("crr8", 50)}}
	for _, c := range []struct {
		now  []bench.Result
		code int // 0: no error
		want string
	}{
		{resultsOf("rr", 51), 0, "0 better, 1 same, 0 worse, 0 not measured"},
		{resultsOf("rr", 30), 0, "1 better, 0 same, 0 worse"},
		{resultsOf("rr", 80), exitWorse, "0 better, 0 same, 1 worse"},
		{resultsOf("rr", 80)[:1], 1, "1 not measured"},
		{resultsOf("crr", 80), 1, "0 not measured"},
	} {
		var out strings.Builder
		err := reportCheck(compareAll(committed, c.now), &out)
		if code := 0; err != nil || c.code != 0 {
			if code = exitCode(err); code != c.code || err == nil {
				t.Errorf("%s: exit code %d (%v), want %d", c.want, code, err, c.code)
			}
		}
		if !strings.Contains(out.String(), c.want) {
			t.Errorf("no %q in\n%s", c.want, &out)
		}
		if c.code == exitWorse && !strings.Contains(err.Error(), "rr inter rtt_p50_us") {
			t.Errorf("the error does not name the metric: %v", err)
		}
	}
}

func TestExitCode(t *testing.T) {
	for err, want := range map[error]int{
		errors.New("any"):                                                1,
		exitError{exitBusy, errors.New("busy")}:                          exitBusy,
		fmt.Errorf("a: %w", exitError{exitWorse, errors.New("worse")}):   exitWorse,
		errors.Join(exitError{exitBusy, errors.New("b")}, os.ErrInvalid): exitBusy,
	} {
		if got := exitCode(err); got != want {
			t.Errorf("%v: %d, want %d", err, got, want)
		}
	}
}

// TestCommittedResults reads the project's own, which the default of --against names.
func TestCommittedResults(t *testing.T) {
	var s benchCheck
	named, err := newBenchCheckCmd().Flags().GetStringSlice("against")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range named {
		s.against = append(s.against, filepath.Join("../..", file))
	}
	all, err := s.committed()
	if err != nil || len(all) != len(named) {
		t.Fatal(err)
	}
	for _, f := range all {
		compared := compareAll([]committedFile{f}, f.results)
		if len(compared) == 0 {
			t.Errorf("%s: nothing to compare", f.name)
		}
		for _, c := range compared {
			if c.Moved != bench.Same {
				t.Errorf("%s compared with itself: %+v", f.name, c)
			}
		}
	}
	for _, bad := range []string{filepath.Join(t.TempDir(), "none.json"), "bench_check_test.go"} {
		s.against = []string{bad}
		if _, err := s.committed(); err == nil || !strings.Contains(err.Error(), bad) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
