package session

import (
	"errors"
	"os"
	"os/exec"
	"testing"

	"heddle.dev/heddle/internal/bench/benchtest"
)

func TestCopyProgram(t *testing.T) {
	self := benchtest.Program(t)[0]
	path, remove, err := copyProgram(self, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := exec.Command(path, "bench", "loadgen", "check").Run(); err != nil {
		t.Errorf("run the copy: %v", err)
	}
	if err := remove(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("copy after remove: %v", err)
	}
}
