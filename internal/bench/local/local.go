// Package local measures connections on one node beside what programs could use there instead.
package local

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/plot"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/bench/session"
)

// Result is what `heddle bench local` found: connections on one node, beside what programs could
// use there instead.
type Result struct {
	Machine    string  `json:"machine"`    // and the date
	Background float64 `json:"background"` // processors that other programs kept busy before
	// Congestion is the congestion control that the node gives every socket, and so what host and
	// overlay have.
	Congestion string         `json:"congestion"`
	Runs       int            `json:"runs"`
	DurationS  float64        `json:"duration_s"`
	Results    []bench.Result `json:"results"`
}

// Workloads names what `heddle bench local` measures.
var Workloads = []string{"stream", "stream-1k", "rr", "rr-16k"}

// section writes the tables of the document.
func section(r Result) (string, error) {
	all := report.Tables(r.Results)
	if len(all) == 0 {
		return "", errors.New("write tables: no results")
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s. %d runs of %g s, interleaved; median (smallest..largest) and ratio to host; last, the ratios of the runs. The node gives its sockets %s.",
		r.Machine, r.Runs, r.DurationS, r.Congestion)
	if r.Background > report.TooBusy {
		fmt.Fprintf(&b, " **Other programs kept %.1f processors busy before it: not to be judged by.**", r.Background)
	}
	b.WriteString("\n\n| |")
	for _, m := range all[0].Modes {
		fmt.Fprintf(&b, " %s |", m)
	}
	b.WriteString(" Heddle to host |\n|---|" + strings.Repeat("---|", len(all[0].Modes)+1) + "\n")
	for _, t := range all {
		for _, m := range t.Workload.Metrics {
			unit, _ := m.Unit.Scale()
			fmt.Fprintf(&b, "| %s, %s |", m.Title, unit)
			for _, mode := range all[0].Modes {
				p := t.Cells[m.Name][mode].Parts()
				fmt.Fprintf(&b, " %s |", strings.TrimSpace(p[0]+" "+p[1]+" "+p[2]))
			}
			fmt.Fprintf(&b, " %s |\n", t.Standing(m))
		}
	}
	b.WriteByte('\n')
	return b.String(), nil
}

// summarize writes what the page of results has.
func summarize(d *report.Document) (string, error) {
	var r Result
	if err := d.Read(File, &r); err != nil {
		return "", err
	}
	var b strings.Builder
	report.RatioTable(&b, r.Results, []bench.Scope{bench.Intra}, []bench.Mode{bench.Host, bench.Overlay, bench.Heddle, bench.Reno, bench.Unix}, []report.SummaryRow{
		{"stream", "throughput_bps", "throughput, writes of 64 KB"},
		{"stream", "cpu_s_per_gb", "processor time for a gigabyte"},
		{"stream-1k", "throughput_bps", "throughput, writes of 1 KB"},
		{"rr", "rtt_p50_us", "round trip p50"},
	})
	fmt.Fprintf(&b, "\n%s; %d runs of %g s. The node gives its sockets %s.\n",
		r.Machine, r.Runs, r.DurationS, r.Congestion)
	return b.String(), nil
}

// File is the name of the committed results.
const File = "local.json"

// Command is `heddle bench local`.
func Command() session.Command {
	var o bench.Options
	return session.Benchmark[Result]{
		Name:  "local",
		Short: "Connections on one node beside what programs could use there instead",
		Long: `Streams and round trips between two containers of one node, in the modes host, overlay and heddle, and beside them between two
processes of the node: over TCP for which they ask for reno, and over AF_UNIX sockets.`,
		Lab: session.Needs{Program: true},
		Flags: func(f session.Flags) {
			f.Scopes = []string{string(bench.Intra)}
			f.DeclareWorkloads(Workloads, "workloads to run")
			f.DeclareModes("", "host", "overlay", "heddle", "reno", "unix")
			f.DeclareRuns(5, "runs of each workload and mode")
			f.DeclareDuration(time.Second, "length of one measurement")
		},
		Check: func(s *session.Session) (err error) { o, err = s.Options(); return err },
		Run: func(ctx context.Context, s *session.Session) (r Result, err error) {
			r = Result{Machine: machine.Describe(), Background: s.Background, Runs: o.Runs, DurationS: o.Duration.Seconds()}
			name, err := s.Lab.Exec(ctx, bench.Host, "n1/c1", "cat", "/proc/sys/net/ipv4/tcp_congestion_control").Output()
			if err != nil {
				return r, fmt.Errorf("read the node's congestion control: %w", err)
			}
			r.Congestion, o.Program = strings.TrimSpace(string(name)), s.Program
			r.Results, err = bench.Run(ctx, s.Lab, o)
			return r, err
		},
		Print:     func(w io.Writer, _ *session.Session, r Result) error { return report.WriteTable(w, r.Results) },
		Report:    writeReport,
		Summaries: []session.Summary{{Part: "local", Write: summarize}},
	}.Command()
}

func writeReport(d *report.Document) error {
	var r Result
	if err := d.Read(File, &r); err != nil {
		return err
	}
	text, err := section(r)
	if err != nil {
		return err
	}
	about := plot.Text{
		Title: "Heddle on one node, compared with the host's own loopback",
		Subtitle: fmt.Sprintf("%d runs of %g s each, interleaved; the node gives its sockets %s; %s",
			r.Runs, r.DurationS, r.Congestion, r.Machine),
	}
	draw := func(w io.Writer) error { return plot.Write(w, r.Results, about) }
	return errors.Join(d.Plot("local.svg", draw), d.Section("", text))
}
