package programs

import (
	"encoding/json"
	"path/filepath"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestStackCap: a container whose TCP a module runs is held to its operator's cap, by the kernel's
// own count of what it let pass: never is that more than the cap gives for the time that has
// passed, and in some two seconds it is 95 % of it, whatever else the machine does in others.
func TestStackCap(t *testing.T) {
	lab.NeedPrograms(t, "stacks", "python3")
	withEachStack(t, func(t *testing.T, l stacksLab) {
		const rate = 40e6 / 8 // bytes a second
		copyPrograms(t, l.dir, "stack_sink.py")
		l.start("n2/c1", "9007", "python3", filepath.Join(l.dir, "stack_sink.py"), "9007")
		if out, err := l.heddle(t.Context(), "limit", "set", "n1/c1", "--egress", "40mbit").CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		began := time.Now()
		l.run("n1/c1", "bash", "-c", "exec cat /dev/zero > /dev/tcp/"+l.address("n2/c1")+"/9007")

		since, before := time.Now(), l.passed()
		testutil.Eventually(t, "two seconds at the cap", func() (bool, string) {
			most := time.Since(since).Seconds() * rate
			now := l.passed()
			if all := time.Since(began).Seconds() * rate; float64(now) > 1.01*all+rate/20 {
				t.Errorf("%d bytes have passed, of %.0f", now, all)
				return true, ""
			}
			if most < 2*rate {
				return false, "less than two seconds"
			}
			here := float64(now - before)
			since, before = time.Now(), now
			return here >= .95*most, "in two seconds less passed than the cap lets"
		})
	})
}

// passed is what n1/c1's cap has let pass, in bytes.
func (l stacksLab) passed() uint64 {
	l.Helper()
	out, err := l.heddle(l.Context(), "limit", "list", "--node", "n1", "--output", "json").Output()
	testutil.NoError(l, err)
	var use []model.LimitUse
	testutil.NoError(l, json.Unmarshal(out, &use))
	if len(use) != 1 {
		l.Fatalf("limits of one container: %s", out)
	}
	return use[0].Egress.Bytes
}
