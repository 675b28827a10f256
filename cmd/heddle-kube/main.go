// Command heddle-kube brings a Kubernetes cluster's labels, NetworkPolicies and Services into
// Heddle: one runs on each node, beside the agent. See docs/howto/kubernetes.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/kube"
	"heddle.dev/heddle/internal/logform"
	"heddle.dev/heddle/internal/podlabels"
	"heddle.dev/heddle/internal/version"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := newCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "heddle-kube:", err)
		os.Exit(1)
	}
}

func newCommand() *cobra.Command {
	var cfg kube.Config
	var level, format string
	cmd := &cobra.Command{
		Use:   "heddle-kube",
		Short: "Bring a Kubernetes cluster's labels, NetworkPolicies and Services into Heddle",
		Long: "Bring a Kubernetes cluster's labels, NetworkPolicies and Services into Heddle: one process per node, beside the agent, as root. " +
			"Every flag can be set by a variable, too: HEDDLE_KUBE_LOG_LEVEL is --log-level.",
		Version:       version.String(),
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := fromEnvironment(cmd.Flags(), os.LookupEnv); err != nil {
				return err
			}
			var err error
			if cfg.Log, err = logform.New(os.Stderr, level, format); err != nil {
				return err
			}
			return kube.Run(cmd.Context(), cfg)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Kubeconfig, "kubeconfig", "", "kubeconfig `file`; without it, the service account of the pod this runs in")
	f.StringVar(&cfg.Node, "node", os.Getenv("NODE_NAME"), "this node's `name` in Kubernetes; by default the variable NODE_NAME")
	f.StringVar(&cfg.AgentSocket, "api-socket", api.DefaultSocket, "the agent's API socket")
	f.StringVar(&cfg.Socket, "socket", podlabels.DefaultSocket, "where heddle-cni asks for pods' labels")
	f.StringVar(&cfg.Metrics, "metrics", "127.0.0.1:9467", "`address` of the metrics' HTTP server; empty: none")
	f.StringVar(&cfg.LeaseNamespace, "lease-namespace", "kube-system", "`namespace` of the Lease by which one node keeps the policies")
	f.DurationVar(&cfg.LeaseDuration, "lease-duration", 15*time.Second, "for how long a node that has died keeps the Lease")
	f.StringVar(&level, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&format, "log-format", logform.Text, "text (name=value) or json, a line for each message")
	return cmd
}

// fromEnvironment sets the flags that are not on the command line from the environment, as
// /etc/default/heddle-kube has them. Empty variables count as none.
func fromEnvironment(flags *pflag.FlagSet, lookup func(string) (string, bool)) error {
	var errs []error
	flags.VisitAll(func(f *pflag.Flag) {
		name := "HEDDLE_KUBE_" + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		if value, ok := lookup(name); ok && value != "" && !f.Changed {
			if err := flags.Set(f.Name, value); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", name, err))
			}
		}
	})
	return errors.Join(errs...)
}
