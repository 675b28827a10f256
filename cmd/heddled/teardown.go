package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/uninstall"
)

// newTeardownCommand removes what an agent leaves in the kernel when it stops. `heddle uninstall`
// removes its files, too.
func newTeardownCommand() *cobra.Command {
	n := uninstall.Node{KeepFiles: true}
	cmd := &cobra.Command{
		Use: "teardown", Short: "Remove Heddle's devices, routes, rules and pins from this node (its containers lose the network)",
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return n.Run(func(what string) { fmt.Fprintln(cmd.OutOrStdout(), "removed", what) })
		},
	}
	p := cmd.Flags()
	p.StringVar(&n.PinDir, "bpf-dir", "/sys/fs/bpf/heddle", "directory of the pins")
	p.StringVar(&n.StateDir, "state-dir", "/var/lib/heddle", "the agent's own files")
	p.StringVar(&n.APISocket, "api-socket", api.DefaultSocket, "Unix socket of the agent, which must not run")
	p.BoolVar(&n.Force, "force", false, "even if containers live: they lose the network, and the guards around them go")
	return cmd
}
