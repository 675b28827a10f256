package session

import (
	"fmt"
	"time"

	"heddle.dev/heddle/internal/bench"
)

// Options reads the flags of a benchmark that runs workloads.
func (s *Session) Options() (o bench.Options, err error) {
	if o.Workloads, err = bench.ParseWorkloads(s.Workloads); err != nil {
		return o, err
	}
	if o.Scopes, err = s.ParseScopes(); err != nil {
		return o, err
	}
	if o.Modes, err = bench.ParseAllModes(s.Modes); err != nil {
		return o, err
	}
	o.Runs, o.Duration = s.Runs, s.Duration
	o.Progress = func(p bench.Progress) {
		s.Step(fmt.Sprintf("run %d: %s", p.Run, p.Cell), p.Done, p.Total, p.Remaining)
	}
	return o, o.Validate()
}

// Step says what is measured next, and how far the benchmark is. total is 0 if that is not known,
// remaining before the first measurement.
func (s *Session) Step(what string, done, total int, remaining time.Duration) {
	if total > 0 {
		what = fmt.Sprintf("[%3d/%d] %s", done+1, total, what)
	}
	if remaining > 0 {
		what += fmt.Sprintf(", %s left", remaining.Round(time.Second))
	}
	s.Say("%s", what)
}
