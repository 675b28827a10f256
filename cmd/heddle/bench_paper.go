package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench"
)

// paperSettings are the flags of `heddle bench paper` beside those that all benches have.
type paperSettings struct {
	benchSettings
	scale float64
	kafka string
	merge bool
}

// newBenchPaperCmd makes `heddle bench paper`.
func newBenchPaperCmd() *cobra.Command {
	var s paperSettings
	cmd := &cobra.Command{
		Use:   "paper",
		Short: "Repeat the evaluation of the Slim paper with real applications",
		Long: `Runs the applications of the Slim paper's section 6, server and client in containers on two nodes of a lab, in every
mode in turn and several times over: throughput, latencies, processor time by user, system and softirq. Figure 7 is
'heddle bench policy', table 4 'heddle bench migrate'.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.run(cmd.Context(), cmd.OutOrStdout(), os.Stderr)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&s.workloads, "workloads", nil, "applications to run, or families of them (default all)")
	f.StringSliceVar(&s.modes, "modes", []string{"host", "overlay", "heddle"}, "modes to compare; host is needed")
	f.IntVar(&s.runs, "rounds", 3, "rounds through all modes")
	f.DurationVar(&s.duration, "duration", 5*time.Second, "length of one measurement")
	f.Float64Var(&s.scale, "scale", 1, "multiplies the fixed rates")
	f.StringVar(&s.kafka, "kafka", "out/kafka", "folder with Kafka's jars (`make kafka`)")
	f.StringVar(&s.lab, "lab", "", "name of the lab (default: the default lab)")
	f.StringVar(&s.jsonFile, "json", "", "write the results to this file")
	f.BoolVar(&s.merge, "merge", false, "keep what the file of --json has of other applications")
	f.BoolVar(&s.up, "up", false, "bring the lab up if it is not, and down again afterwards")
	cmd.AddCommand(newBenchPaperReportCmd())
	return cmd
}

func (s paperSettings) options(progress io.Writer) (o bench.PaperOptions, err error) {
	if o.Apps, err = bench.ParsePaperApps(s.workloads); err != nil {
		return o, err
	}
	if o.Modes, err = bench.ParseModes(s.modes); err != nil {
		return o, err
	}
	if err := s.checkFiles(); err != nil {
		return o, err
	}
	o.Rounds, o.Duration, o.Scale, o.Kafka = s.runs, s.duration, s.scale, s.kafka
	o.Progress = func(p bench.PaperProgress) {
		line := p.What
		if p.Total > 0 {
			line = fmt.Sprintf("[%3d/%d] %s", p.Done+1, p.Total, p.What)
		}
		if p.Remaining > 0 {
			line += fmt.Sprintf(", %s left", p.Remaining.Round(time.Second))
		}
		// Progress is a courtesy; the measurement goes on without it.
		_, _ = fmt.Fprintln(progress, line)
	}
	return o, o.Validate()
}

func (s paperSettings) run(ctx context.Context, out io.Writer, progress *os.File) error {
	o, err := s.options(progress)
	if err != nil {
		return err
	}
	before, err := s.earlier()
	if err != nil {
		return err
	}
	var result bench.PaperResult
	err = s.inLabWithPeer(ctx, progress, func(ctx context.Context, place bench.Lab, peer []string) (err error) {
		o.Program = peer
		busy, err := bench.Background(ctx)
		if err != nil {
			return err
		}
		if result, err = bench.RunPaper(ctx, place, o); err != nil {
			return err
		}
		for i := range result.Apps {
			if e := &result.Apps[i]; e.Skipped == "" {
				e.Machine, e.Background = machine(), busy
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := bench.WritePaperTable(out, result); err != nil {
		return err
	}
	if s.jsonFile == "" {
		return nil
	}
	return writeFile(s.jsonFile, func(w io.Writer) error { return bench.WritePaper(w, before.Merge(result)) })
}

// earlier reads the results that are to be kept. A file that is not there has none.
func (s paperSettings) earlier() (r bench.PaperResult, err error) {
	if !s.merge || s.jsonFile == "" {
		return r, nil
	}
	r, err = readPaperFile(s.jsonFile)
	if errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	return r, err
}
