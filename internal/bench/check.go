package bench

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// Moved says how a metric of Heddle's stands to what it was.
type Moved string

// The verdicts of a comparison.
const (
	Better      Moved = "better"
	Same        Moved = "same" // as far as the runs of both can tell
	Worse       Moved = "worse"
	NotMeasured Moved = "not measured" // on one of the two sides
)

// Comparison is one metric of Heddle's, as ratios to host: in committed results, and now.
type Comparison struct {
	File           string // of the committed results; Compare leaves it empty
	Workload       string
	Scope          Scope
	Metric         Metric
	Committed, Now float64 // ratios to host; 0: not measured
	// Tolerance is the relative change that is within what the runs differ by: 0.1 is a tenth.
	Tolerance float64
	Moved     Moved
}

const (
	// leastTolerance is what ratios differ by from one session to the next with the same program, however even the runs of
	// each were: a virtual machine is not the same machine every day.
	leastTolerance = 0.10
	// spreadFactor times the half ranges of what goes into two ratios: with 5 runs a half range is about twice the
	// standard error of a median, so that this is about three standard errors of their quotient.
	spreadFactor = 1.5
)

// checkedMetrics are those that runs of a second hold still enough to compare. Tails are not among them.
func checkedMetrics(workload string) (checked []Metric) {
	for _, m := range workloadNamed(workload).Metrics {
		if !strings.Contains(m.Name, "_p99_") {
			checked = append(checked, m)
		}
	}
	return checked
}

// Compare judges each metric of Heddle's in workloads that were measured now, or in any of the committed ones if
// there is no such result now, by its ratio to host. It is in the order of reports.
//
// A change counts from a tolerance on that comes from the spread of all four series: Heddle's and the host's, then and
// now. Spreads are independent, so their squares add up.
func Compare(committed, now []Result) (all []Comparison) {
	for _, w := range Workloads {
		measured := func(results []Result) bool {
			return slices.ContainsFunc(results, func(r Result) bool { return r.Workload == w.Name && r.Mode == Heddle })
		}
		if !measured(committed) && !measured(now) {
			continue
		}
		for _, scope := range Scopes {
			for _, m := range checkedMetrics(w.Name) {
				c := Comparison{Workload: w.Name, Scope: scope, Metric: m, Moved: NotMeasured}
				before, thereBefore := ratioOf(committed, w.Name, scope, m.Name)
				after, thereNow := ratioOf(now, w.Name, scope, m.Name)
				if !thereBefore && !thereNow {
					continue
				}
				c.Committed, c.Now = before.ratio, after.ratio
				if thereBefore && thereNow {
					c.Tolerance = max(leastTolerance, spreadFactor*math.Hypot(before.spread, after.spread))
					c.Moved = moved(after.ratio/before.ratio, c.Tolerance, m.Higher)
				}
				all = append(all, c)
			}
		}
	}
	return all
}

// moved judges a change, which is a quotient. The tolerance is the same in both directions: a half is as far away as twice.
func moved(change, tolerance float64, higherIsBetter bool) Moved {
	switch {
	case change > 1/(1+tolerance) && change < 1+tolerance:
		return Same
	case change > 1 == higherIsBetter:
		return Better
	default:
		return Worse
	}
}

// spreadRatio is a ratio of medians with the relative spread that it inherits.
type spreadRatio struct{ ratio, spread float64 }

// ratioOf gives Heddle's ratio to host; there is none if one of the two is missing or has no usable value.
func ratioOf(results []Result, workload string, scope Scope, metric string) (_ spreadRatio, ok bool) {
	var heddle, host Result
	for _, r := range results {
		if r.Workload == workload && r.Scope == scope && r.Metric == metric {
			switch r.Mode {
			case Heddle:
				heddle = r
			case Host:
				host = r
			}
		}
	}
	if !(heddle.Median > 0 && host.Median > 0) { // not: <= 0, which NaN would pass
		return spreadRatio{}, false
	}
	return spreadRatio{heddle.Median / host.Median, math.Hypot(halfRange(heddle), halfRange(host))}, true
}

// halfRange is half of what lies between the smallest and the largest run, relative to the median.
func halfRange(r Result) float64 { return max(0, r.Max-r.Min) / 2 / r.Median }

// Confirm gives first with the verdicts that a second measurement of the same repeats. What it does not repeat was noise. What
// it did not measure stays as it is.
func Confirm(first, second []Comparison) []Comparison {
	confirmed := slices.Clone(first)
	for i, a := range confirmed {
		for _, b := range second {
			if a.File == b.File && a.Workload == b.Workload && a.Scope == b.Scope && a.Metric.Name == b.Metric.Name &&
				a.Moved != b.Moved && b.Moved != NotMeasured {
				confirmed[i].Moved, confirmed[i].Now, confirmed[i].Tolerance = Same, b.Now, max(a.Tolerance, b.Tolerance)
			}
		}
	}
	return confirmed
}

// Suspects gives the workloads and scopes of which a metric got worse.
func Suspects(all []Comparison) (workloads, scopes []string) {
	for _, c := range all {
		if c.Moved != Worse {
			continue
		}
		if !slices.Contains(workloads, c.Workload) {
			workloads = append(workloads, c.Workload)
		}
		if !slices.Contains(scopes, string(c.Scope)) {
			scopes = append(scopes, string(c.Scope))
		}
	}
	return workloads, scopes
}

// WriteComparisons writes a table: metric, committed, now, verdict. Ratios are to host.
func WriteComparisons(w io.Writer, all []Comparison) error {
	var b strings.Builder
	rows := [][]string{{"metric (ratio to host)", "committed", "now", "change", "tolerance", "verdict", "against"}}
	ratio := func(v float64) string {
		if v == 0 {
			return "-"
		}
		return fmt.Sprintf("%.2f", v)
	}
	for _, c := range all {
		change, tolerance := "-", "-"
		if c.Moved != NotMeasured {
			change, tolerance = fmt.Sprintf("%+.0f %%", 100*(c.Now/c.Committed-1)), fmt.Sprintf("%.0f %%", 100*c.Tolerance)
		}
		better := "lower is better"
		if c.Metric.Higher {
			better = "higher is better"
		}
		rows = append(rows, []string{
			fmt.Sprintf("%s %s, %s (%s)", c.Workload, c.Scope.Title(), c.Metric.Title, better),
			ratio(c.Committed), ratio(c.Now), change, tolerance, string(c.Moved), c.File,
		})
	}
	writeAligned(&b, rows)
	return writeAll(w, b.String())
}
