package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench"
)

// newBenchReportCmd makes `heddle bench report`.
func newBenchReportCmd() *cobra.Command {
	var core, callers, document string
	cmd := &cobra.Command{
		Use:   "report",
		Short: "Write the tables of results into the document, between their marks",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return reportTables(core, callers, document) },
	}
	cmd.Flags().StringVar(&core, "results", resultsFolder+"/core.json", "what 'heddle bench --json' wrote")
	cmd.Flags().StringVar(&callers, "callers", resultsFolder+"/callers.json", "what 'heddle bench --workloads crr,crr8,crr64 --json' wrote")
	cmd.Flags().StringVar(&document, "document", resultTables, "the document with the tables")
	return cmd
}

func reportTables(core, callers, document string) error {
	var results [2][]bench.Result
	for i, file := range []string{core, callers} {
		raw, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(raw, &results[i]); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	old, err := os.ReadFile(document)
	if err != nil {
		return err
	}
	changed, err := bench.ReplaceTables(old, results[0], results[1])
	if err != nil {
		return fmt.Errorf("%s: %w", document, err)
	}
	return writeFile(document, func(w io.Writer) error { _, err := w.Write(changed); return err })
}
