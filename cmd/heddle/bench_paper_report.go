package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/plot"
)

// newBenchPaperReportCmd makes `heddle bench paper report`.
func newBenchPaperReportCmd() *cobra.Command {
	var folder, document string
	cmd := &cobra.Command{
		Use:   "report",
		Short: "Draw the figures and write the table 'paper / here' of results",
		Long: `Reads paper.json and, if it is there, core.json (of 'heddle bench') in a folder, draws a plot beside them for each figure of
the paper that was measured, and writes the tables into a document, between its two marks.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return reportPaper(folder, document, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&folder, "folder", resultsFolder, "where the results are, and the plots go")
	cmd.Flags().StringVar(&document, "document", resultTables, "the document with the tables")
	return cmd
}

func reportPaper(folder, document string, out io.Writer) error {
	paper, err := readPaperFile(filepath.Join(folder, "paper.json"))
	if err != nil {
		return err
	}
	core, err := readCoreFile(filepath.Join(folder, "core.json"))
	if err != nil {
		return err
	}
	for _, figure := range plot.PaperFigures {
		file := filepath.Join(folder, "paper-"+figure.Number+".svg")
		var b bytes.Buffer
		if err := figure.Write(&b, paper); errors.Is(err, plot.ErrNotMeasured) {
			if _, err := fmt.Fprintln(out, err); err != nil {
				return err
			}
			continue
		} else if err != nil {
			return err
		}
		if err := writeFile(file, func(w io.Writer) error { _, err := b.WriteTo(w); return err }); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(out, "Plot:", file); err != nil {
			return err
		}
	}
	var text bytes.Buffer
	if err := bench.WritePaperDoc(&text, paper, core); err != nil {
		return err
	}
	old, err := os.ReadFile(document)
	if err != nil {
		return err
	}
	changed, err := bench.ReplacePaperDoc(old, text.Bytes())
	if err != nil {
		return fmt.Errorf("%s: %w", document, err)
	}
	return writeFile(document, func(w io.Writer) error { _, err := w.Write(changed); return err })
}

func readPaperFile(file string) (r bench.PaperResult, err error) {
	f, err := os.Open(file)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return bench.ReadPaper(f)
}

// readCoreFile reads the results of `heddle bench`; without them their rows say that they were not measured.
func readCoreFile(file string) (r []bench.Result, err error) {
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return bench.ReadResults(f)
}
