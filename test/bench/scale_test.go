package bench

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/bench/density"
	"heddle.dev/heddle/internal/bench/policy"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestBenchPolicyScale runs a small `heddle bench policy-scale` in this lab: it measures every cell, and leaves the lab
// without rules, labels and made-up nodes.
func TestBenchPolicyScale(t *testing.T) {
	file := filepath.Join(t.TempDir(), "scale.json")
	ctx, cancel := context.WithTimeout(t.Context(), 4*testutil.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, lab.Bin, "bench", "policy-scale", "--quick", "--lab", lab.Name, "--scopes", "inter",
		"--rules", "0,100", "--endpoints", "40", "--nodes", "4", "--json", file, "--plot", filepath.Join(t.TempDir(), "scale.svg"))
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // so that it cleans up
	cmd.WaitDelay = testutil.Patience
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var result policy.ScaleResult
	if err := json.Unmarshal(raw, &result); err != nil {
		t.Fatal(err)
	}
	if len(result.Connects) != 2*3 || len(result.Changes) != 2 {
		t.Errorf("%d figures of connects, want 6; %d of changes, want 2", len(result.Connects), len(result.Changes))
	}
	for _, c := range result.Connects {
		if c.P50Us.Median <= 0 || c.P99Us.Median < c.P50Us.Median {
			t.Errorf("%+v", c)
		}
	}
	for _, c := range result.Changes {
		if c.InForceMs.Median <= 0 || c.AppliedMs.Median <= 0 {
			t.Errorf("%+v", c)
		}
	}
	if out := lab.Heddle(t, "policy", "list", "--lab", lab.Name); strings.Contains(out, "bench-") {
		t.Errorf("rules are left:\n%s", out)
	}
	if out := lab.Heddle(t, "endpoints", "--lab", lab.Name); strings.Contains(out, "bench-") {
		t.Errorf("labels are left:\n%s", out)
	}
	// The nodes hear of it one after the other.
	for deadline := time.Now().Add(testutil.Patience); ; time.Sleep(20 * time.Millisecond) {
		out := lab.Heddle(t, "status", "--lab", lab.Name, "--output", "json")
		if strings.Count(out, `"peers": 1,`) == 2 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("made-up nodes are left:\n%s", out)
		}
	}
}

// TestBenchEndpoints runs a small `heddle bench endpoints` in this lab: it measures, and leaves no endpoint and no
// network namespace.
func TestBenchEndpoints(t *testing.T) {
	file := filepath.Join(t.TempDir(), "endpoints.json")
	ctx, cancel := context.WithTimeout(t.Context(), 4*testutil.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, lab.Bin, "bench", "endpoints", "--lab", lab.Name, "--endpoints", "2", "--runs", "1", "--json", file)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // so that it cleans up
	cmd.WaitDelay = testutil.Patience
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var result density.EndpointMemoryResult
	if err := json.Unmarshal(raw, &result); err != nil || result.Endpoints != 2 || result.Rounds != 1 {
		t.Errorf("%s: %v", raw, err)
	}
	if out := lab.Heddle(t, "endpoints", "--lab", lab.Name); strings.Contains(out, "bench/") {
		t.Errorf("endpoints are left:\n%s", out)
	}
	if left, err := filepath.Glob("/run/netns/" + lab.Name + "-bench-*"); err != nil || len(left) > 0 {
		t.Errorf("network namespaces are left: %v, %v", left, err)
	}
}
