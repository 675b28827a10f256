package testutil

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

// recorder keeps what a test that fails would say.
type recorder struct {
	testing.TB
	said string
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.said = fmt.Sprintf(format, args...)
	panic(r) // as the real one, it does not return
}

// TestEventually: the condition is asked until it holds; if it never does, what it saw last is
// printed.
func TestEventually(t *testing.T) {
	asked := 0
	EventuallyNil(t, "the third try", func() error {
		if asked++; asked < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	if asked != 3 {
		t.Errorf("asked %d times", asked)
	}
	r := &recorder{TB: t}
	func() {
		defer func() { _ = recover() }()
		within(r, 20*time.Millisecond, "the end of time", func() (bool, string) { return false, "it goes on" })
	}()
	if !strings.Contains(r.said, "the end of time") || !strings.Contains(r.said, "it goes on") {
		t.Errorf("said %q", r.said)
	}
}
