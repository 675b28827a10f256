package bench

import (
	"strings"
	"testing"

	"heddle.dev/heddle/internal/bench/policy"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestBenchPolicyScale runs a small `heddle bench policy-scale` in this lab: it measures every
// cell, and leaves the lab without rules, labels and made-up nodes.
func TestBenchPolicyScale(t *testing.T) {
	result := benchCommand[policy.ScaleResult](t, 4*testutil.WaitTimeout, t.TempDir(), "policy-scale", "--quick", "--scopes", "inter",
		"--rules", "0,100", "--endpoints", "40", "--nodes", "4")
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
	if out := lab.Heddle(t, "policy", "list"); strings.Contains(out, "bench-") {
		t.Errorf("rules are left:\n%s", out)
	}
	if out := lab.Heddle(t, "endpoints"); strings.Contains(out, "bench-") {
		t.Errorf("labels are left:\n%s", out)
	}
	testutil.Eventually(t, "the nodes to hear, one after the other, that the made-up ones are gone", func() (bool, string) {
		out := lab.Heddle(t, "status", "--output", "json")
		return strings.Count(out, `"peers": 1,`) == 2, out
	})
}
