package bench

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench/local"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestBenchLocal runs a stream of `heddle bench local` in this lab for a moment, and writes its
// report.
func TestBenchLocal(t *testing.T) {
	folder := t.TempDir()
	document := filepath.Join(folder, "doc.md")
	result := benchCommand[local.Result](t, 4*testutil.WaitTimeout, folder, "local", "--workloads", "stream", "--modes", "host,heddle,unix",
		"--runs", "1", "--duration", "200ms")
	if len(result.Results) != 6 || result.Congestion == "" {
		t.Errorf("%+v", result)
	}
	for _, r := range result.Results {
		if r.Median <= 0 {
			t.Errorf("%+v", r)
		}
	}
	testutil.NoError(t, os.WriteFile(document, []byte(report.Mark("bench local report", "")+"<!-- to here -->\n"), 0o644))
	if out, err := exec.Command(lab.Bin, "bench", "local", "report", "--folder", folder, "--document", document).CombinedOutput(); err != nil {
		t.Fatalf("report: %v\n%s", err, out)
	}
	written, err := os.ReadFile(document)
	if err != nil || !strings.Contains(string(written), "| throughput, 64 KB, Gb/s |") {
		t.Errorf("%v\n%s", err, written)
	}
	if plot, err := os.ReadFile(filepath.Join(folder, "local.svg")); err != nil || !strings.Contains(string(plot), "unix") {
		t.Errorf("%v\n%s", err, plot)
	}
}
