package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/policy/document"
)

// What commands have in common whose documents the network's store keeps: policies and stack
// profiles.

// readFiles reads files of documents; flag is how a command is given one.
func readFiles(names []string, stdin io.Reader, flag string) ([]document.File, error) {
	if len(names) == 0 {
		return nil, fmt.Errorf("no file: name one with %s, or - for standard input", flag)
	}
	files := make([]document.File, len(names))
	for i, name := range names {
		files[i].Name = name
		in := stdin
		if name == "-" {
			files[i].Name = "standard input"
		} else {
			f, err := os.Open(name)
			if err != nil {
				return nil, err
			}
			defer f.Close()
			in = f
		}
		var err error
		// One byte more than is taken tells "too large" from "all of it".
		if files[i].Data, err = io.ReadAll(io.LimitReader(in, document.MaxBytes+1)); err != nil {
			return nil, fmt.Errorf("read %s: %w", files[i].Name, err)
		}
	}
	return files, nil
}

// applyEdit has the first agent make an edit, and waits until the others have it, too: for them
// nothing changes, and they tell when it is in force.
func applyEdit(cmd *cobra.Command, f agentFlags, edit func(context.Context, *api.Client) ([]api.PolicyOutcome, error)) error {
	var first []api.PolicyOutcome
	err := eachAgent(cmd.Context(), f, func(ctx context.Context, c *api.Client) error {
		made, err := edit(ctx, c)
		if first == nil {
			first = made
		}
		return err
	})
	return errors.Join(printOutcomes(cmd.OutOrStdout(), first, f.output), err)
}

// deleteEdit has the first agent delete, and waits until gone says so of each; does is what one
// does with what there still is.
func deleteEdit(cmd *cobra.Command, f agentFlags, does string, edit func(context.Context, *api.Client) ([]api.PolicyOutcome, error), gone func(context.Context, *api.Client) (bool, error)) error {
	made, err := firstAgent(cmd.Context(), f, edit)
	if err != nil {
		return err
	}
	err = eachAgent(cmd.Context(), f, func(ctx context.Context, c *api.Client) error { return awaitGone(ctx, c, does, gone) })
	return errors.Join(printOutcomes(cmd.OutOrStdout(), made, f.output), err)
}

// awaitGone returns when gone says that an agent has nothing of what was deleted any more. What the
// agent still does with it is said in the error, once ctx has ended.
func awaitGone(ctx context.Context, c *api.Client, does string, gone func(context.Context, *api.Client) (bool, error)) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if done, err := gone(ctx, c); done || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("agent at %s still %s what was deleted: %w", c.SocketPath(), does, ctx.Err())
		case <-tick.C:
		}
	}
}

func printOutcomes(out io.Writer, list []api.PolicyOutcome, format outputFormat) error {
	if format == jsonOutput {
		return printJSON(out, list)
	}
	unchanged := 0
	for _, o := range list {
		if o.Change == "unchanged" {
			unchanged++
			continue
		}
		if _, err := fmt.Fprintf(out, "%s %s %s\n", o.Kind, o.Name, o.Change); err != nil {
			return err
		}
	}
	if unchanged == 0 {
		return nil
	}
	_, err := fmt.Fprintf(out, "%d unchanged\n", unchanged)
	return err
}
