package intercept

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// yieldToCallers makes the calling thread, which must be locked, one that does not preempt others when it
// wakes (SCHED_BATCH). ADDFD wakes the caller and then, when the caller has taken its socket, the answering
// thread: without this the answering thread pushes the caller aside for what is left to do, and the caller
// waits for it with its answer in hand. Measured in docs/benchmarks.md.
func yieldToCallers() error { return schedule(unix.SCHED_BATCH, 0) }

// yieldToAll makes the calling thread, which must be locked, give way to every thread that has something
// to do. Not SCHED_IDLE: a stock's lock may be held when the thread is pushed aside, and it must get
// enough of a busy processor to let go of it.
func yieldToAll() error { return schedule(unix.SCHED_BATCH, 19) }

func schedule(policy uint32, nice int32) error {
	attr := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: policy, Nice: nice}
	if err := unix.SchedSetAttr(0, &attr, 0); err != nil {
		return fmt.Errorf("sched_setattr: %w", err)
	}
	return nil
}
