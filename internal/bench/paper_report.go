package bench

import (
	"fmt"
	"io"
	"strings"
)

// paperColumns are the metrics of the table, with what to divide them by and their unit; those an app does not have are left
// out.
var paperColumns = []struct {
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

// WritePaperTable writes results as aligned text: for each app a row a metric, a column a mode.
func WritePaperTable(w io.Writer, r PaperResult) error {
	var b strings.Builder
	for _, e := range r.Apps {
		if e.Skipped != "" {
			fmt.Fprintf(&b, "%s: skipped: %s\n\n", e.Name, e.Skipped)
			continue
		}
		fmt.Fprintf(&b, "%s: %s; median of %d rounds of %g s (min..max), ratio to host\n", e.Name, e.paperTitle(), e.Rounds, e.DurationS)
		rows := [][]string{{""}}
		for _, m := range e.Modes {
			rows[0] = append(rows[0], string(m.Mode))
		}
		for _, c := range paperColumns {
			row := []string{c.title}
			for _, m := range e.Modes {
				v, ok := m.Metrics[c.metric]
				if !ok {
					continue
				}
				cell := fmt.Sprintf("%s (%s..%s)", Number(v.Median/c.divisor), Number(v.Min/c.divisor), Number(v.Max/c.divisor))
				if m.Mode != Host && v.RatioToHost > 0 {
					cell += fmt.Sprintf(" %.2fx", v.RatioToHost)
				}
				row = append(row, cell)
			}
			if len(row) > 1 {
				rows = append(rows, row)
			}
		}
		writeAligned(&b, rows)
		b.WriteByte('\n')
	}
	return writeAll(w, b.String())
}

func (e PaperEntry) paperTitle() string {
	if e.Rate > 0 {
		return fmt.Sprintf("%s (%g/s)", e.Title, e.Rate)
	}
	return e.Title
}

// writeAligned writes rows whose columns are as wide as their widest cell.
func writeAligned(b *strings.Builder, rows [][]string) {
	var widths []int
	for _, row := range rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], len(cell))
		}
	}
	for _, row := range rows {
		line := " "
		for i, cell := range row {
			line += " " + pad(cell, widths[i]+1)
		}
		fmt.Fprintln(b, strings.TrimRight(line, " "))
	}
}
