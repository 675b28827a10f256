package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench"
)

// Exit codes of `heddle bench check`, beside 0 and the 1 of every error.
const (
	exitWorse = 2 // a metric got worse
	exitBusy  = 3 // the machine had other things to do: nothing is judged
)

// exitError is an error that ends the program with a code of its own.
type exitError struct {
	code int
	error
}

// benchCheck are the flags of `heddle bench check`.
type benchCheck struct {
	benchSettings
	against []string
	always  bool // for tests: judge a busy machine's results, too
}

// newBenchCheckCmd makes `heddle bench check`.
func newBenchCheckCmd() *cobra.Command {
	s := benchCheck{benchSettings: benchSettings{modes: []string{"host", "heddle"}}}
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Compare with committed results: what got better, what got worse",
		Long: fmt.Sprintf(`Measures host and heddle again, and compares each ratio to host with the committed one. A change counts if it is more than what
the runs, of then and of now, differ by; one for the worse is measured a second time and must show again. Tails (p99) are not compared.

Exit codes: 0 nothing is worse, %d something is, %d the machine was busy and nothing is judged, 1 it could not measure.`, exitWorse, exitBusy),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.run(cmd.Context(), cmd.OutOrStdout(), os.Stderr)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&s.against, "against", []string{"docs/benchmarks/core.json", "docs/benchmarks/callers.json"}, "committed results, of 'heddle bench --json'")
	f.StringSliceVar(&s.workloads, "workloads", nil, "workloads to run (default iperf3,rr,crr)")
	f.StringSliceVar(&s.scopes, "scopes", []string{"inter", "intra"}, "inter (between nodes), intra (on one node)")
	f.IntVar(&s.runs, "runs", 5, "runs of each workload, scope and mode")
	f.DurationVar(&s.duration, "duration", time.Second, "length of one measurement (iperf3: whole seconds)")
	f.StringVar(&s.lab, "lab", "", "name of the lab (default: the default lab)")
	f.StringVar(&s.jsonFile, "json", "", "write the new results to this file")
	f.BoolVar(&s.up, "up", false, "bring the lab up if it is not, and down again afterwards")
	f.BoolVar(&s.always, "always", false, "judge on a busy machine, too")
	// It would make verdicts of noise; it is for the test of this command.
	if err := f.MarkHidden("always"); err != nil {
		panic(err) // the flag is defined above
	}
	return cmd
}

func (s benchCheck) run(ctx context.Context, out io.Writer, progress *os.File) error {
	committed, err := s.committed()
	if err != nil {
		return err
	}
	o, err := s.options(progress)
	if err != nil {
		return err
	}
	var results []bench.Result
	var compared []bench.Comparison
	err = s.inLabWithPeer(ctx, progress, func(ctx context.Context, place bench.Lab, peer []string) (err error) {
		o.Program = peer
		if results, err = s.measureQuietly(ctx, place, o); err != nil {
			return err
		}
		compared = compareAll(committed, results)
		workloads, scopes := bench.Suspects(compared)
		if len(workloads) == 0 {
			return nil
		}
		_, _ = fmt.Fprintln(progress, "measured once more because it seems worse:", strings.Join(workloads, ", "))
		again := s
		again.workloads, again.scopes = workloads, scopes
		if o, err = again.options(progress); err != nil {
			return err
		}
		o.Program = peer
		second, err := s.measureQuietly(ctx, place, o)
		if err == nil {
			compared = bench.Confirm(compared, compareAll(committed, second))
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := s.writeFiles(results, nil); err != nil {
		return err
	}
	return reportCheck(compared, out)
}

// committedFile is a file of committed results.
type committedFile struct {
	name    string
	results []bench.Result
}

func (s benchCheck) committed() (all []committedFile, err error) {
	for _, file := range s.against {
		f, err := os.Open(file)
		if err != nil {
			return nil, fmt.Errorf("--against: %w", err)
		}
		results, err := bench.ReadResults(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, fmt.Errorf("--against %s: %w", file, err)
		}
		all = append(all, committedFile{filepath.Base(file), results})
	}
	return all, nil
}

// compareAll compares with each file what was measured now: a file that has other workloads is not measured in these.
func compareAll(committed []committedFile, now []bench.Result) (all []bench.Comparison) {
	has := func(results []bench.Result, workload string) bool {
		return slices.ContainsFunc(results, func(r bench.Result) bool { return r.Workload == workload })
	}
	for _, f := range committed {
		for _, c := range bench.Compare(f.results, now) {
			if has(f.results, c.Workload) && has(now, c.Workload) {
				c.File = f.name
				all = append(all, c)
			}
		}
	}
	return all
}

// How long a check waits for a machine that has just brought a lab up, or ended clients, to be quiet.
const (
	quietBefore = 15 * time.Second
	quietAfter  = 2 * time.Second
)

// measureQuietly measures on a machine that has nothing else to do before it and after it.
func (s benchCheck) measureQuietly(ctx context.Context, place bench.Lab, o bench.Options) ([]bench.Result, error) {
	if s.always {
		return bench.Run(ctx, place, o)
	}
	if err := awaitQuiet(ctx, quietBefore); err != nil {
		return nil, err
	}
	results, err := bench.Run(ctx, place, o)
	if err != nil {
		return nil, err
	}
	return results, awaitQuiet(ctx, quietAfter)
}

// awaitQuiet waits until other programs leave the machine alone; if they do not within the time, it gives an exitError.
func awaitQuiet(ctx context.Context, patience time.Duration) error {
	deadline := time.Now().Add(patience)
	for {
		busy, err := bench.Background(ctx)
		if err != nil || busy <= bench.QuietMachine {
			return err
		}
		if time.Now().After(deadline) {
			return exitError{exitBusy, fmt.Errorf("the machine is busy: other programs keep %.1f of %d processors busy (at most %.1f wanted). "+
				"Nothing is judged: run it again when nothing else runs", busy, runtime.NumCPU(), bench.QuietMachine)}
		}
	}
}

// reportCheck prints the table, and gives an exitError if something got worse.
func reportCheck(compared []bench.Comparison, out io.Writer) error {
	if err := bench.WriteComparisons(out, compared); err != nil {
		return err
	}
	count := make(map[bench.Moved]int)
	var worse []string
	for _, c := range compared {
		count[c.Moved]++
		if c.Moved == bench.Worse {
			worse = append(worse, fmt.Sprintf("%s %s %s", c.Workload, c.Scope, c.Metric.Name))
		}
	}
	_, err := fmt.Fprintf(out, "\n%d better, %d same, %d worse, %d not measured\n", count[bench.Better], count[bench.Same], count[bench.Worse], count[bench.NotMeasured])
	switch {
	case err != nil:
		return err
	case count[bench.NotMeasured] == len(compared):
		return errors.New("nothing to compare: the committed results have none of the workloads that were run")
	case len(worse) > 0:
		return exitError{exitWorse, fmt.Errorf("worse than committed, twice: %s\nrun it once more on an otherwise idle machine; if it shows again, find the change that did it "+
			"(`git bisect run heddle bench check ...`), or measure anew (`heddle bench --json docs/benchmarks/core.json`) and commit that with the reason",
			strings.Join(worse, ", "))}
	}
	return nil
}
