package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/bench/peer"
)

// summaryParts are the short tables of the page of results. Each is made from committed files
// alone, in the order in which they are named, so that the page says nothing that they do not.
var summaryParts = []struct {
	name  string
	files []string
	write func(b *strings.Builder, raw [][]byte) error
}{
	{"core", []string{"core.json"}, summarizeCore},
	{"local", []string{"local.json"}, summarizeLocal},
	{"callers", []string{"callers.json"}, summarizeCallers},
	{"pool", []string{"pool.json"}, summarizePool},
	{"paper", []string{"paper.json", "core.json"}, summarizePaper},
	{"peers", []string{"peers.json"}, summarizePeers},
	{"policy", []string{"policy.json", "policy-scale.json"}, summarizePolicy},
	{"density", []string{"density.json"}, summarizeDensity},
	{"cost", []string{"cost.json"}, summarizeCost},
}

// SummaryMarks gives the lines of the document between which a part stands.
func SummaryMarks(part string) (from, to string) {
	from = fmt.Sprintf("<!-- `heddle bench summary` writes from here: %s -->\n", part)
	return from, fmt.Sprintf("<!-- to here: %s -->\n", part)
}

// Summarize writes the short tables into a document, from a folder of results. All of the
// document's marks and all of the folder's files have to be there: a page that is half new would be
// worse than none.
func Summarize(document []byte, folder fs.FS) ([]byte, error) {
	for _, part := range summaryParts {
		raw := make([][]byte, len(part.files))
		for i, file := range part.files {
			var err error
			if raw[i], err = fs.ReadFile(folder, file); err != nil {
				return nil, fmt.Errorf("summarize %s: %w", part.name, err)
			}
		}
		var b strings.Builder
		b.WriteByte('\n')
		if err := part.write(&b, raw); err != nil {
			return nil, fmt.Errorf("summarize %s: %w", path.Join(part.files...), err)
		}
		b.WriteByte('\n')
		from, to := SummaryMarks(part.name)
		var err error
		if document, err = ReplaceBetween(document, []byte(b.String()), from, to); err != nil {
			return nil, err
		}
	}
	return document, nil
}

// summaryRow is a metric of a workload.
type summaryRow struct{ workload, metric, title string }

// ratioTable has the host's median of each metric, and the other modes' ratios to it, in both
// scopes side by side.
func ratioTable(b *strings.Builder, results []Result, scopes []Scope, modes []Mode, rows []summaryRow) {
	head, rule := "| |", "|---|"
	for _, scope := range scopes {
		for _, m := range modes {
			title := string(m)
			if m == Host {
				title = scope.Title() + ": " + title
			}
			head, rule = head+" "+title+" |", rule+"---|"
		}
	}
	fmt.Fprintf(b, "%s\n%s\n", head, rule)
	for _, row := range rows {
		metric, _ := MetricNamed(row.workload, row.metric)
		unit, divisor := metric.Unit.Scale()
		direction := "↓"
		if metric.Higher {
			direction = "↑"
		}
		fmt.Fprintf(b, "| %s, %s %s |", row.title, unit, direction)
		for _, scope := range scopes {
			for _, m := range modes {
				r, ok := findResult(results, scope, row.workload, row.metric, m)
				switch {
				case !ok:
					b.WriteString(" |")
				case m == Host:
					fmt.Fprintf(b, " %s |", Number(r.Median/divisor))
				case m == Heddle || m == Pooled:
					fmt.Fprintf(b, " **%.2f** |", r.RatioToHost)
				default:
					fmt.Fprintf(b, " %.2f |", r.RatioToHost)
				}
			}
		}
		b.WriteByte('\n')
	}
}

func summarizeCore(b *strings.Builder, raw [][]byte) error {
	var results []Result
	if err := json.Unmarshal(raw[0], &results); err != nil {
		return err
	}
	ratioTable(b, results, Scopes, Modes, []summaryRow{
		{"iperf3", "throughput_bps", "throughput"},
		{"iperf3", "cpu_s_per_gb", "processor time for a gigabyte"},
		{"rr", "rtt_p50_us", "round trip p50"},
		{"rr", "rtt_p99_us", "p99"},
		{"crr", "socket_connect_p50_us", "`socket()`+`connect()` p50"},
		{"crr", "socket_connect_p99_us", "p99"},
		{"crr", "connections_per_s", "connections"},
		{"crr", "cpu_us_per_connection", "processor time for one"},
	})
	verdicts := Judge(results)
	var missed []string
	for _, v := range verdicts {
		if !v.Met {
			missed = append(missed,
				fmt.Sprintf("%s %s is %.2f (wanted: %s)", v.Title, v.Scope.Title(), v.Ratio, v.Wanted))
		}
	}
	fmt.Fprintf(b, "\n%d of %d [targets](benchmarks/method.md#targets) met.",
		len(verdicts)-len(missed), len(verdicts))
	if len(missed) > 0 {
		fmt.Fprintf(b, " Missed: %s.", strings.Join(missed, "; "))
	}
	b.WriteByte('\n')
	return nil
}

func summarizeLocal(b *strings.Builder, raw [][]byte) error {
	var r LocalResult
	if err := json.Unmarshal(raw[0], &r); err != nil {
		return err
	}
	ratioTable(b, r.Results, []Scope{Intra}, []Mode{Host, Overlay, Heddle, Reno, Unix}, []summaryRow{
		{"stream", "throughput_bps", "throughput, writes of 64 KB"},
		{"stream", "cpu_s_per_gb", "processor time for a gigabyte"},
		{"stream-1k", "throughput_bps", "throughput, writes of 1 KB"},
		{"rr", "rtt_p50_us", "round trip p50"},
	})
	fmt.Fprintf(b, "\n%s; %d runs of %g s. The node gives its sockets %s.\n",
		r.Machine, r.Runs, r.DurationS, r.Congestion)
	return nil
}

// connectRows are p50, p99 and the rate of new connections by 1, 8 and 64 callers.
func connectRows() (rows []summaryRow) {
	for i, callers := range []string{"1 caller", "8 callers", "64 callers"} {
		w := connectWorkloads[i]
		rows = append(rows,
			summaryRow{w, "socket_connect_p50_us", callers + ": `socket()`+`connect()` p50"},
			summaryRow{w, "socket_connect_p99_us", "p99"},
			summaryRow{w, "connections_per_s", "connections"})
	}
	return rows
}

func summarizeCallers(b *strings.Builder, raw [][]byte) error {
	var results []Result
	if err := json.Unmarshal(raw[0], &results); err != nil {
		return err
	}
	ratioTable(b, results, Scopes, Modes, connectRows())
	fmt.Fprintf(b, "\nMet by Heddle: %s.\n", PoolResult{Results: results}.verdict(Heddle))
	return nil
}

func summarizePool(b *strings.Builder, raw [][]byte) error {
	var r PoolResult
	if err := json.Unmarshal(raw[0], &r); err != nil {
		return err
	}
	ratioTable(b, r.Results, Scopes, []Mode{Host, Overlay, Heddle, Pooled}, connectRows())
	fmt.Fprintf(b, "\nMet with the pool: %s. %s.\n", r.verdict(Pooled), r.Machine)
	return nil
}

func summarizePaper(b *strings.Builder, raw [][]byte) error {
	var e paperEvidence
	if err := errors.Join(json.Unmarshal(raw[0], &e.paper), json.Unmarshal(raw[1], &e.core)); err != nil {
		return err
	}
	b.WriteString("| application | operations/s, to host | processor time, to host | p99.9, to host |" +
		" processor time, to overlay |\n|---|---|---|---|---|\n")
	for _, a := range PaperApps {
		entry, ok := e.paper.Find(a.Name)
		if !ok {
			continue
		}
		cell := func(metric string, to Mode) string {
			if ratio, ok := entry.Ratio(metric, Heddle, to); ok {
				return fmt.Sprintf("%.2f", ratio)
			}
			return ""
		}
		rate := cell(MetricRate, Host)
		if a.Rate != 0 {
			rate = "fixed"
		}
		p999 := cell(LatencyMetric("all", "p999"), Host) + cell(LatencyMetric("record", "p999"), Host)
		fmt.Fprintf(b, "| `%s` | %s | %s | %s | %s |\n",
			a.Name, rate, cell(MetricCPUPerOp, Host), p999, cell(MetricCPUPerOp, Overlay))
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
	fmt.Fprintf(b, "\n%s", lines[len(lines)-1])
	if len(missed) > 0 {
		fmt.Fprintf(b, " Missed: %s.", strings.Join(missed, "; "))
	}
	b.WriteByte('\n')
	return nil
}

func summarizePeers(b *strings.Builder, raw [][]byte) error {
	var r PeersResult
	if err := json.Unmarshal(raw[0], &r); err != nil {
		return err
	}
	for _, scope := range Scopes {
		modes := slices.DeleteFunc(slices.Clone(AllModes), func(m Mode) bool {
			return !slices.ContainsFunc(r.Results, func(f Result) bool { return f.Mode == m && f.Scope == scope })
		})
		ratioTable(b, r.Results, []Scope{scope}, modes, []summaryRow{
			{"iperf3", "throughput_bps", "throughput"},
			{"iperf3", "cpu_s_per_gb", "processor time for a gigabyte"},
			{"rr", "rtt_p50_us", "round trip p50"},
			{"crr", "socket_connect_p50_us", "`socket()`+`connect()` p50"},
			{"crr", "connections_per_s", "connections"},
		})
		b.WriteByte('\n')
	}
	fmt.Fprintf(b, "%s.\n", r.Machine)
	return nil
}

func summarizePolicy(b *strings.Builder, raw [][]byte) error {
	var caps PolicyResult
	var scale ScaleResult
	if err := errors.Join(json.Unmarshal(raw[0], &caps), json.Unmarshal(raw[1], &scale)); err != nil {
		return err
	}
	b.WriteString("| cap on a live connection, Gb/s | carried, of the cap |\n|---|---|\n")
	for _, p := range caps.Phases {
		if p.CapBPS > 0 {
			fmt.Fprintf(b, "| %.2f | %.3f |\n", p.CapBPS/1e9, p.LimitedBPS/p.CapBPS)
		}
	}
	fmt.Fprintf(b, "\n| among %s endpoints, with so many rules |", Thousands(scale.Endpoints))
	rule, cells := "|---|", map[Scope]string{}
	for _, c := range scale.Connects {
		if c.Mode != Heddle {
			continue
		}
		if c.Scope == Inter {
			fmt.Fprintf(b, " %s |", Thousands(c.Rules))
			rule += "---|"
		}
		cells[c.Scope] += fmt.Sprintf(" %.2f |", c.RatioToHost.Median)
	}
	fmt.Fprintf(b, "\n%s\n", rule)
	for _, scope := range Scopes {
		fmt.Fprintf(b, "| `socket()`+`connect()` p50 %s, to host |%s\n", scope.Title(), cells[scope])
	}
	return nil
}

func summarizeDensity(b *strings.Builder, raw [][]byte) error {
	var r DensityResult
	if err := json.Unmarshal(raw[0], &r); err != nil {
		return err
	}
	rows := [][]string{
		r.headOf("containers on the node"),
		r.rowOf("kernel memory of an endpoint, kB",
			func(s DensityStep) string { return inKilobytes(s.EndpointBytes) }),
		r.rowOf("of its interception, kB",
			func(s DensityStep) string { return inKilobytes(s.InterceptedBytes) }),
		r.rowOf("agent's memory for a container, kB",
			func(s DensityStep) string { return inKilobytes(s.AgentBytes) }),
		r.rowOf("an endpoint is made in, ms",
			func(s DensityStep) string { return Number(s.MakeMs.Median) }),
		r.rowOf("agent at rest, processors",
			func(s DensityStep) string { return fmt.Sprintf("%.4f", s.Rest.CPU) }),
		r.rowOf("`socket()`+`connect()` p50 of one container, to host",
			func(s DensityStep) string { return latencyRatio(s.Latency, "one", Host) }),
		r.rowOf("of all containers in turn, to host",
			func(s DensityStep) string { return latencyRatio(s.Latency, "all", Host) }),
		r.rowOf("of all containers in turn, to overlay",
			func(s DensityStep) string { return latencyRatio(s.Latency, "all", Overlay) }),
	}
	writeMarkdownRows(b, rows)
	most, kilobytes := 0, map[Mode]string{}
	for _, l := range r.Connections {
		if l.Scope == Inter && l.Connections >= most {
			most, kilobytes[l.Mode] = l.Connections, inKilobytes(l.KernelBytes)
		}
	}
	fmt.Fprintf(b, "\nOf %s live connections between nodes each takes %s kB of kernel memory with both its ends"+
		" (host %s, overlay %s). %s.\n",
		Thousands(most), kilobytes[Heddle], kilobytes[Host], kilobytes[Overlay], r.Machine)
	return nil
}

func summarizeCost(b *strings.Builder, raw [][]byte) error {
	var r CostResult
	if err := json.Unmarshal(raw[0], &r); err != nil {
		return err
	}
	rows := [][]string{{"BPF programs of both nodes add to", "between nodes: runs", "ns", "on one node: runs", "ns"}}
	for _, name := range peer.Steps {
		row := []string{name}
		for _, scope := range Scopes {
			s, _ := r.step(scope, Heddle, name)
			row = append(row, Number(s.runs()), fmt.Sprintf("%.0f", s.Ns.Median))
		}
		rows = append(rows, row)
	}
	writeMarkdownRows(b, rows)
	b.WriteByte('\n')
	share := r.shareGrid().rows
	rows = [][]string{{"processor time of an operation", "to host", "of it BPF programs"}}
	for _, row := range share[1:] {
		rows = append(rows, []string{row[0], row[3], row[5]})
	}
	writeMarkdownRows(b, rows)
	more, _ := r.difference([]string{StartHeddle}, []string{StartRunc})
	runc := spreadOf(r.startOf(StartRunc))
	fmt.Fprintf(b, "\nAn intercepted container starts %.1f ms later than one that is not, in runc, which takes"+
		" %.1f. %s.\n", more.Median, runc.Median, r.Machine)
	return nil
}

// writeMarkdownRows writes a table; the first row is its head.
func writeMarkdownRows(b *strings.Builder, rows [][]string) {
	for i, row := range rows {
		fmt.Fprintf(b, "| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			b.WriteString(strings.Repeat("|---", len(row)) + "|\n")
		}
	}
}
