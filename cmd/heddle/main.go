// Command heddle is the operator's command line: it inspects agents, runs labs and benchmarks.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
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
	refuseUnknown(root)
	return root
}

// refuseUnknown has each command that has others beneath it refuse what is none of them, as cobra
// does at the root only.
func refuseUnknown(parent *cobra.Command) {
	for _, cmd := range parent.Commands() {
		if !cmd.HasSubCommands() {
			continue
		}
		refuseUnknown(cmd)
		cmd.Args = noneSuch
		if !cmd.Runnable() {
			cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		}
	}
}

// noneSuch is an error if there are arguments: the first was meant for a command beneath cmd.
func noneSuch(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	text := fmt.Sprintf("unknown command %q for %q", args[0], cmd.CommandPath())
	cmd.SuggestionsMinimumDistance = 2 // as cobra's at the root
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		text += "\n\nDid you mean this?\n\t" + strings.Join(near, "\n\t") + "\n"
	}
	return errors.New(text)
}
