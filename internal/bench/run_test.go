package bench

import (
	"fmt"
	"strings"
	"testing"
)

func TestScheduleRotatesModesAndInterleaves(t *testing.T) {
	o := Options{Workloads: Workloads[:2], Scopes: Scopes, Modes: Modes}
	var first []Mode
	for run := range 3 {
		cells := o.Schedule(run)
		if len(cells) != 2*2*3 {
			t.Fatalf("run %d: %d cells, want 12", run, len(cells))
		}
		first = append(first, cells[0].Mode)
		for i := 0; i < len(cells); i += 3 {
			seen := map[Mode]bool{}
			for _, c := range cells[i : i+3] {
				seen[c.Mode] = true
				if c.Workload.Name != cells[i].Workload.Name || c.Scope != cells[i].Scope {
					t.Errorf("run %d: modes of one cell are apart: %s and %s", run, c, cells[i])
				}
			}
			if len(seen) != 3 {
				t.Errorf("run %d: cells %d..%d have modes %v", run, i, i+2, seen)
			}
		}
	}
	if first[0] == first[1] || first[1] == first[2] || first[0] == first[2] {
		t.Errorf("first modes of the runs: %v, want each once", first)
	}
}

func TestParseNames(t *testing.T) {
	if m, err := ParseModes([]string{"heddle", "host"}); err != nil || fmt.Sprint(m) != "[host heddle]" {
		t.Errorf("ParseModes: %v, %v", m, err)
	}
	for _, bad := range [][]string{{"heddle"}, {"host", "slim"}, {}} {
		if m, err := ParseModes(bad); err == nil || !strings.Contains(err.Error(), "--modes") {
			t.Errorf("ParseModes(%v): %v, %v", bad, m, err)
		}
	}
	if s, err := ParseScopes([]string{"intra"}); err != nil || fmt.Sprint(s) != "[intra]" {
		t.Errorf("ParseScopes: %v, %v", s, err)
	}
	w, err := ParseWorkloads(nil)
	if err != nil || len(w) != 3 || w[0].Name != "iperf3" || w[2].Name != "crr" {
		t.Errorf("ParseWorkloads: %v, %v", w, err)
	}
	if w, err = ParseWorkloads([]string{"crr8"}); err != nil || len(w) != 1 {
		t.Errorf("ParseWorkloads(crr8): %v, %v", w, err)
	}
}
