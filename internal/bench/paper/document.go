package paper

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/report"
)

// evidence is what the document is made from.
type evidence struct {
	paper Result
	core  []bench.Result // of `heddle bench`, between nodes
}

// ratio gives how much a metric is in one mode as a multiple of another's, with the smallest and
// the largest of the rounds; ok is false if it was not measured.
func (e evidence) ratio(app, metric string, of, to bench.Mode) (ratio float64, text string, ok bool) {
	entry, ok := e.paper.Find(app)
	if !ok {
		return 0, "", false
	}
	if ratio, ok = entry.Ratio(metric, of, to); !ok {
		return 0, "", false
	}
	a, _ := entry.In(of)
	b, _ := entry.In(to)
	low, high := ratio, ratio
	for i, v := range a.Metrics[metric].Values {
		// Rounds measure the modes next to each other.
		if w := b.Metrics[metric].Values; i < len(w) && w[i] > 0 {
			low, high = min(low, v/w[i]), max(high, v/w[i])
		}
	}
	return ratio, fmt.Sprintf("%.2f (%.2f..%.2f)", ratio, low, high), true
}

// coreRatio is ratio of the results of `heddle bench`, between nodes; they have no rounds.
func (e evidence) coreRatio(workload, metric string, of, to bench.Mode) (ratio float64, text string, ok bool) {
	var a, b float64
	for _, r := range e.core {
		if r.Workload == workload && r.Metric == metric && r.Scope == bench.Inter {
			switch r.Mode {
			case of:
				a = r.Median
			case to:
				b = r.Median
			}
		}
	}
	if a == 0 || b == 0 {
		return 0, "", false
	}
	return a / b, fmt.Sprintf("%.2f", a/b), true
}

// busy reports whether an app was measured on a machine that had other things to do.
func (e evidence) busy(app string) bool {
	entry, _ := e.paper.Find(app)
	return entry.Background > report.TooBusy
}

// paperClaim is a row of the table "paper / here". Ratios are of Slim or Heddle to the overlay and
// to the host.
type paperFigure struct {
	figure, what            string
	paperOverlay, paperHost string
	app, metric             string
	core                    bool // of `heddle bench`
	overlayInstead          string
}

var paperFigures = []paperFigure{
	{figure: "6.1", what: "throughput of a connection", paperOverlay: "1.09", paperHost: "1.00", app: "iperf3-free", metric: MetricThroughput},
	{figure: "6.1", what: "round trip of 32 bytes (`rr`)", paperOverlay: "0.54", paperHost: "1.00", app: "rr", metric: "rtt_p50_us", core: true},
	{figure: "6.1", what: "creation of a connection (`crr`)", paperOverlay: "2.06", paperHost: "9.6", app: "crr", metric: "socket_connect_p50_us", core: true},
	{figure: "6a", what: "CPU at 2 Gbit/s (paper: 0 to 25)", paperOverlay: "0.59 to 0.78", paperHost: "1.00", app: "iperf3-2g", metric: MetricCPU},
	{figure: "6a", what: "CPU at 6 Gbit/s", paperOverlay: "0.59 to 0.78", paperHost: "1.00", app: "iperf3-6g", metric: MetricCPU},
	{figure: "6b", what: "softirq at 6 Gbit/s (paper: 22.5)", paperOverlay: "0.51", paperHost: "", app: "iperf3-6g", metric: MetricSoftIRQ},
	{figure: "7", what: "caps of 15, 10, 5 and a rule on a live connection", overlayInstead: "see [Policy](log.md#policy)"},
	{figure: "8a", what: "memcached, operations/s", paperOverlay: "1.66", paperHost: "0.98", app: "memcached", metric: MetricRate},
	{figure: "8b", what: "memcached, mean latency", paperOverlay: "0.58", paperHost: "1.00", app: "memcached", metric: "all_mean_us"},
	{figure: "9", what: "memcached, p99.9 of SET", paperOverlay: "0.59", paperHost: "1.00", app: "memcached", metric: "set_p999_us"},
	{figure: "9", what: "memcached, p99.9 of GET", paperOverlay: "0.59", paperHost: "1.00", app: "memcached", metric: "get_p999_us"},
	{figure: "10", what: "memcached, CPU an operation, both ends", paperOverlay: "", paperHost: "", app: "memcached", metric: MetricCPUPerOp},
	{figure: "10", what: "memcached, CPU of the server, as fast as it goes", paperOverlay: "0.75", paperHost: "1.00", app: "memcached", metric: MetricServerCPU},
	{figure: "6.2.1", what: "memcached at the same rate: CPU of the client", paperOverlay: "0.62", paperHost: "1.00", app: "memcached-rate", metric: MetricClientCPU},
	{figure: "6.2.1", what: "memcached at the same rate: CPU of the server", paperOverlay: "0.46", paperHost: "1.00", app: "memcached-rate", metric: MetricServerCPU},
	{figure: "6.2.1", what: "memcached at the same rate: CPU of both", app: "memcached-rate", metric: MetricCPU},
	{figure: "11", what: "nginx 1 KB, CPU (paper: the server's)", paperOverlay: "0.72", paperHost: "1.05 to 1.07", app: "nginx-1k", metric: MetricCPU},
	{figure: "11", what: "nginx 1 MB, CPU (paper: the server's)", paperOverlay: "0.60", paperHost: "1.05 to 1.07", app: "nginx-1m", metric: MetricCPU},
	{figure: "12a", what: "PostgreSQL, CPU (paper: the server's)", paperOverlay: "0.75", paperHost: "1.00", app: "pgbench", metric: MetricCPU},
	{figure: "12b", what: "Kafka, CPU (paper: the server's)", paperOverlay: "0.89", paperHost: "", app: "kafka", metric: MetricCPU},
	{figure: "table 4", what: "migration of a container", overlayInstead: "see [Migration](log.md#migration)"},
}

// goal is a bound on a ratio.
type goal struct {
	what        string
	app, metric string
	to          bench.Mode
	least, most float64 // one of them is 0
	core        bool
}

// goals are the project's: Heddle as fast and as cheap as the host, and what the overlay must not
// beat.
func goals() (goals []goal) {
	const leastRate, mostCost = 0.98, 1.03
	for _, a := range Apps {
		if a.Rate == 0 {
			goals = append(goals, goal{what: a.Name + ": operations/s", app: a.Name, metric: MetricRate, to: bench.Host, least: leastRate})
		}
		goals = append(goals, goal{what: a.Name + ": CPU an operation", app: a.Name, metric: MetricCPUPerOp, to: bench.Host, most: mostCost})
		if a.family == "iperf3" {
			continue
		}
		p999 := LatencyMetric("all", "p999")
		if a.family == "kafka" {
			p999 = LatencyMetric("record", "p999")
		}
		goals = append(goals, goal{what: a.Name + ": p99.9", app: a.Name, metric: p999, to: bench.Host, most: mostCost})
	}
	return append(goals,
		goal{what: "memcached: operations/s", app: "memcached", metric: MetricRate, to: bench.Overlay, least: 1.5},
		goal{what: "pgbench -C: transactions/s", app: "pgbench-connect", metric: MetricRate, to: bench.Overlay, least: 1},
		goal{what: "connections/s (`crr`)", app: "crr", metric: "connections_per_s", to: bench.Overlay, least: 1, core: true},
		goal{what: "socket()+connect() p50 (`crr`)", app: "crr", metric: "socket_connect_p50_us", to: bench.Host, most: report.WithoutPool.P50, core: true},
		goal{what: "socket()+connect() p99 (`crr`)", app: "crr", metric: "socket_connect_p99_us", to: bench.Host, most: report.WithoutPool.P99, core: true},
	)
}

// section writes the generated part of the document: the table "paper / here", the goals, and what
// was measured when.
func section(paper Result, core []bench.Result) (string, error) {
	if len(paper.Apps) == 0 {
		return "", errors.New("no results")
	}
	e := evidence{paper, core}
	var b strings.Builder
	b.WriteString("\n| figure | what | paper: Slim to overlay | here: Heddle to overlay | paper: Slim to host | here: Heddle to host |\n|---|---|---|---|---|---|\n")
	for _, c := range paperFigures {
		find := e.ratio
		if c.core {
			find = e.coreRatio
		}
		_, overlay, ok := find(c.app, c.metric, bench.Heddle, bench.Overlay)
		_, host, _ := find(c.app, c.metric, bench.Heddle, bench.Host)
		if e.busy(c.app) && strings.HasPrefix(c.metric, "cpu") {
			overlay, host = overlay+" \\*", host+" \\*"
		}
		if c.overlayInstead != "" {
			overlay = c.overlayInstead
		} else if !ok {
			overlay, host = "not measured", "not measured"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", c.figure, c.what, c.paperOverlay, overlay, c.paperHost, host)
	}
	if slices.ContainsFunc(paper.Apps, func(a Entry) bool { return e.busy(a.Name) }) {
		b.WriteString("\n\\* Measured while other programs kept the machine busy, see below: the machine's processors were theirs, too. No goal is judged by such results.\n")
	}
	writeGoals(&b, e)
	b.WriteString("\nMeasured:")
	for i, a := range paper.Apps {
		text := fmt.Sprintf("%d rounds of %g s, %s, %.1f processors busy before", a.Rounds, a.DurationS, a.Machine, a.Background)
		if a.Skipped != "" {
			text = "not measured: " + a.Skipped
		}
		if i > 0 {
			b.WriteByte(';')
		}
		fmt.Fprintf(&b, " `%s` (%s)", a.Name, text)
	}
	b.WriteString(".\n\n")
	return b.String(), nil
}

func writeGoals(b *strings.Builder, e evidence) {
	b.WriteString("\n| goal | wanted | here | |\n|---|---|---|---|\n")
	met, judged := 0, 0
	for _, g := range goals() {
		find := e.ratio
		if g.core {
			find = e.coreRatio
		}
		ratio, text, ok := find(g.app, g.metric, bench.Heddle, g.to)
		if !ok {
			continue
		}
		wanted, verdict := fmt.Sprintf("at most %.2f of %s", g.most, g.to), "**missed**"
		reached := ratio <= g.most
		if g.least > 0 {
			wanted, reached = fmt.Sprintf("at least %.2f of %s", g.least, g.to), ratio >= g.least
		}
		switch {
		case e.busy(g.app):
			verdict = "not judged: busy"
		case reached:
			met, judged, verdict = met+1, judged+1, "met"
		default:
			judged++
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s |\n", g.what, wanted, text, verdict)
	}
	fmt.Fprintf(b, "\n%d of %d goals met of those that were judged.\n", met, judged)
}

// summarize writes the applications' ratios and the goals that were missed.
func summarize(d *report.Document) (string, error) {
	var e evidence
	if err := errors.Join(d.Read(File, &e.paper), d.Read("core.json", &e.core)); err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString("| application | operations/s, to host | processor time, to host | p99.9, to host |" +
		" processor time, to overlay |\n|---|---|---|---|---|\n")
	for _, a := range Apps {
		entry, ok := e.paper.Find(a.Name)
		if !ok {
			continue
		}
		cell := func(metric string, to bench.Mode) string {
			if ratio, ok := entry.Ratio(metric, bench.Heddle, to); ok {
				return fmt.Sprintf("%.2f", ratio)
			}
			return ""
		}
		rate := cell(MetricRate, bench.Host)
		if a.Rate != 0 {
			rate = "fixed"
		}
		p999 := cell(LatencyMetric("all", "p999"), bench.Host) + cell(LatencyMetric("record", "p999"), bench.Host)
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n",
			a.Name, rate, cell(MetricCPUPerOp, bench.Host), p999, cell(MetricCPUPerOp, bench.Overlay))
	}
	var goals strings.Builder
	writeGoals(&goals, e)
	var missed []string
	for line := range strings.Lines(goals.String()) {
		if cells := strings.Split(line, " | "); strings.Contains(line, "**missed**") {
			goal := strings.TrimPrefix(cells[0], "| ")
			missed = append(missed, fmt.Sprintf("%s %s (wanted: %s)", goal, cells[2], cells[1]))
		}
	}
	lines := strings.Split(strings.TrimSpace(goals.String()), "\n")
	fmt.Fprintf(&b, "\n%s", lines[len(lines)-1])
	if len(missed) > 0 {
		fmt.Fprintf(&b, " Missed: %s.", strings.Join(missed, "; "))
	}
	b.WriteByte('\n')
	return b.String(), nil
}
