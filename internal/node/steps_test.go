package node

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

// TestSteps: steps are done in order until one fails, and undone backwards, all of them whatever
// fails.
func TestSteps(t *testing.T) {
	var calls []string
	fails := map[string]error{}
	call := func(name string) func() error {
		return func() error {
			calls = append(calls, name)
			return fails[name]
		}
	}
	steps := []step{{"first", call("do 1"), call("undo 1")}, {"second", call("do 2"), nil}, {"third", call("do 3"), call("undo 3")}}
	want := func(what string, want ...string) {
		t.Helper()
		if !slices.Equal(calls, want) {
			t.Errorf("%s: %q, want %q", what, calls, want)
		}
		calls = nil
	}
	if err := doSteps(steps); err != nil {
		t.Error(err)
	}
	want("do", "do 1", "do 2", "do 3")
	fails["do 2"] = errors.New("no room")
	if err := doSteps(steps); !errors.Is(err, fails["do 2"]) || !strings.HasPrefix(err.Error(), "second: ") {
		t.Errorf("error %v", err)
	}
	want("do, of which the second fails", "do 1", "do 2")
	fails["undo 3"], fails["undo 1"] = errors.New("away"), errors.New("busy")
	if err := undoSteps(steps); !errors.Is(err, fails["undo 3"]) || !errors.Is(err, fails["undo 1"]) {
		t.Errorf("error %v", err)
	}
	want("undo, of which two fail", "undo 3", "undo 1")
}
