package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/plot"
)

// minPolicyPhase leaves enough half seconds in a phase for a median.
const minPolicyPhase = 3 * time.Second

// newBenchPolicyCmd makes `heddle bench policy`.
func newBenchPolicyCmd() *cobra.Command {
	var s benchSettings
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Repeat figure 7 of the Slim paper: caps and a rule on live connections",
		Long: `Two containers of one node send to another node, over one connection each. One of them is capped at 15, 10 and 5
units, then barred by a rule. A unit is a 37th of what both get without a cap, as in the paper. The lab must be
otherwise idle and without policies of your own that speak of its containers.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runBenchPolicy(cmd.Context(), s, cmd.OutOrStdout(), os.Stderr)
		},
	}
	f := cmd.Flags()
	f.DurationVar(&s.duration, "phase", 5*time.Second, "length of a phase between two changes")
	f.StringVar(&s.lab, "lab", "", "name of the lab (default: the default lab)")
	f.StringVar(&s.jsonFile, "json", "", "write the results to this file")
	f.StringVar(&s.plotFile, "plot", "", "draw the results into this SVG file")
	f.BoolVar(&s.up, "up", false, "bring the lab up if it is not, and down again afterwards")
	return cmd
}

func runBenchPolicy(ctx context.Context, s benchSettings, out io.Writer, progress *os.File) error {
	if s.duration < minPolicyPhase {
		return fmt.Errorf("--phase %s: want %s or more", s.duration, minPolicyPhase)
	}
	if err := s.checkFiles(); err != nil {
		return err
	}
	var result bench.PolicyResult
	err := s.inLab(ctx, progress, func(ctx context.Context, place bench.Lab) (err error) {
		result, err = bench.RunPolicy(ctx, place, s.duration, progress)
		return err
	})
	if err != nil {
		return err
	}
	return s.reportPolicy(result, out)
}

// reportPolicy prints a row for each phase and writes the files.
func (s benchSettings) reportPolicy(result bench.PolicyResult, out io.Writer) error {
	t := newTable("PHASE", "CAP Gbit/s", result.Limited, "OF CAP", result.Other)
	gbit := func(bps float64) string { return fmt.Sprintf("%.3f", bps/1e9) }
	for _, p := range result.Phases {
		limit, of := "", ""
		if p.CapBPS > 0 {
			limit, of = gbit(p.CapBPS), fmt.Sprintf("%.3f", p.LimitedBPS/p.CapBPS)
		}
		t.row(p.What, limit, gbit(p.LimitedBPS), of, gbit(p.OtherBPS))
	}
	if err := t.writeTo(out); err != nil {
		return err
	}
	text := plot.Text{Title: "Caps and a rule on live connections (figure 7 of the Slim paper)",
		Subtitle: "Two containers of one node send to another node; payload that arrived, by half seconds. " + machine()}
	return s.writeFiles(result, func(w io.Writer) error { return plot.WritePolicy(w, result, text) })
}
