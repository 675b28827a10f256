package stacks

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/session"
)

// A run of what a profile costs is so many turns without it and as many with it, one after the
// other.
const (
	profileTurns = 30
	profileTurn  = 100 * time.Millisecond
)

// profileCost measures how much longer socket() and connect() take with the profile of the row
// heddle+profile than without, in microseconds: of a turn's connections the fastest twentieth, of a
// run's turns the median of what one with it took more than the one without before it. The same
// containers have it and have it not: two pairs of containers differ by as much by themselves, and
// the medians of turns by ten times as much.
func profileCost(ctx context.Context, s *session.Session) (us bench.Spread, err error) {
	agents, err := s.Lab.Agents()
	if err != nil {
		return us, err
	}
	cpus, err := machine.ChoosePinning()
	if err != nil {
		return us, err
	}
	row, _ := rowOf(Profiled)
	r := &bench.Runner{Place: place{s.Lab}, CPUs: cpus, Addresses: map[string]netip.Addr{}}
	r.Options.Program, r.Options.Duration = s.Program, profileTurn
	cell := bench.Cell{Workload: bench.WorkloadNamed("crr"), Scope: bench.Inter, Mode: bench.Heddle}
	defer func() { err = errors.Join(err, give(context.WithoutCancel(ctx), agents, "")) }()
	var runs []float64
	for run := range s.Runs {
		s.Step(fmt.Sprintf("run %d: what a profile costs a connection", run+1), run, s.Runs, 0)
		var more []float64
		for turn := range profileTurns {
			var took [2]float64
			for i, value := range []string{"", rowLabel(row)} {
				if err := give(ctx, agents, value); err != nil {
					return us, err
				}
				sample, err := r.Measure(ctx, cell, 2*(run*profileTurns+turn)+i)
				if err != nil {
					return us, &bench.RunError{Cell: cell, Run: run + 1, Err: err}
				}
				took[i] = sample["socket_connect_p5_us"]
			}
			more = append(more, took[1]-took[0])
		}
		runs = append(runs, bench.SpreadOf(more).Median)
	}
	return bench.SpreadOf(runs), nil
}

// give has the first container of each node have a row's profile, or none.
func give(ctx context.Context, agents []*api.Client, value string) (err error) {
	for i, agent := range agents {
		err = errors.Join(err, setLabel(ctx, agent, fmt.Sprintf("n%d/c1", i+1), value))
	}
	return err
}

// rowLabel is the value by which a container has a row's profile.
func rowLabel(row int) string { return fmt.Sprintf("row%d", row) }

// setLabel has a container have the profile that a value of the label says, or none.
func setLabel(ctx context.Context, agent *api.Client, container, value string) error {
	request := api.LabelRequest{Set: map[string]string{label: value}}
	if value == "" {
		request = api.LabelRequest{Remove: []string{label}}
	}
	_, err := agent.LabelEndpoint(ctx, container, request)
	return err
}
