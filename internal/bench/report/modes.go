package report

import (
	"fmt"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/bench"
)

// ConnectWorkloads are new connections by one caller and by several.
var ConnectWorkloads = []string{"crr", "crr8", "crr64"}

// connectMetrics are the rows of each of them.
var connectMetrics = []struct{ name, title string }{
	{"socket_p50_us", "`socket()` p50, us"},
	{"socket_connect_p50_us", "`socket()`+`connect()` p50, us"},
	{"socket_connect_p99_us", "p99, us"},
	{"connections_per_s", "connections a second, k"},
	{"cpu_us_per_connection", "CPU a connection, us"},
}

// ModesOf gives the modes that were measured, in the order of reports.
func ModesOf(results []bench.Result) []bench.Mode {
	return slices.DeleteFunc(slices.Clone(bench.AllModes), func(m bench.Mode) bool {
		return !slices.ContainsFunc(results, func(r bench.Result) bool { return r.Mode == m })
	})
}

// ConnectTable has what was measured of new connections, by scope and number of callers.
func ConnectTable(results []bench.Result, modes []bench.Mode) *MarkdownTable {
	t := &MarkdownTable{Results: results, Modes: modes}
	t.Header("| |", 1)
	for _, scope := range bench.Scopes {
		for _, w := range ConnectWorkloads {
			for i, m := range connectMetrics {
				title := m.title
				if i == 0 {
					title = fmt.Sprintf("%s, %s: %s", scope.Title(), callersOf(w), title)
				}
				t.Row(scope, w, m.name, "| "+title+" |")
			}
		}
	}
	return t
}

// MarkdownTable has a column for each mode, with median, smallest and largest, and one for its
// ratio to the host.
type MarkdownTable struct {
	Results []bench.Result
	Modes   []bench.Mode
	b       strings.Builder
}

// Header begins the table; first are the headings of so many columns before the modes'.
func (t *MarkdownTable) Header(first string, columns int) {
	t.b.WriteString("\n" + first)
	for _, m := range t.Modes {
		fmt.Fprintf(&t.b, " %s |", m)
		if m != bench.Host {
			t.b.WriteString(" ratio |")
		}
	}
	t.b.WriteString("\n" + strings.Repeat("|---", columns+2*len(t.Modes)-1) + "|\n")
}

// Row adds a metric of all modes, if it was measured; first is the text of the columns before the
// modes'.
func (t *MarkdownTable) Row(scope bench.Scope, workload, metric, first string) {
	if _, ok := Find(t.Results, scope, workload, metric, bench.Host); !ok {
		return
	}
	t.b.WriteString(first)
	for _, m := range t.Modes {
		f, ok := Find(t.Results, scope, workload, metric, m)
		if !ok {
			t.b.WriteString(" - | - |")
			continue
		}
		_, divisor := f.Unit.Scale()
		fmt.Fprintf(&t.b, " %s (%s..%s) |", bench.Number(f.Median/divisor), bench.Number(f.Min/divisor), bench.Number(f.Max/divisor))
		if m != bench.Host {
			fmt.Fprintf(&t.b, " %.2f |", f.RatioToHost)
		}
	}
	t.b.WriteByte('\n')
}

// Text is the whole table, with an empty line before and after.
func (t *MarkdownTable) Text() string { return t.b.String() + "\n" }

func Find(results []bench.Result, scope bench.Scope, workload, metric string, mode bench.Mode) (bench.Result, bool) {
	i := slices.IndexFunc(results, func(f bench.Result) bool {
		return f.Scope == scope && f.Workload == workload && f.Metric == metric && f.Mode == mode
	})
	if i < 0 {
		return bench.Result{}, false
	}
	return results[i], true
}

// ConnectRows are p50, p99 and the rate of new connections by 1, 8 and 64 callers.
func ConnectRows() (rows []SummaryRow) {
	for _, w := range ConnectWorkloads {
		rows = append(rows,
			SummaryRow{w, "socket_connect_p50_us", callersOf(w) + ": `socket()`+`connect()` p50"},
			SummaryRow{w, "socket_connect_p99_us", "p99"},
			SummaryRow{w, "connections_per_s", "connections"})
	}
	return rows
}
