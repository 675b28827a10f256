package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/plot"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/bench/session"
)

// noLab is the name of a lab that is not there: what gets as far as to say so has good flags.
const noLab = "no-such-lab"

func runQuietly(cmd *cobra.Command, args ...string) error {
	cmd.SetArgs(args)
	cmd.SetOut(io.Discard)
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	return cmd.Execute()
}

func TestBenchFlagsAreCheckedFirst(t *testing.T) {
	for _, name := range []string{"", "cost", "packets", "paper", "peers", "policy", "pool", "rdma", "stacks"} {
		args := append(strings.Fields(name), "--lab", noLab)
		if err := runQuietly(newBenchCmd(), args...); err == nil || !strings.Contains(err.Error(), "lab is not up") {
			t.Errorf("bench %s: good flags: %v", name, err)
		}
	}
	for _, tt := range []struct{ flags, want string }{
		{"--workloads netperf", "--workloads"},
		{"--scopes galaxy", "--scopes"},
		{"--modes overlay", "--modes"},
		{"--runs 0", "--runs"},
		{"--duration 1h", "--duration"},
		{"--json /nonexistent/r.json", "/nonexistent/r.json"},
		{"--plot /nonexistent/p.svg", "/nonexistent/p.svg"},
		{"cost --profile /nonexistent", "--profile"},
		{"cost --connections 0", "--connections"},
		{"density --containers 0", "--containers"},
		{"nodes --nodes 0", "0 nodes"},
		{"paper --workloads apache", "--workloads"},
		{"paper --modes overlay", "--modes"},
		{"paper --rounds 0", "--rounds"},
		{"paper --duration 1ms", "--duration"},
		{"paper --scale 0", "--scale"},
		{"paper --json /nonexistent/r.json", "/nonexistent/r.json"},
		{"policy --phase 1s", "--phase"},
		{"policy-scale --rules 1", "--rules"},
		{"rdma --scopes galaxy", "--scopes"},
		{"rdma --runs 0", "--runs"},
		{"stacks --workloads netperf", "--workloads"},
	} {
		if err := runQuietly(newBenchCmd(), append(strings.Fields(tt.flags), "--lab", noLab)...); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v", tt.flags, err)
		}
	}
}

// rrResults are round trips in some modes.
func rrResults(modes []bench.Mode) (results []bench.Result) {
	for _, mode := range modes {
		results = append(results, bench.Result{Workload: "rr", Scope: bench.Inter, Mode: mode, Metric: "rtt_p50_us",
			Unit: bench.Microseconds, Median: 50, Min: 49, Max: 52, Runs: 3, RatioToHost: 1})
	}
	return results
}

// copyCommitted copies the committed results, tables and the page into a folder like docs/.
func copyCommitted(t *testing.T) (dir, folder, page string) {
	t.Helper()
	dir = t.TempDir()
	folder, page = filepath.Join(dir, "benchmarks"), filepath.Join(dir, "benchmarks.md")
	raw, err := os.ReadFile("../../docs/benchmarks.md")
	if err := errors.Join(err, os.CopyFS(folder, os.DirFS("../../docs/benchmarks")), os.WriteFile(page, raw, 0o644)); err != nil {
		t.Fatal(err)
	}
	return dir, folder, page
}

// TestCommittedDocuments writes all tables and plots anew from the committed results, and compares:
// a figure in the documents is one of the files', whoever edited which.
func TestCommittedDocuments(t *testing.T) {
	dir, folder, page := copyCommitted(t)
	for _, b := range benchmarks() {
		if b.Report == nil {
			continue
		}
		if err := b.WriteReport(folder, filepath.Join(folder, "tables.md"), io.Discard); err != nil {
			t.Fatalf("%s: %v", b.Words(), err)
		}
	}
	if err := session.Summarize(benchmarks(), folder, page); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(folder, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range append(files, page) {
		name, err := filepath.Rel(dir, file)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(file)
		want, err2 := os.ReadFile(filepath.Join("../../docs", name))
		if err := errors.Join(err, err2); err != nil || !bytes.Equal(got, want) {
			t.Errorf("docs/%s is not what the committed results give (make bench-summary): %v", name, err)
		}
	}
}

// TestSummarizeWhole says that pages are written as a whole or not at all.
func TestSummarizeWhole(t *testing.T) {
	var spoils []func(folder, page string) error
	for _, part := range []string{"core", "callers", "pool", "paper", "peers", "packets", "policy", "density", "cost", "rdma", "stacks"} {
		for _, mark := range []string{report.Mark("bench summary", part), "<!-- to here: " + part + " -->\n"} {
			spoils = append(spoils, func(folder, page string) error {
				if own := filepath.Join(folder, part+".md"); slices.Contains([]string{"packets", "rdma", "stacks"}, part) {
					page = own
				}
				text, err := os.ReadFile(page)
				return errors.Join(err, os.WriteFile(page, []byte(strings.Replace(string(text), mark, "", 1)), 0o644))
			})
		}
	}
	spoils = append(spoils,
		func(folder, _ string) error { return os.Remove(filepath.Join(folder, "pool.json")) },
		func(folder, _ string) error {
			return os.WriteFile(filepath.Join(folder, "pool.json"), []byte("[{]"), 0o644)
		})
	for i, spoil := range spoils {
		_, folder, page := copyCommitted(t)
		if err := spoil(folder, page); err != nil {
			t.Fatal(err)
		}
		pages, err := filepath.Glob(filepath.Join(folder, "*.md"))
		if err != nil {
			t.Fatal(err)
		}
		read := func() (all string) {
			for _, file := range append(pages, page) {
				raw, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				all += string(raw)
			}
			return all
		}
		before := read()
		if err := session.Summarize(benchmarks(), folder, page); err == nil {
			t.Errorf("spoil %d: the pages were written", i)
		}
		if read() != before {
			t.Errorf("spoil %d: a page was changed", i)
		}
	}
}

// TestBenchWritesFiles: --json and --plot.
func TestBenchWritesFiles(t *testing.T) {
	dir := t.TempDir()
	s := session.Settings{JSON: filepath.Join(dir, "r.json"), Plot: filepath.Join(dir, "p.svg"), Lab: "files"}
	b := session.Benchmark[[]bench.Result]{
		Print: func(w io.Writer, _ *session.Session, r []bench.Result) error { return report.WriteTable(w, r) },
		Plot:  func(w io.Writer, _ *session.Session, r []bench.Result) error { return plot.Write(w, r, plot.Text{}) },
	}
	var out strings.Builder
	if err := b.WriteResult(&out, &session.Session{Settings: s}, rrResults(bench.Modes)); err != nil {
		t.Fatal(err)
	}
	for file, mark := range map[string]string{s.JSON: `"ratio_to_host": 1`, s.Plot: "</svg>"} {
		raw, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(raw), mark) || !strings.Contains(out.String(), file) {
			t.Errorf("%s: %v, %d bytes", file, err, len(raw))
		}
	}
}
