package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/contender"
	"heddle.dev/heddle/internal/bench/peer"
	"heddle.dev/heddle/internal/bench/plot"
)

// benchSettings are the flags of `heddle bench` and `heddle demo`.
type benchSettings struct {
	workloads, scopes, modes []string
	runs                     int
	duration                 time.Duration
	lab                      string
	jsonFile, plotFile       string
	quick, markdown, up      bool
	socketPool               bool // the lab that up brings up has pools of sockets
}

// What --quick and `heddle demo` run: enough to see the shape, not to judge by.
const (
	quickRuns     = 3
	quickDuration = time.Second
)

// newBenchCmd makes `heddle bench` and, hidden beneath it, the program it runs inside the containers.
func newBenchCmd() *cobra.Command {
	var s benchSettings
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Compare host, overlay and heddle: throughput, round trips, connections, CPU",
		Long: `Runs every workload in every mode between containers of a lab that is up, interleaved and several times
over, and prints median, spread and ratio to host.

Workloads: iperf3 (throughput), rr (32-byte round trips), crr (new connections), crr8 and crr64 (by 8 and 64 callers at a time) and memory (kernel memory of a
connection) when named. Processor time is the whole machine's: keep it otherwise idle.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if s.quick && !cmd.Flags().Changed("runs") {
				s.runs = quickRuns
			}
			if s.quick && !cmd.Flags().Changed("duration") {
				s.duration = quickDuration
			}
			return runBench(cmd.Context(), s, cmd.OutOrStdout(), os.Stderr)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&s.workloads, "workloads", nil, "workloads to run (default iperf3,rr,crr)")
	f.StringSliceVar(&s.scopes, "scopes", []string{"inter", "intra"}, "inter (between nodes), intra (on one node)")
	f.StringSliceVar(&s.modes, "modes", []string{"host", "overlay", "heddle"}, "modes to compare; host is needed; beside the lab's: bare (a host without Heddle), docker, bpf, bpf-vxlan, netkit")
	f.IntVar(&s.runs, "runs", 5, "runs of each workload, scope and mode")
	f.DurationVar(&s.duration, "duration", 3*time.Second, "length of one measurement (iperf3: whole seconds)")
	f.StringVar(&s.lab, "lab", "", "name of the lab (default: the default lab)")
	f.StringVar(&s.jsonFile, "json", "", "write the results to this file")
	f.StringVar(&s.plotFile, "plot", "", "draw the results into this SVG file")
	cmd.AddCommand(newBenchPoolCmd(), newBenchReportCmd(), newBenchSummaryCmd())
	f.BoolVar(&s.quick, "quick", false, fmt.Sprintf("%d runs of %s", quickRuns, quickDuration))
	f.BoolVar(&s.markdown, "markdown", false, "print Markdown tables")
	f.BoolVar(&s.up, "up", false, "bring the lab up if it is not, and down again afterwards")
	cmd.AddCommand(newBenchPeerCmd(), newBenchPolicyCmd(), newBenchScaleCmd(), newBenchNodesCmd(), newBenchEndpointsCmd(), newBenchMigrateCmd(), newBenchPaperCmd(), newBenchCheckCmd(), newBenchCostCmd(), newBenchPeersCmd(), newBenchDensityCmd(), newBenchLocalCmd())
	return cmd
}

// newBenchPeerCmd makes the hidden command that the bench runs inside containers.
func newBenchPeerCmd() *cobra.Command {
	return &cobra.Command{
		Use:                "peer",
		Hidden:             true,
		DisableFlagParsing: true,
		SilenceUsage:       true,
		RunE: func(cmd *cobra.Command, args []string) error {
			return peer.Main(cmd.Context(), args, peer.Streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
		},
	}
}

// newDemoCmd makes `heddle demo`: the bench for somebody who sees Heddle for the first time.
func newDemoCmd() *cobra.Command {
	s := benchSettings{scopes: []string{"inter", "intra"}, modes: []string{"host", "overlay", "heddle"}, up: true}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Bring a lab up, compare the three modes, print a table and draw a plot",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := cmd.OutOrStdout()
			if _, err := fmt.Fprint(out, demoWelcome); err != nil {
				return err
			}
			return runBench(cmd.Context(), s, out, os.Stderr)
		},
	}
	f := cmd.Flags()
	f.IntVar(&s.runs, "runs", quickRuns, "runs of each workload, scope and mode")
	f.DurationVar(&s.duration, "duration", quickDuration, "length of one measurement (iperf3: whole seconds)")
	f.StringVar(&s.lab, "lab", "", "name of the lab (default: the default lab)")
	f.StringVar(&s.jsonFile, "json", "", "write the results to this file")
	f.StringVar(&s.plotFile, "plot", "heddle-demo.svg", "draw the results into this SVG file")
	return cmd
}

const demoWelcome = `Heddle demo: two nodes (network namespaces of this machine, joined by a veth), containers on each.
A server and a client run in them, unmodified, on three networks in turn:

  host     the node's own network, no container network at all: the yardstick
  overlay  a plain container network: veth, bridge, VXLAN, two stacks for every packet
  heddle   the same containers, with their TCP sockets in the node's stack: one pass

A short run on a machine that does other things too: read the ratios. 'heddle bench' measures for longer.

`

// runBench measures, and then writes everything that was asked for. Files are written only once every
// measurement has succeeded.
func runBench(ctx context.Context, s benchSettings, out io.Writer, progress *os.File) error {
	o, err := s.options(progress)
	if err != nil {
		return err
	}
	var results []bench.Result
	var skipped []bench.Network
	err = s.inLabWithContenders(ctx, progress, o.Modes, func(ctx context.Context, place bench.Place, site *contender.Site, peer []string) (err error) {
		for _, m := range o.Modes {
			skipped = append(skipped, bench.Network{Mode: m, Skipped: site.Skipped[m]})
		}
		o.Program, o.Modes = peer, site.Modes(o.Modes)
		results, err = bench.Run(ctx, place, o)
		return err
	})
	if err != nil {
		return err
	}
	return errors.Join(s.report(results, out), writeSkipped(out, skipped))
}

// options checks the flags.
func (s benchSettings) options(progress io.Writer) (o bench.Options, err error) {
	if o.Workloads, err = bench.ParseWorkloads(s.workloads); err != nil {
		return bench.Options{}, err
	}
	if o.Scopes, err = bench.ParseScopes(s.scopes); err != nil {
		return bench.Options{}, err
	}
	if o.Modes, err = bench.ParseAllModes(s.modes); err != nil {
		return bench.Options{}, err
	}
	if err := s.checkFiles(); err != nil {
		return bench.Options{}, err
	}
	o.Runs, o.Duration = s.runs, s.duration
	o.Progress = func(p bench.Progress) {
		eta := ""
		if p.Remaining > 0 {
			eta = fmt.Sprintf(", %s left", p.Remaining.Round(time.Second))
		}
		// Progress is a courtesy; the measurement goes on without it.
		_, _ = fmt.Fprintf(progress, "[%3d/%d] run %d: %s%s\n", p.Done+1, p.Total, p.Run, p.Cell, eta)
	}
	return o, o.Validate()
}

// report prints the tables and writes the files.
func (s benchSettings) report(results []bench.Result, out io.Writer) error {
	write := bench.WriteTable
	if s.markdown {
		write = bench.WriteMarkdown
	}
	if err := write(out, results); err != nil {
		return err
	}
	if s.jsonFile != "" {
		if err := writeFile(s.jsonFile, func(w io.Writer) error { return bench.WriteJSON(w, results) }); err != nil {
			return err
		}
		if _, err := fmt.Fprintf(out, "\nResults: %s\n", s.jsonFile); err != nil {
			return err
		}
	}
	if s.plotFile != "" {
		text := plot.Text{Title: "Heddle: TCP between containers, compared with the host's own", Subtitle: s.subtitle()}
		if err := writeFile(s.plotFile, func(w io.Writer) error { return plot.Write(w, results, text) }); err != nil {
			return err
		}
		if _, err := fmt.Fprintf(out, "\nPlot: %s\n", s.plotFile); err != nil {
			return err
		}
	}
	return nil
}

// subtitle says under the plot's title what it was made from.
func (s benchSettings) subtitle() string {
	return fmt.Sprintf("%d runs of %s each, interleaved; %s", s.runs, s.duration, machine())
}

// machine says where and when a measurement was made.
func machine() string {
	kernel := "?"
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		kernel = unix.ByteSliceToString(u.Release[:])
	}
	return fmt.Sprintf("Linux %s, %d processors; %s", kernel, runtime.NumCPU(), time.Now().Format(time.DateOnly))
}
