package lab

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// Limit sets limits of a container until the end of the test.
func Limit(t testing.TB, container string, flags ...string) {
	t.Helper()
	t.Cleanup(func() {
		// The test's own context has ended.
		if out, err := exec.Command(Bin, "limit", "clear", container, "--lab", Name).CombinedOutput(); err != nil {
			t.Errorf("heddle limit clear %s: %v\n%s", container, err, out)
		}
	})
	Heddle(t, append([]string{"limit", "set", container}, flags...)...)
}

// LimitsOf lists what is set, without what it did.
func LimitsOf(t testing.TB) string {
	t.Helper()
	var list []model.LimitUse
	Query(t, &list, "limit", "list")
	var out strings.Builder
	for _, l := range list {
		fmt.Fprintf(&out, "%s %+v\n", l.Endpoint, l.Limits)
	}
	return out.String()
}
