package testutil

import (
	"path/filepath"
	"testing"
)

func TestLabName(t *testing.T) {
	t.Setenv("HEDDLE_TEST_LAB", "")
	own := LabName()
	if root, err := filepath.Abs("../.."); err != nil || checkout() != root || len(own) != 7 {
		t.Errorf("checkout %q, %v: lab name %q; want 7 characters for %s", checkout(), err, own, root)
	}
	if nameOf("/a/heddle") == nameOf("/b/heddle") {
		t.Error("two checkouts have labs of one name")
	}
	t.Setenv("HEDDLE_TEST_LAB", "mine")
	if got := LabName(); got != "mine" {
		t.Errorf("lab name %q, want that of the environment", got)
	}
}
