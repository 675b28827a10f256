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

	"heddle.dev/heddle/internal/bench"
)

// TestCommittedDocuments writes all tables and plots anew from the committed results, and compares:
// a figure in the documents is one of the files', whoever edited which.
func TestCommittedDocuments(t *testing.T) {
	dir := t.TempDir()
	folder, page := filepath.Join(dir, "benchmarks"), filepath.Join(dir, "benchmarks.md")
	const committed = "../../docs"
	if err := os.CopyFS(folder, os.DirFS(filepath.Join(committed, "benchmarks"))); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(filepath.Join(committed, "benchmarks.md"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(page, raw, 0o644); err != nil {
		t.Fatal(err)
	}
	in := func(name string) string { return filepath.Join(folder, name) }
	tables := in("tables.md")
	if err := errors.Join(
		reportTables(in("core.json"), in("callers.json"), tables),
		reportPool(in("pool.json"), tables),
		reportCost(in("cost.json"), tables),
		reportLocal(folder, tables, io.Discard),
		reportPaper(folder, tables, io.Discard),
		reportPeers(folder, tables, io.Discard),
		reportDensity(folder, tables),
		summarize(folder, page),
	); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(in("*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range append(files, page) {
		name, err := filepath.Rel(dir, file)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(file)
		want, err2 := os.ReadFile(filepath.Join(committed, name))
		if err := errors.Join(err, err2); err != nil || !bytes.Equal(got, want) {
			t.Errorf("docs/%s is not what the committed results give (make bench-summary): %v", name, err)
		}
	}
}

// TestSummarizeWhole says that a page is written as a whole or not at all.
func TestSummarizeWhole(t *testing.T) {
	const committed = "../../docs/benchmarks"
	page, err := os.ReadFile(committed + ".md")
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"core", "local", "callers", "pool", "paper", "peers", "policy", "density", "cost"} {
		from, to := bench.SummaryMarks(part)
		for _, mark := range []string{from, to} {
			spoiled := []byte(strings.Replace(string(page), mark, "", 1))
			if _, err := bench.Summarize(spoiled, os.DirFS(committed)); err == nil {
				t.Errorf("a page without %q is taken", mark)
			}
		}
	}
	garble := func(file string) error { return os.WriteFile(file, []byte("[{]"), 0o644) }
	for _, spoil := range []func(file string) error{os.Remove, garble} {
		dir := t.TempDir()
		err := os.CopyFS(dir, os.DirFS(committed))
		if err := errors.Join(err, spoil(filepath.Join(dir, "pool.json"))); err != nil {
			t.Fatal(err)
		}
		if got, err := bench.Summarize(slices.Clone(page), os.DirFS(dir)); err == nil || got != nil {
			t.Errorf("without its results the page was written: %v", err)
		}
	}
}
