package test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestBenchCheck compares one run of round trips in this lab with committed results that are a hundred times as good, and as
// bad: it says so by its exit code. (--always: the machine of tests is a busy one.)
func TestBenchCheck(t *testing.T) {
	committed := func(heddle string) string {
		return `[{"workload":"rr","scope":"inter","mode":"host","metric":"rtt_p50_us","unit":"us","median":50,"min":50,"max":50,"runs":1,"ratio_to_host":1},
			{"workload":"rr","scope":"inter","mode":"heddle","metric":"rtt_p50_us","unit":"us","median":` + heddle + `,"min":` + heddle + `,"max":` + heddle + `,"runs":1}]`
	}
	for _, c := range []struct {
		heddle string
		code   int
		want   string
	}{
		{"0.5", 2, "0 better, 0 same, 1 worse"},
		{"5000", 0, "1 better, 0 same, 0 worse"},
	} {
		file := filepath.Join(t.TempDir(), "committed.json")
		if err := os.WriteFile(file, []byte(committed(c.heddle)), 0o600); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
		defer cancel()
		cmd := exec.CommandContext(ctx, heddleBin, "bench", "check", "--lab", labName, "--against", file, "--workloads", "rr", "--scopes", "inter",
			"--runs", "1", "--duration", "200ms", "--always")
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // so that it cleans up
		cmd.WaitDelay = patience
		out, err := cmd.CombinedOutput()
		code := 0
		if exit := new(exec.ExitError); errors.As(err, &exit) {
			code = exit.ExitCode()
		} else if err != nil {
			t.Fatal(err)
		}
		if code != c.code || !strings.Contains(string(out), c.want) {
			t.Errorf("committed %s us: exit code %d, want %d\n%s", c.heddle, code, c.code, out)
		}
	}
}
