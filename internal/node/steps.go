package node

import (
	"errors"
	"fmt"
	"slices"
)

// step is one of several that make something whole: what it does, and beside it what takes that
// back.
type step struct {
	what string
	do   func() error
	// undo also takes back what do did half or not at all. nil: there is nothing to take back.
	undo func() error
}

// doSteps does steps in order until one fails.
func doSteps(steps []step) error {
	for _, s := range steps {
		if err := s.do(); err != nil {
			return fmt.Errorf("%s: %w", s.what, err)
		}
	}
	return nil
}

// undoSteps takes steps back, the last first, all of them whatever fails.
func undoSteps(steps []step) error {
	var errs []error
	for _, s := range slices.Backward(steps) {
		if s.undo != nil {
			if err := s.undo(); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", s.what, err))
			}
		}
	}
	return errors.Join(errs...)
}
