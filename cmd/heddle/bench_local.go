package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/plot"
)

// newBenchLocalCmd makes `heddle bench local`.
func newBenchLocalCmd() *cobra.Command {
	s := benchSettings{scopes: []string{string(bench.Intra)}}
	cmd := &cobra.Command{
		Use:   "local",
		Short: "Connections on one node beside what programs could use there instead",
		Long: `Streams and round trips between two containers of one node, in the modes host, overlay and heddle, and beside them between two
processes of the node: over TCP for which they ask for reno, and over AF_UNIX sockets.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runBenchLocal(cmd.Context(), s, cmd.OutOrStdout(), os.Stderr)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&s.workloads, "workloads", bench.LocalWorkloads, "workloads to run")
	f.StringSliceVar(&s.modes, "modes", []string{"host", "overlay", "heddle", "reno", "unix"}, "modes to compare; host is needed")
	f.IntVar(&s.runs, "runs", 5, "runs of each workload and mode")
	f.DurationVar(&s.duration, "duration", time.Second, "length of one measurement")
	f.StringVar(&s.lab, "lab", "", "name of the lab (default: the default lab)")
	f.StringVar(&s.jsonFile, "json", "", "write the results to this file")
	f.BoolVar(&s.up, "up", false, "bring the lab up if it is not, and down again afterwards")
	cmd.AddCommand(newBenchLocalReportCmd())
	return cmd
}

func runBenchLocal(ctx context.Context, s benchSettings, out io.Writer, progress *os.File) error {
	o, err := s.options(progress)
	if err != nil {
		return err
	}
	result := bench.LocalResult{Machine: machine(), Runs: o.Runs, DurationS: o.Duration.Seconds()}
	err = s.inLabWithPeer(ctx, progress, func(ctx context.Context, place bench.Lab, peer []string) (err error) {
		o.Program = peer
		if result.Background, err = bench.Background(ctx); err != nil {
			return err
		}
		name, err := place.Exec(ctx, bench.Host, "n1/c1", "cat", "/proc/sys/net/ipv4/tcp_congestion_control").Output()
		if err != nil {
			return fmt.Errorf("read the node's congestion control: %w", err)
		}
		result.Congestion = strings.TrimSpace(string(name))
		result.Results, err = bench.Run(ctx, place, o)
		return err
	})
	if err != nil {
		return err
	}
	if err := bench.WriteTable(out, result.Results); err != nil {
		return err
	}
	if s.jsonFile == "" {
		return nil
	}
	return writeFile(s.jsonFile, func(w io.Writer) error { return bench.WriteLocal(w, result) })
}

// newBenchLocalReportCmd makes `heddle bench local report`.
func newBenchLocalReportCmd() *cobra.Command {
	var folder, document string
	cmd := &cobra.Command{
		Use:   "report",
		Short: "Draw the plot and write the table of results",
		Long:  `Reads local.json in a folder, draws a plot beside it, and writes the table into a document, between its two marks.`,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return reportLocal(folder, document, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&folder, "folder", resultsFolder, "where the results are, and the plot goes")
	cmd.Flags().StringVar(&document, "document", resultTables, "the document with the table")
	return cmd
}

func reportLocal(folder, document string, out io.Writer) error {
	result, err := readLocalFile(filepath.Join(folder, "local.json"))
	if err != nil {
		return err
	}
	file := filepath.Join(folder, "local.svg")
	text := plot.Text{
		Title: "Heddle on one node, compared with the host's own loopback",
		Subtitle: fmt.Sprintf("%d runs of %g s each, interleaved; the node gives its sockets %s; %s",
			result.Runs, result.DurationS, result.Congestion, result.Machine),
	}
	if err := writeFile(file, func(w io.Writer) error { return plot.Write(w, result.Results, text) }); err != nil {
		return err
	}
	var section bytes.Buffer
	if err := bench.WriteLocalDoc(&section, result); err != nil {
		return err
	}
	old, err := os.ReadFile(document)
	if err != nil {
		return err
	}
	changed, err := bench.ReplaceBetween(old, section.Bytes(), bench.LocalDocBegin, bench.LocalDocEnd)
	if err != nil {
		return fmt.Errorf("%s: %w", document, err)
	}
	if err := writeFile(document, func(w io.Writer) error { _, err := w.Write(changed); return err }); err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, "Plot:", file)
	return err
}

func readLocalFile(file string) (r bench.LocalResult, err error) {
	f, err := os.Open(file)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return bench.ReadLocal(f)
}
