package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/plot"
)

// newBenchPeersReportCmd makes `heddle bench peers report`.
func newBenchPeersReportCmd() *cobra.Command {
	var folder, document string
	cmd := &cobra.Command{
		Use:   "report",
		Short: "Draw the plot and write the tables of results",
		Long: `Reads peers.json in a folder, draws peers.svg beside it, and writes the tables and the settings into a document, between its
two marks.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return reportPeers(folder, document, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&folder, "folder", resultsFolder, "where the results are, and the plot goes")
	cmd.Flags().StringVar(&document, "document", resultTables, "the document with the tables")
	return cmd
}

func reportPeers(folder, document string, out io.Writer) (err error) {
	f, err := os.Open(filepath.Join(folder, "peers.json"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	result, err := bench.ReadPeers(f)
	if err != nil {
		return err
	}
	var text bytes.Buffer
	if err := bench.WritePeersDoc(&text, result); err != nil {
		return err
	}
	old, err := os.ReadFile(document)
	if err != nil {
		return err
	}
	changed, err := bench.ReplaceBetween(old, text.Bytes(), bench.PeersDocBegin, bench.PeersDocEnd)
	if err != nil {
		return fmt.Errorf("%s: %w", document, err)
	}
	file := filepath.Join(folder, "peers.svg")
	about := plot.Text{Title: "Heddle and others' networks",
		Subtitle: fmt.Sprintf("%d runs of %g s each, interleaved; %s", result.Results[0].Runs, result.DurationS, result.Machine)}
	if err := writeFile(file, func(w io.Writer) error { return plot.Write(w, result.Results, about) }); err != nil {
		return err
	}
	if err := writeFile(document, func(w io.Writer) error { _, err := w.Write(changed); return err }); err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, "Plot:", file)
	return err
}
