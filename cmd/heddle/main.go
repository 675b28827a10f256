// Command heddle is the operator's command line: it inspects agents, runs labs and benchmarks.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/version"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := newRootCmd().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "heddle:", err)
		os.Exit(1)
	}
}

func newRootCmd() *cobra.Command {
	root := &cobra.Command{
		Use:           "heddle",
		Short:         "Container networking where every packet crosses the kernel's stack once",
		Version:       version.String(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(newStatusCmd(), newEndpointsCmd(), newNodesCmd(), newEncryptionCmd(), newConnectionsCmd(), newObserveCmd(), newTopCmd(), newTraceCmd(), newPingCmd(), newUICmd(), newRDMACmd(), newLimitCmd(), newPolicyCmd(), newStackCmd(), newCaptureCmd(), newDoctorCmd(), newLabCmd(), newBenchCmd(), newDemoCmd(), newPauseCmd(), newUninstallCmd(), newMigrateCmd(), newVersionCmd())
	return root
}
