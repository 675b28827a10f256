package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
)

// newMigrateCmd gives an endpoint's address to another node.
func newMigrateCmd() *cobra.Command {
	var (
		f  agentFlags
		to string
	)
	cmd := &cobra.Command{
		Use:   "migrate [NAME --to NODE]",
		Short: "Move a stopped container's endpoint, with its address, to another node",
		Long: "Move the endpoint of a stopped container, with its address, labels and limits, from this node to another. There, the next " +
			"endpoint of its name takes it up: `heddle endpoints add NAME --netns PATH`. The container's files are moved by other means.\n\n" +
			"The command may be repeated: it says where the endpoint is. As long as nothing has taken it up, it can be given to yet another " +
			"node, or back. Without a name, the addresses that have moved are listed.",
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return oneAgent(cmd.Context(), f, func(ctx context.Context, c *api.Client) error {
				if len(args) == 0 {
					if to != "" {
						return errors.New("--to: give the endpoint's name, too")
					}
					moves, err := c.Moves(ctx)
					if err != nil {
						return err
					}
					if f.output == jsonOutput {
						return printJSON(cmd.OutOrStdout(), moves)
					}
					return printMoves(cmd.OutOrStdout(), moves)
				}
				if to == "" {
					return errors.New("--to: name the node that the endpoint goes to")
				}
				m, err := c.Migrate(ctx, args[0], api.MigrateRequest{To: to})
				if err != nil {
					return err
				}
				if f.output == jsonOutput {
					return printJSON(cmd.OutOrStdout(), m)
				}
				return printMigration(cmd.OutOrStdout(), m)
			})
		},
	}
	f.register(cmd)
	cmd.Flags().StringVar(&to, "to", "", "node that the endpoint goes to")
	return cmd
}

// printMigration says what was done, and what is to be done yet.
func printMigration(w io.Writer, m api.Migration) error {
	for _, s := range m.Steps {
		if _, err := fmt.Fprintf(w, "%-45s %s\n", s.Name, s.Took.Round(10*time.Microsecond)); err != nil {
			return err
		}
	}
	if !m.Move.Waiting {
		_, err := fmt.Fprintf(w, "%s, address %s, is attached on node %s\n", m.Move.Name, m.Move.Addr, m.Move.Node)
		return err
	}
	_, err := fmt.Fprintf(w, "%s, address %s, waits on node %s; there: heddle endpoints add %[1]s --netns PATH\n", m.Move.Name, m.Move.Addr, m.Move.Node)
	return err
}

func printMoves(w io.Writer, moves []api.Move) error {
	t := newTable("ADDRESS", "NAME", "NODE", "FROM", "HOME", "STATE")
	for _, m := range moves {
		state := "attached"
		if m.Waiting {
			state = "waits"
		}
		t.row(m.Addr.String(), m.Name, m.Node, m.From, m.Home, state)
	}
	return t.writeTo(w)
}
