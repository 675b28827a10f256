package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench/core"
	"heddle.dev/heddle/internal/bench/cost"
	"heddle.dev/heddle/internal/bench/density"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/nodes"
	"heddle.dev/heddle/internal/bench/paper"
	"heddle.dev/heddle/internal/bench/peers"
	"heddle.dev/heddle/internal/bench/policy"
	"heddle.dev/heddle/internal/bench/pool"
	"heddle.dev/heddle/internal/bench/rdma"
	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/bench/stacks"
)

// benchmarks lists the commands beneath `heddle bench`, after that itself.
func benchmarks() []session.Command {
	return []session.Command{
		core.Command(), cost.Command(), density.Command(), nodes.Command(), paper.Command(), peers.Command(), peers.PacketsCommand(), policy.CapsCommand(), policy.ScaleCommand(), pool.Command(), rdma.Command(), stacks.Command(),
	}
}

// The committed results, the document with their tables in full, and the page with the most
// important ones.
const (
	resultsFolder = "docs/benchmarks"
	resultTables  = resultsFolder + "/tables.md"
	resultsPage   = "docs/benchmarks.md"
)

// newBenchCmd makes `heddle bench` and, hidden beneath it, the program it runs inside the
// containers.
func newBenchCmd() *cobra.Command {
	all := benchmarks()
	root := benchmarkCmd(all[0], "bench")
	for _, b := range all[1:] {
		root.AddCommand(benchmarkCmd(b, b.Name))
	}
	root.AddCommand(newBenchSummaryCmd(all), &cobra.Command{
		Use:                "loadgen",
		Hidden:             true,
		DisableFlagParsing: true,
		SilenceUsage:       true,
		RunE: func(cmd *cobra.Command, args []string) error {
			return loadgen.Main(cmd.Context(), args, loadgen.Streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
		},
	})
	return root
}

// benchmarkCmd makes the command of a benchmark, with `report` beneath it if it has tables.
func benchmarkCmd(b session.Command, name string) *cobra.Command {
	var s session.Settings
	cmd := &cobra.Command{
		Use: name, Short: b.Short, Long: b.Long, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return b.Run(cmd.Context(), s, cmd.OutOrStdout(), os.Stderr)
		},
	}
	b.Flags(session.Flags{FlagSet: cmd.Flags(), Settings: &s})
	if b.Report != nil {
		cmd.AddCommand(documentCmd("report", "Write the tables of committed results into the document, and draw their plots", resultTables,
			func(cmd *cobra.Command, folder, document string) error {
				return b.WriteReport(folder, document, cmd.OutOrStdout())
			}))
	}
	return cmd
}

// newBenchSummaryCmd makes `heddle bench summary`.
func newBenchSummaryCmd(all []session.Command) *cobra.Command {
	return documentCmd("summary", "Write the pages of results from the committed files", resultsPage,
		func(_ *cobra.Command, folder, document string) error { return session.Summarize(all, folder, document) })
}

// documentCmd makes a command that writes parts of a document, each between two marks.
func documentCmd(name, short, document string, write func(_ *cobra.Command, folder, document string) error) *cobra.Command {
	var folder string
	cmd := &cobra.Command{
		Use: name, Short: short, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return write(cmd, folder, document) },
	}
	cmd.Flags().StringVar(&folder, "folder", resultsFolder, "where the results are, and plots go")
	cmd.Flags().StringVar(&document, "document", document, "the document")
	return cmd
}

// newDemoCmd makes `heddle demo`: the bench for somebody who sees Heddle for the first time.
func newDemoCmd() *cobra.Command {
	cmd := benchmarkCmd(core.Demo(), "demo")
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error {
		_, err := fmt.Fprint(cmd.OutOrStdout(), strings.TrimLeft(demoWelcome, "\n"))
		return err
	}
	return cmd
}

const demoWelcome = `
Heddle demo: two nodes (network namespaces of this machine, joined by a veth), containers on each.
A server and a client run in them, unmodified, on three networks in turn:

  host     the node's own network, no container network at all: the yardstick
  overlay  a plain container network: veth, bridge, VXLAN, two stacks for every packet
  heddle   the same containers, with their TCP sockets in the node's stack: one pass

A short run on a machine that does other things too: read the ratios. 'heddle bench' measures for longer.

`
