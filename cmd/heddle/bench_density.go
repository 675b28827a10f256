package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/plot"
	"heddle.dev/heddle/internal/lab"
)

// densePrefix is the dense node's: the default, a /24, has room for 253 endpoints.
const densePrefix = "10.244.128.0/20"

// newBenchDensityCmd makes `heddle bench density`.
func newBenchDensityCmd() *cobra.Command {
	s := benchSettings{}
	o := bench.DensityOptions{}
	cmd := &cobra.Command{
		Use:   "density",
		Short: "Measure what up to 1,000 containers and 100,000 live connections cost a node",
		Long: `Brings a lab of two nodes up and makes more and more containers on its second node, then more and more live connections between
them and servers. At each step it measures memory, connects, how many connections a listener accepts, and what the agent uses
at rest and while containers call socket() at fixed rates. A container is a network namespace, an endpoint and an intercepted thread of
one process. The lab goes when it is done, also on Ctrl-C; one that was up before stays, and what was made in it goes. The machine's memory and processors are measured: keep it otherwise idle.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runBenchDensity(cmd.Context(), s, o, cmd.OutOrStdout(), os.Stderr)
		},
	}
	f := cmd.Flags()
	f.IntSliceVar(&o.Containers, "containers", bench.DensityContainers, "numbers of containers, ascending")
	f.IntSliceVar(&o.Connections, "connections", bench.DensityConnections, "numbers of live connections, ascending, the first 0")
	f.Float64SliceVar(&o.Rates, "rates", bench.DensityRates, "calls of socket() a second")
	f.StringSliceVar(&s.scopes, "scopes", []string{"inter", "intra"}, "of live connections: inter (between nodes), intra (on one node)")
	f.IntVar(&o.Rounds, "rounds", 3, "rounds of connects at each step")
	f.DurationVar(&o.Duration, "duration", time.Second, "length of one measurement")
	f.StringVar(&s.lab, "lab", "density", "name of the lab; one that is up must have room for the containers")
	f.StringVar(&s.jsonFile, "json", "", "write the results to this file")
	cmd.AddCommand(newBenchDensityReportCmd())
	return cmd
}

func runBenchDensity(ctx context.Context, s benchSettings, o bench.DensityOptions, out io.Writer, progress *os.File) (err error) {
	ctx, cancel := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer cancel()
	o.Progress = progress
	if o.Scopes, err = bench.ParseScopes(s.scopes); err != nil {
		return err
	}
	if err := errors.Join(o.Validate(), s.checkFiles()); err != nil {
		return err
	}
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own program: %w", err)
	}
	o.Program = []string{program, "bench", "peer"}
	place, down, err := densityLab(ctx, s.lab, progress)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, down()) }()
	result, err := bench.RunDensity(ctx, place, o)
	if ctx.Err() != nil {
		return errors.New("interrupted; nothing was written")
	}
	if err != nil {
		return err
	}
	result.Machine = machine()
	if result.Background > bench.QuietMachine {
		_, _ = fmt.Fprintf(progress, "other programs kept %.1f of %d processors busy: the figures are noisy\n", result.Background, runtime.NumCPU())
	}
	if err := bench.WriteDensityTable(out, result); err != nil {
		return err
	}
	return s.writeFiles(result, nil)
}

// densityLab brings the lab up, unless it is. down removes what it brought up, with whatever was made in it.
func densityLab(ctx context.Context, name string, progress io.Writer) (place bench.DensityLab, down func() error, err error) {
	l, err := lab.Open(name)
	if err != nil {
		return place, nil, err
	}
	if s, err := l.Load(); err == nil && s.Ready && s.Nodes >= 2 {
		place, err = densityPlace(l, s.Containers)
		place.Stays = true
		return place, func() error { return nil }, err
	}
	down = func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTimeout)
		defer cancel()
		return l.Down(ctx, io.Discard)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, down())
		}
	}()
	const containers = 1
	size := lab.Size{Nodes: 2, Containers: containers, NodeArgs: map[string][]string{"n2": {"--prefix", densePrefix}}}
	if err := errors.Join(down(), l.Up(ctx, size, progress)); err != nil {
		return place, nil, err
	}
	place, err = densityPlace(l, containers)
	return place, down, err
}

// densityPlace finds what of a lab that is up is spoken to and changed.
func densityPlace(l lab.Lab, containers int) (place bench.DensityLab, err error) {
	network, err := l.Network()
	if err != nil {
		return place, err
	}
	place.First = containers + 1
	for i, n := range network.Nodes[:len(place.Nodes)] {
		place.Nodes[i] = bench.DensityNode{Agent: api.Dial(network.APISockets[i]), Netns: n.Netns, Underlay: n.Underlay, SeccompSocket: n.SeccompSocket,
			AddNamespace:    func(i int) (string, string, error) { return l.AddNamespace(n.Name, i) },
			RemoveNamespace: func(i int) error { return l.RemoveNamespace(n.Name, i) }}
	}
	return place, nil
}

// newBenchDensityReportCmd makes `heddle bench density report`.
func newBenchDensityReportCmd() *cobra.Command {
	var folder, document string
	cmd := &cobra.Command{
		Use:   "report",
		Short: "Draw the curves and write the tables of results",
		Long:  "Reads density.json in a folder, draws density.svg beside it, and writes the tables into a document, between its two marks.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return reportDensity(folder, document)
		},
	}
	cmd.Flags().StringVar(&folder, "folder", resultsFolder, "where the results are, and the plot goes")
	cmd.Flags().StringVar(&document, "document", resultTables, "the document with the tables")
	return cmd
}

func reportDensity(folder, document string) (err error) {
	f, err := os.Open(filepath.Join(folder, "density.json"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	result, err := bench.ReadDensity(f)
	if err != nil {
		return err
	}
	text := plot.Text{Title: "Many containers and many connections on one node", Subtitle: result.Machine}
	err = writeFile(filepath.Join(folder, "density.svg"), func(w io.Writer) error { return plot.WriteDensity(w, result, text) })
	if err != nil {
		return err
	}
	var tables bytes.Buffer
	if err := bench.WriteDensityDoc(&tables, result); err != nil {
		return err
	}
	old, err := os.ReadFile(document)
	if err != nil {
		return err
	}
	changed, err := bench.ReplaceDensityDoc(old, tables.Bytes())
	if err != nil {
		return fmt.Errorf("%s: %w", document, err)
	}
	return writeFile(document, func(w io.Writer) error { _, err := w.Write(changed); return err })
}
