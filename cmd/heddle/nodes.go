package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

func newNodesCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "nodes",
		Short: "List the network's nodes, and which of them are gone",
		Long: `Lists the nodes of the network as the agents asked know them. STATE is live (its agent is there), away (the agent does not
run or does not reach the store, but the node answers: its connections go on) or dead (neither answers); SINCE is how long. With
--output json: a list of nodes.`,
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			from, err := f.find()
			if err != nil {
				return err
			}
			lists, err := ask(cmd.Context(), from, func(ctx context.Context, c *api.Client) ([]api.Node, error) { return c.Nodes(ctx) })
			list := likeliest(lists)
			return printAnswers(cmd, f.output, list, err, func(out io.Writer, list []api.Node) error { return printNodes(out, list, time.Now()) })
		},
	}
	f.register(cmd)
	cmd.AddCommand(newNodeForgetCmd())
	return cmd
}

func newNodeForgetCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "forget NAME",
		Short: "Remove a node that is gone from the network",
		Long: `Removes a node whose agent is gone from the network, with its endpoints: its prefix and addresses become free, and the others
end its routes. It refuses while the node's agent lives. A node that was only cut off joins again when it is back, with
what it had, unless somebody else has got that meanwhile.`,
		Args:         cobra.ExactArgs(1),
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := model.ValidateName("node", args[0]); err != nil {
				return err
			}
			from, err := f.find()
			if err != nil {
				return err
			}
			// One agent is enough, and in a lab not that of the node itself.
			var refused []error
			for _, c := range from.clients {
				_, err := ask(cmd.Context(), agents{clients: []*api.Client{c}}, func(ctx context.Context, c *api.Client) (struct{}, error) {
					return struct{}{}, c.ForgetNode(ctx, args[0])
				})
				if err == nil {
					_, err = fmt.Fprintf(cmd.OutOrStdout(), "node %s is forgotten\n", args[0])
					return err
				}
				refused = append(refused, err)
			}
			return errors.Join(refused...)
		},
	}
	f.register(cmd)
	return cmd
}

// likeliest puts what several agents say of one network together: of each node the state of the
// agent that knows it best.
func likeliest(lists [][]api.Node) []api.Node {
	rank := map[api.NodeState]int{api.NodeLive: 2, api.NodeAway: 1}
	byName := map[string]api.Node{}
	for _, list := range lists {
		for _, n := range list {
			if have, is := byName[n.Name]; !is || rank[n.State] > rank[have.State] {
				byName[n.Name] = n
			}
		}
	}
	out := []api.Node{}
	for _, n := range byName {
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b api.Node) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

func printNodes(out io.Writer, list []api.Node, now time.Time) error {
	t := newTable("NODE", "UNDERLAY", "PREFIXES", "ENDPOINTS", "STATE", "SINCE")
	for _, n := range list {
		var prefixes []string
		for _, p := range n.Prefixes {
			prefixes = append(prefixes, p.String())
		}
		since := ""
		if !n.Since.IsZero() {
			since = now.Sub(n.Since).Round(time.Second).String()
		}
		if !n.Seen.IsZero() {
			since += fmt.Sprintf(" (answered %s ago)", now.Sub(n.Seen).Round(time.Second))
		}
		t.row(n.Name, n.Underlay.String(), strings.Join(prefixes, ","), strconv.Itoa(n.Endpoints), string(n.State), since)
	}
	return t.writeTo(out)
}
