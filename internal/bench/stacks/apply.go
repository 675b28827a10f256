package stacks

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path"
	"strings"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/session"
)

// place is a lab whose nodes have the containers of all rows.
type place struct{ session.Lab }

// in gives mode and container of the lab for those of a measurement.
func (place) in(mode bench.Mode, of string) (bench.Mode, string) {
	row, ok := rowOf(mode)
	if !ok {
		return mode, of
	}
	node, c := path.Split(of)
	return bench.Heddle, node + container(row, strings.HasSuffix(c, "2"))
}

// Exec runs the load generator in the container of the mode's row.
func (p place) Exec(ctx context.Context, mode bench.Mode, container string, args ...string) *exec.Cmd {
	mode, container = p.in(mode, container)
	return p.Lab.Exec(ctx, mode, container, args...)
}

// IP asks the lab.
func (p place) IP(ctx context.Context, mode bench.Mode, container string) (netip.Addr, error) {
	mode, container = p.in(mode, container)
	return p.Lab.IP(ctx, mode, container)
}

// apply puts the rows' profiles in force, with the congestion controls that they name, and labels
// who is to have them. undo takes all away, also after an error.
func apply(ctx context.Context, l session.Lab) (undo func(context.Context) error, err error) {
	var undone []func(context.Context) error
	undo = func(ctx context.Context) (err error) {
		for _, f := range undone {
			err = errors.Join(err, f(ctx))
		}
		return err
	}
	agents, err := l.Agents()
	if err != nil {
		return undo, err
	}
	edit, back, err := edits(l)
	if err != nil {
		return undo, err
	}
	if len(edit.Objects) > 0 {
		if _, err := agents[0].EditStacks(ctx, api.StackEdit{Objects: edit.Objects}); err != nil {
			return undo, fmt.Errorf("load congestion controls: %w", err)
		}
	}
	undone = append(undone, func(ctx context.Context) error {
		_, err := agents[0].EditStacks(ctx, api.StackEdit{Delete: back.Delete})
		if err == nil && len(back.DeleteObjects) > 0 {
			_, err = agents[0].EditStacks(ctx, api.StackEdit{DeleteObjects: back.DeleteObjects})
		}
		return err
	})
	for i, agent := range agents {
		// At each node, so that it is in force there.
		if _, err := agent.EditStacks(ctx, api.StackEdit{Profiles: edit.Profiles}); err != nil {
			return undo, fmt.Errorf("put profiles in force: %w", err)
		}
		for row := range Rows {
			for _, second := range []bool{false, true} {
				name := fmt.Sprintf("n%d/%s", i+1, container(row, second))
				value := fmt.Sprintf("row%d", row)
				if _, err := agent.LabelEndpoint(ctx, name, api.LabelRequest{Set: map[string]string{label: value}}); err != nil {
					return undo, fmt.Errorf("label %s: %w: bring the lab up with --stacks --containers %d", name, err, labContainers)
				}
				undone = append(undone, func(ctx context.Context) error { return setLabel(ctx, agent, name, "") })
			}
		}
	}
	return undo, nil
}

// edits gives what puts the rows in force, and what takes them away.
func edits(l session.Lab) (edit, back api.StackEdit, err error) {
	for i, r := range Rows {
		p := r.profile(i)
		edit.Profiles, back.Delete = append(edit.Profiles, p), append(back.Delete, p.Name)
		if r.Object == "" {
			continue
		}
		raw, err := os.ReadFile(l.Sibling(r.Object))
		if err != nil {
			return edit, back, fmt.Errorf("congestion control of %s: %w: `make build` makes it", r.Mode, err)
		}
		edit.Objects, back.DeleteObjects = append(edit.Objects, raw), append(back.DeleteObjects, r.Settings.Congestion)
	}
	return edit, back, nil
}
