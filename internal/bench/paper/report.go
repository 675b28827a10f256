package paper

import (
	"fmt"
	"io"
	"strings"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/report"
)

// columns are the metrics of the table, with what to divide them by and their unit; those an app
// does not have are left out.
var columns = []struct {
	metric, title string
	divisor       float64
}{
	{MetricRate, "operations/s", 1},
	{MetricUnkept, "of the rate not kept, %", 0.01},
	{"set_mean_us", "SET mean, us", 1}, {"set_p999_us", "SET p99.9, us", 1},
	{"get_mean_us", "GET mean, us", 1}, {"get_p999_us", "GET p99.9, us", 1},
	{MetricThroughput, "throughput, Gbit/s", 1e9},
	{"transaction_mean_us", "mean, us", 1}, {"transaction_p50_us", "p50, us", 1}, {"transaction_p99_us", "p99, us", 1}, {"transaction_p999_us", "p99.9, us", 1},
	{"record_mean_us", "mean, us", 1}, {"record_p50_us", "p50, us", 1}, {"record_p99_us", "p99, us", 1}, {"record_p999_us", "p99.9, us", 1},
	{"request_mean_us", "mean, us", 1}, {"request_p50_us", "p50, us", 1}, {"request_p99_us", "p99, us", 1}, {"request_p999_us", "p99.9, us", 1},
	{MetricCPUPerOp, "CPU per operation, us", 1},
	{MetricCPU, "processors", 1}, {MetricUser, "  user", 1}, {MetricSystem, "  system", 1}, {MetricSoftIRQ, "  softirq", 1},
	{MetricServerCPU, "  server's processes", 1}, {MetricClientCPU, "  client's processes", 1},
}

// WriteTable writes results as aligned text: for each app a row a metric, a column a mode.
func WriteTable(w io.Writer, r Result) error {
	var b strings.Builder
	for _, e := range r.Apps {
		if e.Skipped != "" {
			fmt.Fprintf(&b, "%s: skipped: %s\n\n", e.Name, e.Skipped)
			continue
		}
		fmt.Fprintf(&b, "%s: %s; median of %d rounds of %g s (min..max), ratio to host\n", e.Name, e.title(), e.Rounds, e.DurationS)
		g := report.Grid{Rows: [][]string{{""}}}
		for _, m := range e.Modes {
			g.Rows[0] = append(g.Rows[0], string(m.Mode))
		}
		for _, c := range columns {
			row := []string{c.title}
			for _, m := range e.Modes {
				v, ok := m.Metrics[c.metric]
				if !ok {
					continue
				}
				cell := fmt.Sprintf("%s (%s..%s)", bench.Number(v.Median/c.divisor), bench.Number(v.Min/c.divisor), bench.Number(v.Max/c.divisor))
				if m.Mode != bench.Host && v.RatioToHost > 0 {
					cell += fmt.Sprintf(" %.2fx", v.RatioToHost)
				}
				row = append(row, cell)
			}
			if len(row) > 1 {
				g.Add(row...)
			}
		}
		g.Text(&b)
		b.WriteByte('\n')
	}
	return report.WriteAll(w, b.String())
}

func (e Entry) title() string {
	if e.Rate > 0 {
		return fmt.Sprintf("%s (%g/s)", e.Title, e.Rate)
	}
	return e.Title
}
