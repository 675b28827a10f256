package main

import (
	"slices"
	"testing"
)

// TestCompare checks which cases count as worse.
func TestCompare(t *testing.T) {
	is := func(o outcome) caseResult { return caseResult{outcome: o} }
	on := map[string]caseResult{
		"both pass": is(passed), "both fail": is(failed), "both skip": is(skipped), "better": is(failed),
		"fails": is(passed), "skipped": is(passed), "lost": is(passed), "skip to fail": is(skipped),
		"TestA": is(passed), "TestA/b": is(passed), "TestA/c": is(passed),
	}
	through := map[string]caseResult{
		"both pass": is(passed), "both fail": is(failed), "both skip": is(skipped), "better": is(passed),
		"fails": is(failed), "skipped": is(skipped), "skip to fail": is(failed), "only here": is(failed),
		"TestA": is(failed), "TestA/b": is(failed), "TestA/c": is(passed),
	}
	var got []string
	for _, d := range compare(on, through) {
		got = append(got, d.name)
	}
	want := []string{"TestA/b", "fails", "lost", "only here", "skip to fail", "skipped"}
	if !slices.Equal(got, want) {
		t.Errorf("worse are %q, want %q", got, want)
	}
}

// TestFlaky checks what counts as chance.
func TestFlaky(t *testing.T) {
	for name, c := range map[string]struct {
		d    difference
		want bool
	}{
		"always":               {difference{aloneOn: tally{0, 3}, alone: tally{3, 3}}, false},
		"mostly":               {difference{aloneOn: tally{0, 3}, alone: tally{2, 3}}, false},
		"seldom":               {difference{aloneOn: tally{0, 3}, alone: tally{1, 3}}, true},
		"on the overlay, too":  {difference{aloneOn: tally{1, 3}, alone: tally{3, 3}}, true},
		"not again":            {difference{aloneOn: tally{0, 3}, alone: tally{0, 3}, again: tally{0, 1}}, true},
		"only with the others": {difference{aloneOn: tally{0, 3}, alone: tally{0, 3}, again: tally{1, 1}}, false},
	} {
		if got := c.d.flaky(); got != c.want {
			t.Errorf("%s: flaky is %t", name, got)
		}
	}
}

// TestVerdict checks that known differences are excused, and only as long as they are seen.
func TestVerdict(t *testing.T) {
	m := module{suite: "go", name: "net"}
	d := difference{name: "TestMultiPathTCP", aloneOn: tally{0, 3}, alone: tally{3, 3}, through: caseResult{outcome: failed}}
	other := d
	other.name = "TestOther"
	both := moduleRun{cases: map[string]caseResult{"TestMultiPathTCP": {outcome: passed}}}
	for name, c := range map[string]struct {
		v    verdict
		want bool
	}{
		"known":              {verdict{module: m, worse: []difference{d}}, false},
		"another":            {verdict{module: m, worse: []difference{d, other}}, true},
		"known, gone":        {verdict{module: m, on: both, through: both}, true},
		"known, did not run": {verdict{module: m}, false},
		"broken":             {verdict{module: module{suite: "go", name: "net/http"}, through: moduleRun{broken: "hangs"}}, true},
		"of another module":  {verdict{module: module{suite: "go", name: "net/http"}, worse: []difference{d}}, true},
		"nothing to see":     {verdict{module: module{suite: "go", name: "net/http"}}, false},
	} {
		if got := c.v.differs(); got != c.want {
			t.Errorf("%s: differs is %t: %q", name, got, c.v.remarks())
		}
	}
}

// TestBad checks what counts as the same end again.
func TestBad(t *testing.T) {
	run := func(o outcome) moduleRun { return moduleRun{cases: map[string]caseResult{"c": {outcome: o}}} }
	failing := difference{name: "c", on: caseResult{outcome: skipped}, through: caseResult{outcome: failed}}
	lost := difference{name: "c", on: caseResult{outcome: passed}, through: missing}
	for name, c := range map[string]struct {
		d    difference
		r    moduleRun
		mode string
		want bool
	}{
		"fails again":              {failing, run(failed), heddle, true},
		"skipped on the overlay":   {failing, run(skipped), overlay, false},
		"not there on the overlay": {failing, moduleRun{}, overlay, false},
		"lost again":               {lost, moduleRun{}, heddle, true},
		"skipped instead":          {lost, run(skipped), heddle, true},
		"passes":                   {lost, run(passed), heddle, false},
		"broken through Heddle":    {failing, moduleRun{broken: "crash"}, heddle, true},
		"broken on the overlay":    {failing, moduleRun{broken: "crash"}, overlay, false},
	} {
		if got := c.d.bad(c.r, c.mode); got != c.want {
			t.Errorf("%s: bad is %t", name, got)
		}
	}
}
