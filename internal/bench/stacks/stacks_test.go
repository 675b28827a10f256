package stacks

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/benchtest"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/testutil"
)

// Every row has containers of its own, and a profile that an agent takes.
func TestRows(t *testing.T) {
	p, seen := place{}, map[string]bench.Mode{"n1/c1": bench.Heddle, "n1/c2": bench.Heddle}
	for i, r := range Rows {
		if err := r.profile(i).Validate(); err != nil {
			t.Errorf("%s: %v", r.Mode, err)
		}
		if !r.Lab && !r.Far {
			t.Errorf("%s is measured nowhere", r.Mode)
		}
		for _, c := range []string{"n1/c1", "n1/c2"} {
			mode, got := p.in(r.Mode, c)
			if mode != bench.Heddle || seen[got] != "" {
				t.Errorf("%s of %s is %s in mode %s, which %s has", c, r.Mode, got, mode, seen[got])
			}
			seen[got] = r.Mode
		}
		for w := range r.Without {
			if bench.WorkloadNamed(w).Name == "" {
				t.Errorf("%s goes without %s, which is no workload", r.Mode, w)
			}
		}
	}
	if len(seen) != labContainers {
		t.Errorf("%d containers, want %d", len(seen), labContainers)
	}
	if mode, c := p.in(bench.Overlay, "n2/c1"); mode != bench.Overlay || c != "n2/c1" {
		t.Errorf("a mode of the lab's is %s in %s", mode, c)
	}
}

// sample is a run in which every metric has the same value, and rows over the line one each.
func sample(t *testing.T, bbr float64) Result {
	one := func(v float64) bench.Spread { return bench.Spread{Median: v, Min: v, Max: v} }
	r := Result{
		Machine: "a machine", Profile: "a profile", Line: FarLine{RateBPS: 12e6, TripMS: 350, Loss: .005},
		Results: benchtest.SampleResults(t, "writes64k", "crr"), Copies: []Copy{{64, one(8)}}, Queues: []Queue{{"nqe", [2]string{"1", "4"}, one(4)}},
		ProfileUs: &bench.Spread{Median: .5, Min: .4, Max: .6},
		Far:       []Far{{"cubic", one(1e6), one(.01)}, {"bbr", one(bbr), one(.02)}},
	}
	for _, f := range r.Results {
		if f.Mode == bench.Heddle {
			for _, m := range []bench.Mode{Profiled, "smoltcp", "netstack"} {
				f.Mode = m
				r.Results = append(r.Results, f)
			}
		}
	}
	return r
}

func TestGoals(t *testing.T) {
	verdicts := func(r Result) string {
		var all []string
		for _, row := range r.goals().Rows[1:] {
			all = append(all, row[2])
		}
		return strings.Join(all, ", ")
	}
	dear := sample(t, 4e6)
	dear.ProfileUs.Median = .51
	for _, tt := range []struct {
		r    Result
		want string
	}{
		{sample(t, 4e6), strings.Repeat("reached, ", 6) + "reached"},
		{sample(t, 3.9e6), "not reached, " + strings.Repeat("reached, ", 5) + "reached"},
		{dear, strings.Repeat("reached, ", 6) + "not reached"},
		{Result{}, strings.Repeat("not measured in this run, ", 6) + "not measured in this run"},
	} {
		if got := verdicts(tt.r); got != tt.want {
			t.Errorf("got %s, want %s", got, tt.want)
		}
	}
}

// TestDocuments writes both documents without results, and with some.
func TestDocuments(t *testing.T) {
	dir := t.TempDir()
	page := filepath.Join(dir, "page.md")
	write := func() (tables, summary string) {
		t.Helper()
		testutil.NoError(t, os.WriteFile(page, []byte(report.Mark("bench stacks report", "")+"old\n<!-- to here -->\n"), 0o600))
		d, err := report.OpenDocument(page, dir, "bench stacks report")
		testutil.NoError(t, err)
		testutil.NoError(t, writeReport(d))
		testutil.NoError(t, d.Save(os.Stderr))
		summary, err = summarize(d)
		testutil.NoError(t, err)
		text, err := os.ReadFile(page)
		testutil.NoError(t, err)
		return string(text), summary
	}
	if tables, summary := write(); !strings.Contains(tables, notYet) || summary != notYet || strings.Contains(tables, "old") {
		t.Errorf("without results:\n%s\n%s", tables, summary)
	}
	raw, err := json.Marshal(sample(t, 5e6))
	testutil.NoError(t, err)
	testutil.NoError(t, os.WriteFile(filepath.Join(dir, File), raw, 0o600))
	tables, summary := write()
	for _, want := range []string{"| bbr | 5.00 (5.00..5.00) | 2.00 (2.00..2.00) |", "12 Mb/s, 350 ms, loss 0.5 %", "| 64 | 8.00", "at least 4 x cubic | 5.00 | reached"} {
		if !strings.Contains(tables, want) || !strings.Contains(summary, strings.SplitN(want, " (", 2)[0]) {
			t.Errorf("no %q in\n%s\n%s", want, tables, summary)
		}
	}
}

func TestJain(t *testing.T) {
	for _, tt := range []struct {
		rates []float64
		want  float64
	}{{[]float64{5, 5, 5, 5}, 1}, {[]float64{8, 0, 0, 0}, .25}, {[]float64{0, 0}, 0}} {
		if got := jain(tt.rates); got != tt.want {
			t.Errorf("of %v: %v, want %v", tt.rates, got, tt.want)
		}
	}
}

func TestParseQueue(t *testing.T) {
	key, value, err := parseQueue("write 4096 queues 14.894\n")
	if err != nil || key != [3]string{"write", "4096", "queues"} || value != 14.894 {
		t.Errorf("%v, %v, %v", key, value, err)
	}
	for _, line := range []string{"", "nqe 1 4", "nqe 1 4 x", "read 1 4 2"} {
		if _, _, err := parseQueue(line); err == nil {
			t.Errorf("%q was taken", line)
		}
	}
}
