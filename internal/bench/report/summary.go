package report

import (
	"fmt"
	"strings"

	"heddle.dev/heddle/internal/bench"
)

// SummaryRow is a workload, one of its metrics, and the metric's title.
type SummaryRow [3]string

// RatioTable has the host's median of each metric, and the other modes' ratios to it, in both
// scopes side by side.
func RatioTable(b *strings.Builder, results []bench.Result, scopes []bench.Scope, modes []bench.Mode, rows []SummaryRow) {
	head, rule := "| |", "|---|"
	for _, scope := range scopes {
		for _, m := range modes {
			title := string(m)
			if m == bench.Host {
				title = scope.Title() + ": " + title
			}
			head, rule = head+" "+title+" |", rule+"---|"
		}
	}
	fmt.Fprintf(b, "%s\n%s\n", head, rule)
	for _, row := range rows {
		metric, _ := bench.MetricNamed(row[0], row[1])
		unit, divisor := metric.Unit.Scale()
		direction := "↓"
		if metric.Higher {
			direction = "↑"
		}
		fmt.Fprintf(b, "| %s, %s %s |", row[2], unit, direction)
		for _, scope := range scopes {
			for _, m := range modes {
				r, ok := Find(results, scope, row[0], row[1], m)
				switch {
				case !ok:
					b.WriteString(" |")
				case m == bench.Host:
					fmt.Fprintf(b, " %s |", bench.Number(r.Median/divisor))
				case m == bench.Heddle || m == bench.Pooled:
					fmt.Fprintf(b, " **%.2f** |", r.RatioToHost)
				default:
					fmt.Fprintf(b, " %.2f |", r.RatioToHost)
				}
			}
		}
		b.WriteByte('\n')
	}
}
