package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// outcome is how a case ended.
type outcome string

const (
	passed  outcome = "passed"
	failed  outcome = "failed"
	skipped outcome = "skipped"
)

// caseResult is what came of one case.
type caseResult struct {
	outcome outcome
	detail  string // of a failure: what the suite says of it; of a skip: why
}

// selection says which of a module's cases are to run: those in only, or all; never those in
// without.
type selection struct{ only, without []string }

// module is a program of a suite that runs many cases.
type module struct {
	suite, name string
	fast        bool          // part of `make test`
	limit       time.Duration // for one run
	dir         func() string // working directory, once prepared
	// prepare makes what the module needs in scratch. It is called before each module, and may find
	// its work done.
	prepare func(ctx context.Context, scratch string) error
	// command gives the program. It may write a report of its own to the file at report.
	command func(scratch, report string, s selection, limit time.Duration) []string
	// parse reads what the program printed and its report, nil if it wrote none: the cases that
	// ended and the names of those that had begun and not ended. It fails if it makes no sense of
	// them.
	parse func(output, report []byte) (cases map[string]caseResult, running []string, err error)
}

// moduleRun is what came of a module in one mode.
type moduleRun struct {
	cases   map[string]caseResult
	seconds float64
	sockets int    // sockets that the agent gave out meanwhile
	broken  string // why the module gave no result for all its cases; "" if it did
}

// count gives how many cases ended so.
func (r moduleRun) count(o outcome) int {
	n := 0
	for _, c := range r.cases {
		if c.outcome == o {
			n++
		}
	}
	return n
}

// hangs is how many times a module is run again because a case did not end.
const hangs = 3

// runCounted is runModule, with the sockets that the agent gave out: none on the overlay, or the
// modes are mixed up.
func runCounted(ctx context.Context, l *lab, m module, mode string, limit time.Duration) (moduleRun, error) {
	_, before, err := l.runningAgent(ctx)
	if err != nil {
		return moduleRun{}, err
	}
	r, err := runModule(ctx, l, m, mode, selection{}, limit)
	if err != nil {
		return r, err
	}
	_, after, err := l.runningAgent(ctx)
	if err != nil {
		return r, fmt.Errorf("the agent is gone: %w", err)
	}
	r.sockets = after - before
	if mode == overlay && r.sockets != 0 {
		return r, fmt.Errorf("the agent gave out %d sockets while the module ran on the overlay", r.sockets)
	}
	return r, nil
}

// runModule runs the selected cases of m in mode. If the program does not end, the cases that it
// was at have failed, and it is run again without them.
func runModule(ctx context.Context, l *lab, m module, mode string, s selection, limit time.Duration) (moduleRun, error) {
	stuck := map[string]caseResult{}
	total := moduleRun{}
	late := false
	for try := 0; ; try++ {
		l.runs++
		base := filepath.Join(l.scratch, fmt.Sprintf("%s-%s.%s.%d", m.suite, strings.ReplaceAll(m.name, "/", "-"), mode, l.runs))
		report := base + ".report"
		if err := os.Remove(report); err != nil && !os.IsNotExist(err) {
			return total, err
		}
		without := append(slices.Clone(s.without), slices.Sorted(maps.Keys(stuck))...)
		e, err := l.exec(ctx, mode, m.dir(), base+".log", limit, m.command(l.scratch, report, selection{s.only, without}, limit))
		if err != nil {
			return total, err
		}
		total.seconds += e.elapsed.Seconds()
		written, err := os.ReadFile(report)
		if err != nil && !os.IsNotExist(err) {
			return total, err
		}
		cases, running, err := m.parse(e.output, written)
		if err != nil && e.elapsed >= limit-2*killedAfter && !late {
			// Late without a case that is stuck: once more, with more time, before that counts.
			late, limit = true, 3*limit
			continue
		}
		switch {
		case err != nil:
			total.broken = fmt.Sprintf("exit code %d after %.0f s: %v", e.code, e.elapsed.Seconds(), err)
		case len(running) == 0 && e.overdue:
			total.broken = fmt.Sprintf("did not end within %s, and names no case", limit)
		case len(running) > 0 && try == hangs:
			total.broken = fmt.Sprintf("did not end %d times, last in %s", hangs+1, strings.Join(running, ", "))
		}
		for _, name := range running {
			stuck[name] = caseResult{failed, fmt.Sprintf("did not end (exit code %d after %.0f s)\n%s", e.code, e.elapsed.Seconds(), about(e.output, name))}
		}
		if len(running) == 0 || total.broken != "" {
			total.cases = cases
			break
		}
	}
	if total.cases == nil {
		total.cases = map[string]caseResult{}
	}
	maps.Copy(total.cases, stuck)
	return total, nil
}

// about gives the paragraphs of a program's output that mention a case, such as the stacks of its
// threads, and the last lines if none does.
func about(output []byte, name string) string {
	name, _, _ = strings.Cut(name, "/")
	if at := strings.LastIndexAny(name, "."); at >= 0 {
		name = name[at+1:]
	}
	// What runs TestX in Go's packages is often called testX.
	name = strings.ToLower(strings.TrimSuffix(name, ")"))
	var out []string
	for _, p := range strings.Split(string(output), "\n\n") {
		if p = tail([]byte(p)); strings.Contains(strings.ToLower(p), name) {
			out = append(out, p)
		}
	}
	const shown = 5
	if out = out[max(0, len(out)-shown):]; len(out) > 0 {
		return strings.Join(out, "\n\n")
	}
	return tail(output)
}

// tail gives the last lines of a program's output.
func tail(output []byte) string {
	const lines = 40
	all := strings.Split(strings.TrimRight(string(output), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
