package bench

import (
	"testing"

	"heddle.dev/heddle/internal/bench/paper"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestBenchPaper runs one application of `heddle bench paper` in this lab for half a second: it
// measures both ends, gives latencies, and leaves nothing in the server's container.
func TestBenchPaper(t *testing.T) {
	result := benchCommand[paper.Result](t, 4*testutil.WaitTimeout, t.TempDir(), "paper", "--workloads", "memcached-rate", "--modes", "host,heddle",
		"--rounds", "1", "--duration", "500ms", "--scale", "0.02")
	e, ok := result.Find("memcached-rate")
	if !ok || len(e.Modes) != 2 {
		t.Fatalf("%+v", result)
	}
	for _, m := range e.Modes {
		if rate := m.Metrics[paper.MetricRate].Median; rate <= 0 || rate > 1.1*e.Rate {
			t.Errorf("%s: %.0f operations/s at a rate of %.0f", m.Mode, rate, e.Rate)
		}
		if m.Metrics[paper.MetricCPU].Median <= 0 || m.Latency["get"].Count() == 0 {
			t.Errorf("%s: %+v", m.Mode, m.Metrics)
		}
	}
	if out := lab.MustRun(t, "heddle", "n2/c1", "sh", "-c", "ls -d /dev/shm/heddle-paper-* 2>/dev/null || true"); out != "" {
		t.Errorf("left in the server's container: %s", out)
	}
}
