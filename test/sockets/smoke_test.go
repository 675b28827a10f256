package sockets

import (
	"testing"

	"heddle.dev/heddle/test/lab"
)

// TestExec checks the lab itself: output, input and exit codes pass through.
func TestExec(t *testing.T) {
	for _, mode := range []string{"host", "overlay", "heddle"} {
		t.Run(mode, func(t *testing.T) {
			if got := lab.MustRun(t, mode, "n1/c1", "echo", "hello"); got != "hello\n" {
				t.Errorf("echo printed %q", got)
			}
			if r := lab.Run(t, mode, "n1/c1", nil, "sh", "-c", "echo oops >&2; exit 7"); r.Code != 7 || r.Stderr != "oops\n" {
				t.Errorf("exit code %d and %q, want 7 and oops", r.Code, r.Stderr)
			}
		})
	}
}
