// Package core is `heddle bench` itself and `heddle demo`: throughput, round trips and new
// connections in several modes.
package core

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/pflag"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/baseline"
	"heddle.dev/heddle/internal/bench/peers"
	"heddle.dev/heddle/internal/bench/plot"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/bench/session"
)

// What --quick and `heddle demo` run: enough to see the shape, not to judge by.
const (
	quickRuns     = 3
	quickDuration = time.Second
)

// Command is `heddle bench`.
func Command() session.Command {
	var flags *pflag.FlagSet
	var against string
	var earlier []bench.Result
	b := benchmark()
	b.Short = "Compare host, overlay and heddle: throughput, round trips, connections, CPU"
	b.Long = `Runs every workload in every mode between containers of a lab that is up, interleaved and several times
over, and prints median, spread and ratio to host.

Workloads: iperf3 (throughput), rr (32-byte round trips), crr (new connections), crr8 and crr64 (by 8 and 64 callers at a
time) when named. Processor time is the whole machine's: keep it otherwise idle.`
	b.Flags = func(f session.Flags) {
		flags = f.FlagSet
		f.DeclareWorkloads(nil, "workloads to run (default iperf3,rr,crr)")
		f.DeclareScopes()
		f.DeclareModes("; beside the lab's: bare (a host without Heddle), docker, bpf, bpf-vxlan, netkit, floor (host with a trapped socket())", "host", "overlay", "heddle")
		f.DeclareRuns(5, "runs of each workload, scope and mode")
		f.DeclareDuration(3*time.Second, "length of one measurement (iperf3: whole seconds)")
		f.StringVar(&against, "against", "", "compare the ratios to host with those of an earlier --json file")
		f.BoolVar(&f.Quick, "quick", false, fmt.Sprintf("%d runs of %s", quickRuns, quickDuration))
	}
	check := b.Check
	b.Check = func(s *session.Session) error {
		if s.Quick && !flags.Changed("runs") {
			s.Runs = quickRuns
		}
		if s.Quick && !flags.Changed("duration") {
			s.Duration = quickDuration
		}
		if against != "" {
			if err := report.ReadFile(against, &earlier); err != nil {
				return fmt.Errorf("--against: %w", err)
			}
		}
		return check(s)
	}
	tables := b.Print
	b.Print = func(w io.Writer, s *session.Session, results []bench.Result) error {
		if err := tables(w, s, results); err != nil || against == "" {
			return err
		}
		return report.Print(w, []report.Grid{compare(earlier, results)})
	}
	b.Report = writeReport
	b.Summaries = []session.Summary{{Part: "core", Write: summarize}, {Part: "callers", Write: summarizeCallers}}
	return b.Command()
}

// Demo is `heddle demo`: the same for somebody who sees Heddle for the first time.
func Demo() session.Command {
	b := benchmark()
	b.Short = "Bring a lab up, compare the three modes, print a table and draw a plot"
	b.Lab.Up = true
	b.Flags = func(f session.Flags) {
		f.Settings.Scopes, f.Settings.Modes = []string{"inter", "intra"}, []string{"host", "overlay", "heddle"}
		f.DeclareRuns(quickRuns, "runs of each workload, scope and mode")
		f.DeclareDuration(quickDuration, "length of one measurement (iperf3: whole seconds)")
		f.Settings.Plot = "heddle-demo.svg"
		f.Lookup("plot").DefValue = f.Settings.Plot
	}
	return b.Command()
}

// benchmark is what both have.
func benchmark() session.Benchmark[[]bench.Result] {
	var o bench.Options
	var skipped []peers.Network
	return session.Benchmark[[]bench.Result]{
		Lab:   session.Needs{Program: true},
		Check: func(s *session.Session) (err error) { o, err = s.Options(); return err },
		Run: func(ctx context.Context, s *session.Session) (results []bench.Result, err error) {
			wanted := o.Modes
			err = baseline.With(ctx, s, wanted, func(place bench.Place, site *baseline.Site) (err error) {
				for _, m := range wanted {
					skipped = append(skipped, peers.Network{Mode: m, Skipped: site.Skipped[m]})
				}
				o.Program, o.Modes = s.Program, site.Modes(wanted)
				results, err = bench.Run(ctx, place, o)
				return err
			})
			return results, err
		},
		Print: func(w io.Writer, _ *session.Session, results []bench.Result) error {
			return errors.Join(report.WriteTable(w, results), peers.WriteSkipped(w, skipped))
		},
		Plot: func(w io.Writer, _ *session.Session, results []bench.Result) error {
			return plot.Write(w, results, plot.Text{Title: "Heddle: TCP between containers, compared with the host's own", Subtitle: plot.Subtitle(o)})
		},
	}
}

// compare puts Heddle's ratios to host of two runs side by side. It judges nothing: two runs of one
// build differ, too.
func compare(earlier, now []bench.Result) report.Grid {
	g := report.Grid{Title: "\nheddle, ratios to host, with smallest and largest run", Rows: [][]string{{"", "earlier", "now", "change"}}}
	for _, r := range now {
		old, ok := report.Find(earlier, r.Scope, r.Workload, r.Metric, bench.Heddle)
		if r.Mode != bench.Heddle || !ok || old.RatioToHost <= 0 {
			continue
		}
		ratio := func(r bench.Result) string {
			host := r.Median / r.RatioToHost
			return fmt.Sprintf("%.2f (%.2f..%.2f)", r.RatioToHost, r.Min/host, r.Max/host)
		}
		g.Add(fmt.Sprintf("%s %s %s", r.Workload, r.Scope, r.Metric), ratio(old), ratio(r), fmt.Sprintf("%+.0f %%", 100*(r.RatioToHost/old.RatioToHost-1)))
	}
	return g
}
