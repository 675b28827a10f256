package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// The generated part of the document stands between these lines.
const (
	PaperDocBegin = "<!-- `heddle bench paper report` writes from here -->\n"
	PaperDocEnd   = "<!-- to here -->\n"
)

// ReadResults reads what WriteJSON wrote.
func ReadResults(r io.Reader) (results []Result, err error) {
	if err := json.NewDecoder(r).Decode(&results); err != nil {
		return nil, fmt.Errorf("read results: %w", err)
	}
	return results, nil
}

// ReplacePaperDoc puts text between the two marks of a document.
func ReplacePaperDoc(document, text []byte) ([]byte, error) {
	return ReplaceBetween(document, text, PaperDocBegin, PaperDocEnd)
}

// ReplaceBetween puts text between two lines of a document.
func ReplaceBetween(document, text []byte, from, to string) ([]byte, error) {
	begin, end := bytes.Index(document, []byte(from)), bytes.Index(document, []byte(to))
	if begin < 0 || end < begin {
		return nil, fmt.Errorf("the document has no lines %q and %q", strings.TrimSpace(from), strings.TrimSpace(to))
	}
	return slices.Concat(document[:begin+len(from)], text, document[end:]), nil
}

// paperEvidence is what the document is made from.
type paperEvidence struct {
	paper PaperResult
	core  []Result // of `heddle bench`, between nodes
}

// ratio gives how much a metric is in one mode as a multiple of another's, with the smallest and the largest of the rounds; ok
// is false if it was not measured.
func (e paperEvidence) ratio(app, metric string, of, to Mode) (ratio float64, text string, ok bool) {
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
func (e paperEvidence) coreRatio(workload, metric string, of, to Mode) (ratio float64, text string, ok bool) {
	var a, b float64
	for _, r := range e.core {
		if r.Workload == workload && r.Metric == metric && r.Scope == Inter {
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

// tooBusy is how many processors other programs may keep busy for results to be judged by.
const tooBusy = 0.2

// busy reports whether an app was measured on a machine that had other things to do.
func (e paperEvidence) busy(app string) bool {
	entry, _ := e.paper.Find(app)
	return entry.Background > tooBusy
}

// paperClaim is a row of the table "paper / here". Ratios are of Slim or Heddle to the overlay and to the host.
type paperClaim struct {
	figure, what            string
	paperOverlay, paperHost string
	app, metric             string
	core                    bool // of `heddle bench`
	overlayInstead          string
}

var paperClaims = []paperClaim{
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

// paperGoal is a bound on a ratio.
type paperGoal struct {
	what        string
	app, metric string
	to          Mode
	least, most float64 // one of them is 0
	core        bool
}

// paperGoals are the project's: Heddle as fast and as cheap as the host, and what the overlay must not beat.
func paperGoals() (goals []paperGoal) {
	const leastRate, mostCost = 0.98, 1.03
	for _, a := range PaperApps {
		if a.Rate == 0 {
			goals = append(goals, paperGoal{what: a.Name + ": operations/s", app: a.Name, metric: MetricRate, to: Host, least: leastRate})
		}
		goals = append(goals, paperGoal{what: a.Name + ": CPU an operation", app: a.Name, metric: MetricCPUPerOp, to: Host, most: mostCost})
		if a.family == "iperf3" {
			continue
		}
		p999 := LatencyMetric("all", "p999")
		if a.family == "kafka" {
			p999 = LatencyMetric("record", "p999")
		}
		goals = append(goals, paperGoal{what: a.Name + ": p99.9", app: a.Name, metric: p999, to: Host, most: mostCost})
	}
	return append(goals,
		paperGoal{what: "memcached: operations/s", app: "memcached", metric: MetricRate, to: Overlay, least: 1.5},
		paperGoal{what: "pgbench -C: transactions/s", app: "pgbench-connect", metric: MetricRate, to: Overlay, least: 1},
		paperGoal{what: "connections/s (`crr`)", app: "crr", metric: "connections_per_s", to: Overlay, least: 1, core: true},
		paperGoal{what: "socket()+connect() p50 (`crr`)", app: "crr", metric: "socket_connect_p50_us", to: Host, most: 1.35, core: true},
		paperGoal{what: "socket()+connect() p99 (`crr`)", app: "crr", metric: "socket_connect_p99_us", to: Host, most: 1.35, core: true},
	)
}

// WritePaperDoc writes the generated part of the document: the table "paper / here", the goals, and what was measured when.
func WritePaperDoc(w io.Writer, paper PaperResult, core []Result) error {
	if len(paper.Apps) == 0 {
		return errors.New("no results")
	}
	e := paperEvidence{paper, core}
	var b strings.Builder
	b.WriteString("\n| figure | what | paper: Slim to overlay | here: Heddle to overlay | paper: Slim to host | here: Heddle to host |\n|---|---|---|---|---|---|\n")
	for _, c := range paperClaims {
		find := e.ratio
		if c.core {
			find = e.coreRatio
		}
		_, overlay, ok := find(c.app, c.metric, Heddle, Overlay)
		_, host, _ := find(c.app, c.metric, Heddle, Host)
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
	if slices.ContainsFunc(paper.Apps, func(a PaperEntry) bool { return e.busy(a.Name) }) {
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
	return writeAll(w, b.String())
}

func writeGoals(b *strings.Builder, e paperEvidence) {
	b.WriteString("\n| goal | wanted | here | |\n|---|---|---|---|\n")
	met, judged := 0, 0
	for _, g := range paperGoals() {
		find := e.ratio
		if g.core {
			find = e.coreRatio
		}
		ratio, text, ok := find(g.app, g.metric, Heddle, g.to)
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
