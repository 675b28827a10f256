package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/lab"
	"heddle.dev/heddle/internal/netns"
)

// imageMB is the size of the paper's image, in megabytes.
const imageMB = 58

// newBenchMigrateCmd makes `heddle bench migrate`.
func newBenchMigrateCmd() *cobra.Command {
	var s benchSettings
	cmd := &cobra.Command{
		Use:   "migrate",
		Short: "Repeat table 4 of the Slim paper: moving a stopped container to another node",
		Long: `A container with a server and an image of 58 MB is stopped on one node of the lab and started on the other with its
address, on the overlay and with Heddle. Each step is timed, up to the first byte that peers on both nodes get.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runBenchMigrate(cmd.Context(), s, cmd.OutOrStdout(), os.Stderr)
		},
	}
	f := cmd.Flags()
	f.IntVar(&s.runs, "runs", 5, "migrations in each mode")
	f.StringVar(&s.lab, "lab", "", "name of the lab (default: the default lab)")
	f.StringVar(&s.jsonFile, "json", "", "write the results to this file")
	f.BoolVar(&s.up, "up", false, "bring the lab up if it is not, and down again afterwards")
	return cmd
}

func runBenchMigrate(ctx context.Context, s benchSettings, out io.Writer, progress *os.File) error {
	if s.runs < 1 {
		return errors.New("--runs: want 1 or more")
	}
	if err := s.checkFiles(); err != nil {
		return err
	}
	name := cmp.Or(s.lab, lab.DefaultName)
	o := bench.MigrateOptions{Runs: s.runs, ImageBytes: imageMB * 1e6}
	for i, node := range []string{"n1", "n2"} {
		o.Sockets[i], o.Netns[i] = filepath.Join(labRunFolder, name, node, "api.sock"), netns.Path(name+"-"+node)
	}
	var result bench.MigrateResult
	err := s.inLabWithPeer(ctx, progress, func(ctx context.Context, place bench.Lab, peer []string) (err error) {
		o.Runtime = filepath.Join(filepath.Dir(place.Heddle), "heddle-runtime")
		result, err = bench.RunMigrate(ctx, place, peer, o, progress)
		return err
	})
	if err != nil {
		return err
	}
	t := newTable("STEP", "overlay, s", "heddle, s")
	row := func(what string, overlay, heddle float64) {
		t.row(what, fmt.Sprintf("%.3f", overlay), fmt.Sprintf("%.3f", heddle))
	}
	for i, what := range bench.MigrateSteps {
		row(what, result.Median(bench.Overlay, i), result.Median(bench.Heddle, i))
	}
	row("total", result.MedianTotal(bench.Overlay), result.MedianTotal(bench.Heddle))
	if err := t.writeTo(out); err != nil {
		return err
	}
	return s.writeFiles(result, nil)
}
