// Package hang tells a process that hangs from one that waits for a processor: how long an answer
// takes says nothing of that on a busy machine.
package hang

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// After is for how long a process may be at rest with a question that it has not answered. Time in
// which it is ready and gets no processor, or waits for a disk, does not count.
const After = 2 * time.Second

// runs is how much processor time it may use meanwhile: all of its threads together.
const runs = 2 * After

// every is how often a process is looked at. Looks are counted, not time: whoever gets no processor
// to look has seen nothing.
const (
	every = 200 * time.Millisecond
	looks = int(After / every)
)

// tick is the kernel's unit of processor time (USER_HZ).
const tick = 10 * time.Millisecond

// Err says that a process hangs.
var Err = errors.New("it neither answers nor waits for a processor")

// Bound gives a context that ends, with the cause Err, when process pid hangs; it is asked
// something from now until cancel.
func Bound(ctx context.Context, pid int) (bound context.Context, cancel func()) {
	bound, end := context.WithCancelCause(ctx)
	go func() {
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		for q := (question{}); ; {
			select {
			case <-bound.Done():
				return
			case <-ticker.C:
			}
			if q.hangs(look("/proc", pid)) {
				end(Err)
				return
			}
		}
	}()
	return bound, func() { end(nil) }
}

// seen is what a look shows.
type seen struct {
	waits bool          // a thread is ready to run, runs, or waits for a disk
	spent time.Duration // processor time, since its start
}

// question is one that a process has not answered yet.
type question struct {
	asked bool
	spent time.Duration // at the first look
	rests int           // looks in a row at which it rested
}

// hangs takes a look into account.
func (q *question) hangs(s seen) bool {
	if !q.asked {
		q.asked, q.spent = true, s.spent
	}
	if q.rests++; s.waits {
		q.rests = 0
	}
	return q.rests > looks || s.spent-q.spent >= runs
}

// look reads what the kernel says of a process. One that cannot be read rests: it has ended, of
// which others hear.
func look(proc string, pid int) (s seen) {
	dir := filepath.Join(proc, strconv.Itoa(pid))
	s.spent = spent(fields(dir))
	tasks, _ := filepath.Glob(filepath.Join(dir, "task", "*"))
	for _, t := range tasks {
		if f := fields(t); len(f) > 0 && (f[0] == "R" || f[0] == "D") {
			s.waits = true
		}
	}
	return s
}

// fields gives those of a stat file from the state on: a name before it may have any characters.
func fields(dir string) []string {
	raw, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return nil
	}
	text := string(raw)
	return strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
}

// spent gives the processor time, in user mode and in the kernel.
func spent(f []string) (d time.Duration) {
	const user, system = 11, 12
	if len(f) <= system {
		return 0
	}
	for _, text := range f[user : system+1] {
		n, _ := strconv.ParseInt(text, 10, 64) // the kernel writes numbers
		d += time.Duration(n) * tick
	}
	return d
}
