// Package report writes results: tables as text, files, and the parts of documents
// that are made of committed results.
package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"heddle.dev/heddle/internal/bench"
)

// Table is one workload in one scope: a line for each metric, a column for each mode. (Modes side
// by side are what one compares, and five metrics side by side do not fit a terminal.)
type Table struct {
	Workload bench.Workload
	Scope    bench.Scope
	Modes    []bench.Mode
	runs     int
	Cells    map[string]map[bench.Mode]bench.Result // by metric
}

// Tables groups results, in their order.
func Tables(results []bench.Result) []*Table {
	var all []*Table
	for _, r := range results {
		var t *Table
		if n := len(all); n > 0 && all[n-1].Workload.Name == r.Workload && all[n-1].Scope == r.Scope {
			t = all[n-1]
		} else {
			t = &Table{Workload: bench.WorkloadNamed(r.Workload), Scope: r.Scope, runs: r.Runs, Cells: make(map[string]map[bench.Mode]bench.Result)}
			all = append(all, t)
		}
		if n := len(t.Modes); n == 0 || t.Modes[n-1] != r.Mode {
			t.Modes = append(t.Modes, r.Mode)
		}
		if t.Cells[r.Metric] == nil {
			t.Cells[r.Metric] = make(map[bench.Mode]bench.Result)
		}
		t.Cells[r.Metric][r.Mode] = r
	}
	return all
}

// title names the table.
func (t *Table) title() string {
	client, server := t.Scope.Ends()
	return fmt.Sprintf("%s, %s (%s to %s), median of %d (min..max), ratio to host",
		t.Workload.Title, t.Scope.Title(), client, server, t.runs)
}

// WriteTable writes results as aligned text. It ends with the verdicts on the targets and, if the
// floor was measured, on the goals of new connections.
func WriteTable(w io.Writer, results []bench.Result) error {
	var b strings.Builder
	for _, t := range Tables(results) {
		t.text(&b)
		b.WriteByte('\n')
	}
	writeVerdicts(&b, results)
	if slices.Contains(ModesOf(results), bench.Floor) {
		g := ConnectGoalsGrid(bench.Heddle, JudgeConnects(results, bench.Heddle, WithoutPool))
		g.Title = "\nGoals of new connections:"
		g.Text(&b)
	}
	return WriteAll(w, b.String())
}

// text writes one table. Every column of pieces is as wide as its widest.
func (t *Table) text(b *strings.Builder) {
	fmt.Fprintf(b, "%s\n", t.title())
	labels := 0
	widths := make(map[bench.Mode]*[3]int)
	for _, mode := range t.Modes {
		widths[mode] = &[3]int{}
	}
	for _, m := range t.Workload.Metrics {
		labels = max(labels, utf8.RuneCountInString(m.Label()))
		for _, mode := range t.Modes {
			for i, part := range t.Cells[m.Name][mode].Parts() {
				widths[mode][i] = max(widths[mode][i], len(part))
			}
		}
	}
	line := bench.Pad("", labels)
	for _, mode := range t.Modes {
		w := widths[mode]
		line += "   " + bench.Pad(string(mode), w[0]+w[1]+w[2]+2)
	}
	fmt.Fprintf(b, "  %s\n", strings.TrimRight(line, " "))
	for _, m := range t.Workload.Metrics {
		line := bench.Pad(m.Label(), labels)
		for _, mode := range t.Modes {
			p, w := t.Cells[m.Name][mode].Parts(), widths[mode]
			line += fmt.Sprintf("   %*s %s %*s", w[0], p[0], bench.Pad(p[1], w[1]), w[2], p[2])
		}
		fmt.Fprintf(b, "  %s\n", strings.TrimRight(line, " "))
	}
}

// judgedRuns is how many runs the targets ask for.
const judgedRuns = 5

func writeVerdicts(b *strings.Builder, results []bench.Result) {
	verdicts := bench.Judge(results)
	if len(verdicts) == 0 {
		return
	}
	b.WriteString("Targets")
	if runs := results[0].Runs; runs < judgedRuns {
		fmt.Fprintf(b, " (%d runs show the shape; judge by %d or more)", runs, judgedRuns)
	}
	b.WriteString(":\n")
	for _, v := range verdicts {
		fmt.Fprintln(b, v)
	}
}
