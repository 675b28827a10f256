package names

import (
	"fmt"
	"slices"
	"testing"
)

// TestNumbers: paths and reasons are found by their numbers, and others shown as numbers.
func TestNumbers(t *testing.T) {
	for i, p := range Paths {
		if PathOf(uint8(i)) != p || slices.Index(Paths, p) != i {
			t.Errorf("path %d: %s, first at %d", i, PathOf(uint8(i)), slices.Index(Paths, p))
		}
	}
	for i, r := range Reasons {
		if Reason(i).String() != r.Name {
			t.Errorf("reason %d: %s, want %s", i, Reason(i), r.Name)
		}
	}
	path, reason := PathOf(uint8(len(Paths))), Reason(len(Reasons)).String()
	if path != "path(8)" || reason != fmt.Sprintf("reason(%d)", len(Reasons)) {
		t.Errorf("beyond the last: %s, %s", path, reason)
	}
}
