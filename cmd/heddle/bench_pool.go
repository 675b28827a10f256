package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench"
)

// newBenchPoolCmd makes `heddle bench pool`.
func newBenchPoolCmd() *cobra.Command {
	var s benchSettings
	cmd := &cobra.Command{
		Use:   "pool",
		Short: "Measure new connections of a dynamically linked program, with and without the preloaded pool of sockets",
		Long: `Compiles a client (with cc) and measures new connections by 1, 8 and 64 callers on the host, in the overlay, with Heddle, and with Heddle
and the pool. The lab must have been made with --socket-pool; --up does that.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.runPool(cmd.Context(), cmd.OutOrStdout(), os.Stderr)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&s.workloads, "workloads", bench.PoolWorkloads, "some of crr, crr8, crr64")
	f.StringSliceVar(&s.scopes, "scopes", []string{"inter", "intra"}, "inter (between nodes), intra (on one node)")
	f.IntVar(&s.runs, "runs", 5, "runs of each workload, scope and mode")
	f.DurationVar(&s.duration, "duration", time.Second, "length of a run")
	f.StringVar(&s.lab, "lab", "", "name of the lab (default: the default lab)")
	f.StringVar(&s.jsonFile, "json", "", "write the results to this file")
	f.BoolVar(&s.up, "up", false, "bring the lab up if it is not, and down again afterwards")
	cmd.AddCommand(newBenchPoolReportCmd())
	return cmd
}

// newBenchPoolReportCmd makes `heddle bench pool report`.
func newBenchPoolReportCmd() *cobra.Command {
	var file, document string
	cmd := &cobra.Command{
		Use:   "report",
		Short: "Write the table of results into the document, between its two marks",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return reportPool(file, document) },
	}
	cmd.Flags().StringVar(&file, "results", resultsFolder+"/pool.json", "what 'heddle bench pool --json' wrote")
	cmd.Flags().StringVar(&document, "document", resultTables, "the document with the table")
	return cmd
}

func (s benchSettings) runPool(ctx context.Context, out io.Writer, progress *os.File) (err error) {
	s.modes = []string{string(bench.Host), string(bench.Overlay), string(bench.Heddle)}
	o, err := s.options(progress)
	if err != nil {
		return err
	}
	o.Modes = append(o.Modes, bench.Pooled)
	dir, err := os.MkdirTemp("/tmp", "heddle-bench-pool-") // containers have the machine's /tmp
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	client, err := bench.BuildPoolClient(ctx, dir)
	if err != nil {
		return err
	}
	s.socketPool = true
	var result bench.PoolResult
	err = s.inLabWithPeer(ctx, progress, func(ctx context.Context, place bench.Lab, peer []string) (err error) {
		p := bench.PoolPlace{Lab: place, Client: client}
		if err := p.HasPool(ctx); err != nil {
			return err
		}
		if result.Background, err = bench.Background(ctx); err != nil {
			return err
		}
		o.Program = peer
		result.Machine = s.subtitle()
		result.Results, err = bench.Run(ctx, p, o)
		return err
	})
	if err != nil {
		return err
	}
	if err := bench.WriteTable(out, result.Results); err != nil {
		return err
	}
	return s.writeFiles(result, nil)
}

func reportPool(file, document string) error {
	raw, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var result bench.PoolResult
	if err := json.Unmarshal(raw, &result); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	old, err := os.ReadFile(document)
	if err != nil {
		return err
	}
	changed, err := bench.ReplacePoolDoc(old, result)
	if err != nil {
		return fmt.Errorf("%s: %w", document, err)
	}
	return writeFile(document, func(w io.Writer) error { _, err := w.Write(changed); return err })
}
