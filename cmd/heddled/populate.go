package main

import (
	"os"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench/populate"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// newPopulateCommand is a part of `heddle bench policy-scale` that needs the store: here, where
// etcd's client is already.
func newPopulateCommand() *cobra.Command {
	var o populate.Options
	id := uint16(store.DefaultNetworkID)
	cmd := &cobra.Command{
		Use: "populate", Short: "Fill a network's store with made-up nodes and endpoints until standard input ends (for benches)",
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true, Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.NetworkID = model.NetworkID(id)
			return populate.Run(cmd.Context(), o, os.Stdin, os.Stdout)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.JoinFile, "join-file", "", "join file of the network")
	f.Uint16Var(&id, "network-id", id, "id of the network")
	f.IntVar(&o.Nodes, "nodes", 100, "nodes to make up")
	f.BoolVar(&o.Probes, "probes", false, "the nodes say that they answer probes")
	f.IntVar(&o.Endpoints, "endpoints", 10000, "endpoints to make up on them")
	return cmd
}
