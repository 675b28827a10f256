package bench

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// Scale gives the unit people read a value in, and what to divide it by.
func (u Unit) Scale() (name string, divisor float64) {
	switch u {
	case BitsPerSecond:
		return "Gb/s", 1e9
	case Microseconds:
		return "us", 1
	case PerSecond:
		return "k/s", 1e3
	case Bytes:
		return "kB", 1e3
	default:
		return string(u), 1
	}
}

// Number writes a value with three significant digits, or with all before the point.
func Number(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.2f", v)
	}
}

// table is one workload in one scope: a line for each metric, a column for each mode. (Modes side by side
// are what one compares, and five metrics side by side do not fit a terminal.)
type table struct {
	workload Workload
	scope    Scope
	modes    []Mode
	runs     int
	cells    map[string]map[Mode]Result // by metric
}

// tables groups results, in their order.
func tables(results []Result) []*table {
	var all []*table
	for _, r := range results {
		var t *table
		if n := len(all); n > 0 && all[n-1].workload.Name == r.Workload && all[n-1].scope == r.Scope {
			t = all[n-1]
		} else {
			t = &table{workload: workloadNamed(r.Workload), scope: r.Scope, runs: r.Runs, cells: make(map[string]map[Mode]Result)}
			all = append(all, t)
		}
		if n := len(t.modes); n == 0 || t.modes[n-1] != r.Mode {
			t.modes = append(t.modes, r.Mode)
		}
		if t.cells[r.Metric] == nil {
			t.cells[r.Metric] = make(map[Mode]Result)
		}
		t.cells[r.Metric][r.Mode] = r
	}
	return all
}

// title names the table.
func (t *table) title() string {
	client, server := t.scope.Ends()
	return fmt.Sprintf("%s, %s (%s to %s), median of %d (min..max), ratio to host",
		t.workload.Title, t.scope.Title(), client, server, t.runs)
}

// label names a metric with its unit and the direction that is better.
func (m Metric) label() string {
	unit, _ := m.Unit.Scale()
	if m.Higher {
		return m.Title + ", " + unit + " ↑"
	}
	return m.Title + ", " + unit + " ↓"
}

// parts gives the three pieces of a cell: median, spread, ratio.
func (r Result) parts() [3]string {
	_, divisor := r.Unit.Scale()
	ratio := fmt.Sprintf("%.2fx", r.RatioToHost)
	if r.Mode == Host {
		ratio = ""
	}
	return [3]string{
		Number(r.Median / divisor),
		fmt.Sprintf("(%s..%s)", Number(r.Min/divisor), Number(r.Max/divisor)),
		ratio,
	}
}

// WriteTable writes results as aligned text. It ends with the verdicts on the targets.
func WriteTable(w io.Writer, results []Result) error {
	var b strings.Builder
	for _, t := range tables(results) {
		t.text(&b)
		b.WriteByte('\n')
	}
	writeVerdicts(&b, results, "")
	return writeAll(w, b.String())
}

// text writes one table. Every column of pieces is as wide as its widest.
func (t *table) text(b *strings.Builder) {
	fmt.Fprintf(b, "%s\n", t.title())
	labels := 0
	widths := make(map[Mode]*[3]int)
	for _, mode := range t.modes {
		widths[mode] = &[3]int{}
	}
	for _, m := range t.workload.Metrics {
		labels = max(labels, utf8.RuneCountInString(m.label()))
		for _, mode := range t.modes {
			for i, part := range t.cells[m.Name][mode].parts() {
				widths[mode][i] = max(widths[mode][i], len(part))
			}
		}
	}
	line := pad("", labels)
	for _, mode := range t.modes {
		w := widths[mode]
		line += "   " + pad(string(mode), w[0]+w[1]+w[2]+2)
	}
	fmt.Fprintf(b, "  %s\n", strings.TrimRight(line, " "))
	for _, m := range t.workload.Metrics {
		line := pad(m.label(), labels)
		for _, mode := range t.modes {
			p, w := t.cells[m.Name][mode].parts(), widths[mode]
			line += fmt.Sprintf("   %*s %s %*s", w[0], p[0], pad(p[1], w[1]), w[2], p[2])
		}
		fmt.Fprintf(b, "  %s\n", strings.TrimRight(line, " "))
	}
}

// pad fills s up with blanks on the right.
func pad(s string, width int) string {
	return s + strings.Repeat(" ", max(0, width-utf8.RuneCountInString(s)))
}

// WriteMarkdown writes results as tables of a Markdown document.
func WriteMarkdown(w io.Writer, results []Result) error {
	var b strings.Builder
	for _, t := range tables(results) {
		fmt.Fprintf(&b, "### %s\n\n| |", t.title())
		for _, mode := range t.modes {
			fmt.Fprintf(&b, " %s |", mode)
		}
		b.WriteString("\n|---|" + strings.Repeat("---:|", len(t.modes)) + "\n")
		for _, m := range t.workload.Metrics {
			fmt.Fprintf(&b, "| %s |", m.label())
			for _, mode := range t.modes {
				p := t.cells[m.Name][mode].parts()
				cell := p[0] + " " + p[1]
				if p[2] != "" {
					cell += " **" + p[2] + "**"
				}
				fmt.Fprintf(&b, " %s |", cell)
			}
			b.WriteByte('\n')
		}
		b.WriteByte('\n')
	}
	writeVerdicts(&b, results, "- ")
	return writeAll(w, b.String())
}

// judgedRuns is how many runs the targets ask for.
const judgedRuns = 5

func writeVerdicts(b *strings.Builder, results []Result, bullet string) {
	verdicts := Judge(results)
	if len(verdicts) == 0 {
		return
	}
	b.WriteString("Targets")
	if runs := results[0].Runs; runs < judgedRuns {
		fmt.Fprintf(b, " (%d runs show the shape; judge by %d or more)", runs, judgedRuns)
	}
	b.WriteString(":\n")
	if bullet != "" {
		b.WriteByte('\n')
	}
	for _, v := range verdicts {
		fmt.Fprintf(b, "%s%s\n", bullet, v)
	}
}

func writeAll(w io.Writer, s string) error {
	if _, err := io.WriteString(w, s); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}
