package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/uninstall"
)

// agentCgroups is where agents are by default, and as the package's service, with cgroup version 2
// alone or beside version 1.
var agentCgroups = []string{
	"/sys/fs/cgroup/heddle", "/sys/fs/cgroup/system.slice/heddled.service/agent",
	"/sys/fs/cgroup/unified/heddle", "/sys/fs/cgroup/unified/system.slice/heddled.service/agent",
}

func newUninstallCmd() *cobra.Command {
	var n uninstall.Node
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove everything of Heddle's from this node but the programs",
		Long: `Removes what an agent leaves in place when it stops: BPF programs and maps, network devices, routes, rules, the
nftables table, the fd keeper, control groups, sockets and the state directory, and prints each thing. On the network's
first node that is the store, too. It refuses while an agent or containers run. It can be repeated, and works on a node
that is half installed.

net.ipv4.ip_forward stays on: others may have come to need it. The node's record stays in the store of the network.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := cmd.OutOrStdout()
			any := false
			err := n.Run(func(what string) { any = true; fmt.Fprintln(out, "removed", what) })
			if err == nil && !any {
				fmt.Fprintln(out, "nothing of Heddle's is here")
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&n.PinDir, "bpf-dir", "/sys/fs/bpf/heddle", "the agent's --bpf-dir")
	f.StringVar(&n.StateDir, "state-dir", "/var/lib/heddle", "the agent's --state-dir")
	f.StringVar(&n.APISocket, "api-socket", api.DefaultSocket, "the agent's --api-socket")
	f.StringVar(&n.SeccompSocket, "seccomp-socket", "/run/heddle/seccomp.sock", "the agent's --seccomp-socket")
	f.StringSliceVar(&n.Cgroups, "cgroup", agentCgroups, "the agent's --cgroup")
	f.BoolVar(&n.KeepFiles, "keep-files", false, "keep the node's identity, the store's data and the network's authority")
	f.BoolVar(&n.Force, "force", false, "even if containers or the agent live: they lose the network, and the guards around them go")
	return cmd
}
