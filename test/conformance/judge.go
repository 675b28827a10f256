package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// difference is a case that ends worse through Heddle than on the overlay.
type difference struct {
	name        string
	on, through caseResult // on the overlay, through Heddle
	aloneOn     tally      // when it was run again alone, on the overlay
	alone       tally      // the same, through Heddle
	again       tally      // when all of its module was run again, through Heddle
}

// tally counts runs of one case, and those in which it ended as it did through Heddle at first.
type tally struct{ failed, runs int }

func (t tally) String() string { return fmt.Sprintf("%d of %d", t.failed, t.runs) }

// verdict is the comparison of a module's two runs.
type verdict struct {
	module
	on, through moduleRun
	worse       []difference
}

// retries is how often a case that differs is run alone in each mode.
const retries = 3

// slack is how much more time than the overlay Heddle gets before a case counts as hung, and
// leastLimit what it gets at least: the overlay's time on a busy machine may not be Heddle's.
const (
	slack      = 4
	leastLimit = time.Minute
)

// judge runs m in both modes and tries what differs again.
func judge(ctx context.Context, l *lab, m module) (verdict, error) {
	v := verdict{module: m}
	var err error
	if v.on, err = runCounted(ctx, l, m, overlay, m.limit); err != nil {
		return v, err
	}
	if v.on.broken != "" || len(v.on.cases) == 0 {
		return v, fmt.Errorf("the overlay gives nothing to compare with: %d cases, %s", len(v.on.cases), v.on.broken)
	}
	limit := min(m.limit, max(leastLimit, slack*time.Duration(v.on.seconds*float64(time.Second)))).Round(time.Second)
	if v.through, err = runCounted(ctx, l, m, heddle, limit); err != nil {
		return v, err
	}
	v.worse = compare(v.on.cases, v.through.cases)
	if err := v.tryAgain(ctx, l, limit); err != nil {
		return v, err
	}
	return v, errors.Join(l.alive(ctx), l.closed(ctx))
}

// compare gives the cases that ended worse through Heddle, by name. One that was skipped there, or
// did not run, while the overlay ran it, is no better than a failure.
func compare(on, through map[string]caseResult) []difference {
	var out []difference
	for name, there := range through {
		if there.outcome == failed && on[name].outcome != failed {
			out = append(out, difference{name: name, on: orMissing(on, name), through: there})
		}
	}
	for name, here := range on {
		there := orMissing(through, name)
		if here.outcome == passed && there.outcome == skipped {
			out = append(out, difference{name: name, on: here, through: there})
		}
	}
	// A test fails if one of its subtests does: the subtest is what differs.
	out = slices.DeleteFunc(slices.Clone(out), func(d difference) bool {
		return slices.ContainsFunc(out, func(sub difference) bool { return strings.HasPrefix(sub.name, d.name+"/") })
	})
	slices.SortFunc(out, func(a, b difference) int { return strings.Compare(a.name, b.name) })
	return out
}

// missing is a case that a run does not know.
var missing = caseResult{skipped, "did not run"}

func orMissing(cases map[string]caseResult, name string) caseResult {
	if c, ok := cases[name]; ok {
		return c
	}
	return missing
}

// tryAgain runs each case that differs alone in both modes, and the whole module once more if one
// then passes: a case may fail only after others.
func (v *verdict) tryAgain(ctx context.Context, l *lab, limit time.Duration) error {
	if len(v.worse) == 0 {
		return nil
	}
	for i := range v.worse {
		d := &v.worse[i]
		for range retries {
			for mode, t := range map[string]*tally{overlay: &d.aloneOn, heddle: &d.alone} {
				r, err := runModule(ctx, l, v.module, mode, selection{only: []string{d.name}}, min(limit, leastLimit))
				if err != nil {
					return err
				}
				t.count(d.bad(r, mode))
			}
		}
	}
	if slices.ContainsFunc(v.worse, func(d difference) bool { return d.alone.failed == 0 }) {
		r, err := runModule(ctx, l, v.module, heddle, selection{}, limit)
		if err != nil {
			return err
		}
		for i := range v.worse {
			v.worse[i].again.count(v.worse[i].bad(r, heddle))
		}
	}
	return nil
}

func (t *tally) count(bad bool) {
	t.runs++
	if bad {
		t.failed++
	}
}

// bad reports whether the case ended in r as it did through Heddle at first. A run that gave no
// results speaks against Heddle only.
func (d difference) bad(r moduleRun, mode string) bool {
	if r.broken != "" {
		return mode == heddle
	}
	if d.through.outcome == failed {
		return r.cases[d.name].outcome == failed
	}
	return orMissing(r.cases, d.name).outcome != passed
}

// flaky reports whether the case ends so by chance: on the overlay too, or through Heddle less
// often than not.
func (d difference) flaky() bool {
	return d.aloneOn.failed > 0 || 2*d.alone.failed < d.alone.runs && d.again.failed == 0
}

// class says what a difference counts as.
func (v verdict) class(d difference) class {
	switch {
	case d.flaky():
		return flaky
	case v.reason(d) != "":
		return stays
	}
	return fails
}

// class is what a case that ended worse counts as.
type class string

const (
	fails class = "fails"
	stays class = "known"
	flaky class = "flaky"
)

// count gives how many of the module's differences are of a class.
func (v verdict) count(c class) int {
	n := 0
	for _, d := range v.worse {
		if v.class(d) == c {
			n++
		}
	}
	return n
}

// differs reports whether Heddle did worse than it may.
func (v verdict) differs() bool {
	return v.through.broken != "" || v.count(fails) > 0 || len(v.outlived()) > 0
}
