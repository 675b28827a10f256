package core

import (
	"errors"
	"fmt"
	"strings"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/report"
)

// summarize writes the ratios of the core, and the targets that were missed.
func summarize(d *report.Document) (string, error) {
	var results []bench.Result
	if err := d.Read("core.json", &results); err != nil {
		return "", err
	}
	var b strings.Builder
	report.RatioTable(&b, results, bench.Scopes, bench.Modes, []report.SummaryRow{
		{"iperf3", "throughput_bps", "throughput"},
		{"iperf3", "cpu_s_per_gb", "processor time for a gigabyte"},
		{"rr", "rtt_p50_us", "round trip p50"},
		{"rr", "rtt_p99_us", "p99"},
		{"crr", "socket_connect_p50_us", "`socket()`+`connect()` p50"},
		{"crr", "socket_connect_p99_us", "p99"},
		{"crr", "connections_per_s", "connections"},
		{"crr", "cpu_us_per_connection", "processor time for one"},
	})
	verdicts := bench.Judge(results)
	var missed []string
	for _, v := range verdicts {
		if !v.Met {
			missed = append(missed,
				fmt.Sprintf("%s %s is %.2f (wanted: %s)", v.Title, v.Scope.Title(), v.Ratio, v.Wanted))
		}
	}
	fmt.Fprintf(&b, "\n%d of %d [targets](benchmarks/method.md#targets) met.",
		len(verdicts)-len(missed), len(verdicts))
	if len(missed) > 0 {
		fmt.Fprintf(&b, " Missed: %s.", strings.Join(missed, "; "))
	}
	b.WriteByte('\n')
	return b.String(), nil
}

// summarizeCallers writes the ratios of new connections by several callers.
func summarizeCallers(d *report.Document) (string, error) {
	var results []bench.Result
	if err := d.Read("callers.json", &results); err != nil {
		return "", err
	}
	var b strings.Builder
	report.RatioTable(&b, results, bench.Scopes, report.ModesOf(results), report.ConnectRows())
	verdicts := report.JudgeConnects(results, bench.Heddle, report.WithoutPool)
	fmt.Fprintf(&b, "\nGoals without a pool ([each](benchmarks/tables.md#new-connections-by-several-callers)): %s.\n", report.SummarizeConnects(verdicts))
	return b.String(), nil
}

// writeReport writes the tables of what `heddle bench` measures unless it is told otherwise, and of
// new connections by several callers.
func writeReport(d *report.Document) error {
	var core, callers []bench.Result
	if err := errors.Join(d.Read("core.json", &core), d.Read("callers.json", &callers)); err != nil {
		return err
	}
	t := report.MarkdownTable{Results: core, Modes: bench.Modes}
	t.Header("| scope | metric |", 2)
	for _, name := range []string{"iperf3", "rr", "crr"} {
		for _, scope := range bench.Scopes {
			for _, m := range bench.WorkloadNamed(name).Metrics {
				unit, _ := m.Unit.Scale()
				t.Row(scope, name, m.Name, fmt.Sprintf("| %s | `%s`, %s |", scope, m.Name, unit))
			}
		}
	}
	var b strings.Builder
	b.WriteString(report.ConnectTable(callers, report.ModesOf(callers)).Text())
	report.ConnectGoalsGrid(bench.Heddle, report.JudgeConnects(callers, bench.Heddle, report.WithoutPool)).Markdown(&b)
	return errors.Join(d.Section("core", t.Text()), d.Section("callers", b.String()+"\n"))
}
