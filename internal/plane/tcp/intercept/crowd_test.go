package intercept

import (
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/internal/trap"
)

// stuck is a handler whose answers wait, as ADDFD does for a caller that is kept from running.
type stuck struct {
	priorities
	waiting atomic.Int32
	free    chan struct{}
}

func (h *stuck) Answer(c *trap.Call) error {
	h.waiting.Add(1)
	<-h.free
	return c.Return(42)
}

// TestStuckAnswersHoldNobody: containers share the threads that wait for calls; more of them than
// there are threads, whose answers wait for ever, do not keep another one's call from being answered.
func TestStuckAnswersHoldNobody(t *testing.T) {
	h := &stuck{free: make(chan struct{})}
	path := socketPath(t)
	cfg := testConfig(path, "", &testMaker{})
	cfg.others = []trap.Handler{h}
	serve(t, cfg)
	defer close(h.free)
	quiet := trapped(t, path, testName)
	const n = 24
	for i := range n {
		c := trapped(t, path, testName)
		c.tell(command{Op: "priority", Type: unix.PRIO_USER, N: wantValue})
		t.Cleanup(func() {
			if o := c.hear(); o.OK != 42 {
				t.Errorf("container %d was told %d at last: %v", i, o.OK, unix.Errno(o.Errno))
			}
		})
		testutil.Eventually(t, "answers wait", func() (bool, string) { return h.waiting.Load() == int32(i+1), "" })
		if o := quiet.tcp(unix.AF_INET); o.Errno != 0 {
			t.Fatalf("beside %d stuck containers: %v", i+1, unix.Errno(o.Errno))
		}
	}
}
