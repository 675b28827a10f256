package main

import (
	"cmp"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/agentpod"
	"heddle.dev/heddle/internal/logform"
)

// newPodCommand is for the DaemonSet of packaging/kubernetes.
func newPodCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "pod", Short: "Run or install the agent as a pod of Kubernetes",
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true, Hidden: true,
	}
	cmd.AddCommand(newPodRunCommand(), newPodInstallCommand())
	return cmd
}

// newPodRunCommand takes the agent's own settings from the environment, as the agent does.
func newPodRunCommand() *cobra.Command {
	var a agentpod.Agent
	cmd := &cobra.Command{
		Use: "run [FLAGS] [-- AGENT'S FLAGS]", Short: "Run the agent, outside of the container's control groups",
		SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			a.Args = args
			// The agent's own form, which it takes from the environment, too.
			if a.Log, err = logform.New(os.Stderr, "info", cmp.Or(os.Getenv(envPrefix+"LOG_FORMAT"), logform.Text)); err != nil {
				return err
			}
			if a.Program, err = os.Executable(); err != nil {
				return err
			}
			return a.Run(cmd.Context())
		},
	}
	p := cmd.Flags()
	p.StringVar(&a.Node, "node", "", "name of the Kubernetes node")
	p.StringVar(&a.StoreNode, "store-node", "", "Kubernetes node whose agent serves the store; empty with an etcd of your own")
	p.StringVar(&a.JoinFile, "join-file", "/etc/heddle/join.pem", "the network's join file; waited for, but on the store's node")
	p.StringVar(&a.Cgroups, "cgroups", "/sys/fs/cgroup", "where the node's control groups are mounted")
	_ = cmd.MarkFlagRequired("node") // it is there
	return cmd
}

// newPodInstallCommand is the init container.
func newPodInstallCommand() *cobra.Command {
	var i agentpod.Installation
	var network string
	cmd := &cobra.Command{
		Use: "install", Short: "Install the programs and the CNI configuration on the node",
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(*cobra.Command, []string) error {
			self, err := os.Executable()
			if err != nil {
				return err
			}
			i.From = filepath.Dir(self)
			if i.Network, err = agentpod.ParseNetwork(network); err != nil {
				return err
			}
			return i.Install()
		},
	}
	p := cmd.Flags()
	p.StringVar(&i.Programs, "programs", "/host/opt/heddle/bin", "the node's directory for heddle and heddle-runtime")
	p.StringVar(&i.CNIPrograms, "cni-programs", "/host/opt/cni/bin", "the node's directory of CNI plugins")
	p.StringVar(&i.CNIConfig, "cni-config", "/host/etc/cni/net.d", "the node's directory of CNI configurations")
	p.StringVar(&network, "network", string(agentpod.Main), "main: Heddle is the pods' network; chained: behind the one there is; none: write no CNI configuration")
	p.StringVar(&i.CNIVersion, "cni-version", "1.0.0", "version of CNI in the configuration")
	p.StringVar(&i.Kubernetes, "kubernetes", "", "the node's socket of heddle-kube, for pods' labels; empty: pods get none")
	p.StringSliceVar(&i.Adopted, "carried", nil, "prefixes of the network there is, on all nodes, if chained")
	return cmd
}
