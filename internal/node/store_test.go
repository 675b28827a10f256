package node

import (
	"path/filepath"
	"testing"

	"heddle.dev/heddle/internal/trust"
)

// TestMovedStore: an agent that serves the store elsewhere than the join file says knows it before
// the file is made anew, for the nodes that have joined still look there.
func TestMovedStore(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, trust.JoinFile)
	const before, now = "https://192.0.2.1:2379", "https://192.0.2.1:17473"
	if _, moved := movedStore(path, now); moved {
		t.Error("a network that is new is said to have moved")
	}
	authority, err := trust.OpenAuthority(filepath.Join(dir, trustDir))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := authority.Join(path, before); err != nil {
		t.Fatal(err)
	}
	if _, moved := movedStore(path, before); moved {
		t.Error("the same port is said to be another")
	}
	if from, moved := movedStore(path, now); !moved || from != before {
		t.Errorf("moved %v, from %q", moved, from)
	}
}
