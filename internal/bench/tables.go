package bench

import (
	"fmt"
	"slices"
	"strings"
)

// The tables of `heddle bench` stand between these lines of the document.
const (
	CoreDocBegin    = "<!-- `heddle bench report` writes from here: core -->\n"
	CoreDocEnd      = "<!-- to here: core -->\n"
	CallersDocBegin = "<!-- `heddle bench report` writes from here: callers -->\n"
	CallersDocEnd   = "<!-- to here: callers -->\n"
)

// connectWorkloads are new connections by one caller and by several.
var connectWorkloads = []string{"crr", "crr8", "crr64"}

// connectMetrics are the rows of each of them.
var connectMetrics = []struct{ name, title string }{
	{"socket_p50_us", "`socket()` p50, us"},
	{"socket_connect_p50_us", "`socket()`+`connect()` p50, us"},
	{"socket_connect_p99_us", "p99, us"},
	{"connections_per_s", "connections a second, k"},
	{"cpu_us_per_connection", "CPU a connection, us"},
}

// ReplaceTables writes results of `heddle bench` into a document, each table between its two marks: core are those of the workloads
// that it runs unless told otherwise, callers those of new connections by several callers.
func ReplaceTables(document []byte, core, callers []Result) ([]byte, error) {
	modes := []Mode{Host, Overlay, Heddle}
	c := markdownTable{results: core, modes: modes}
	c.header("| scope | metric |", 2)
	for _, name := range []string{"iperf3", "rr", "crr"} {
		for _, scope := range Scopes {
			i := slices.IndexFunc(Workloads, func(w Workload) bool { return w.Name == name })
			for _, m := range Workloads[i].Metrics {
				unit, _ := m.Unit.Scale()
				c.row(scope, name, m.Name, fmt.Sprintf("| %s | `%s`, %s |", scope, m.Name, unit))
			}
		}
	}
	document, err := ReplaceBetween(document, c.text(), CoreDocBegin, CoreDocEnd)
	if err != nil {
		return nil, err
	}
	t := connectTable(callers, modes)
	return ReplaceBetween(document, t.text(), CallersDocBegin, CallersDocEnd)
}

// connectTable has what was measured of new connections, by scope and number of callers.
func connectTable(results []Result, modes []Mode) *markdownTable {
	t := &markdownTable{results: results, modes: modes}
	t.header("| |", 1)
	for _, scope := range Scopes {
		for _, w := range connectWorkloads {
			for i, m := range connectMetrics {
				title := m.title
				if i == 0 {
					callers := strings.TrimPrefix(w, "crr") + " callers"
					if w == "crr" {
						callers = "1 caller"
					}
					title = fmt.Sprintf("%s, %s: %s", scope.Title(), callers, title)
				}
				t.row(scope, w, m.name, "| "+title+" |")
			}
		}
	}
	return t
}

// markdownTable has a column for each mode, with median, smallest and largest, and one for its ratio to the host.
type markdownTable struct {
	results []Result
	modes   []Mode
	b       strings.Builder
}

// header begins the table; first are the headings of so many columns before the modes'.
func (t *markdownTable) header(first string, columns int) {
	t.b.WriteString("\n" + first)
	for _, m := range t.modes {
		fmt.Fprintf(&t.b, " %s |", m)
		if m != Host {
			t.b.WriteString(" ratio |")
		}
	}
	t.b.WriteString("\n" + strings.Repeat("|---", columns+2*len(t.modes)-1) + "|\n")
}

// row adds a metric of all modes, if it was measured; first is the text of the columns before the modes'.
func (t *markdownTable) row(scope Scope, workload, metric, first string) {
	if _, ok := findResult(t.results, scope, workload, metric, Host); !ok {
		return
	}
	t.b.WriteString(first)
	for _, m := range t.modes {
		f, ok := findResult(t.results, scope, workload, metric, m)
		if !ok {
			t.b.WriteString(" - | - |")
			continue
		}
		_, divisor := f.Unit.Scale()
		fmt.Fprintf(&t.b, " %s (%s..%s) |", Number(f.Median/divisor), Number(f.Min/divisor), Number(f.Max/divisor))
		if m != Host {
			fmt.Fprintf(&t.b, " %.2f |", f.RatioToHost)
		}
	}
	t.b.WriteByte('\n')
}

// text is the whole table, with an empty line before and after.
func (t *markdownTable) text() []byte { return []byte(t.b.String() + "\n") }

func findResult(results []Result, scope Scope, workload, metric string, mode Mode) (Result, bool) {
	i := slices.IndexFunc(results, func(f Result) bool {
		return f.Scope == scope && f.Workload == workload && f.Metric == metric && f.Mode == mode
	})
	if i < 0 {
		return Result{}, false
	}
	return results[i], true
}
