package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench"
)

// newBenchSummaryCmd makes `heddle bench summary`.
func newBenchSummaryCmd() *cobra.Command {
	var folder, document string
	cmd := &cobra.Command{
		Use:   "summary",
		Short: "Write the page of results from the committed files",
		Long: `Reads the JSON files of results in a folder and writes the short tables of the page of results
from them, each between its two marks. 'report' of each bench writes its tables in full, into a
document of their own.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return summarize(folder, document) },
	}
	cmd.Flags().StringVar(&folder, "folder", resultsFolder, "where the results are")
	cmd.Flags().StringVar(&document, "document", "docs/benchmarks.md", "the page of results")
	return cmd
}

// The committed results, and the document with their tables in full.
const (
	resultsFolder = "docs/benchmarks"
	resultTables  = resultsFolder + "/tables.md"
)

func summarize(folder, document string) error {
	old, err := os.ReadFile(document)
	if err != nil {
		return err
	}
	changed, err := bench.Summarize(old, os.DirFS(folder))
	if err != nil {
		return fmt.Errorf("%s: %w", document, err)
	}
	return writeFile(document, func(w io.Writer) error { _, err := w.Write(changed); return err })
}
