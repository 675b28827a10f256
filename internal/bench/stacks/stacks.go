// Package stacks measures what stack profiles cost and give: so far new connections and a stream
// with a profile of the kernel's TCP, beside the same without.
package stacks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"strings"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/plot"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/lab"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/stack"
)

// Profiled is the container of Heddle with a stack profile.
const Profiled bench.Mode = "heddle+profile"

// label selects the containers that have the profile: the third and fourth of each node, which
// stand in for the first and second.
const label = "bench-stacks"

var profiled = strings.NewReplacer("c1", "c3", "c2", "c4")

// place is a lab of four containers a node.
type place struct{ session.Lab }

// Exec runs the load generator in the container, or, with a profile, in the one that has it.
func (p place) Exec(ctx context.Context, mode bench.Mode, container string, args ...string) *exec.Cmd {
	if mode == Profiled {
		return p.Lab.Exec(ctx, bench.Heddle, profiled.Replace(container), args...)
	}
	return p.Lab.Exec(ctx, mode, container, args...)
}

// IP asks the lab.
func (p place) IP(ctx context.Context, mode bench.Mode, container string) (netip.Addr, error) {
	if mode == Profiled {
		return p.Lab.IP(ctx, bench.Heddle, profiled.Replace(container))
	}
	return p.Lab.IP(ctx, mode, container)
}

// Result is what `heddle bench stacks` found.
type Result struct {
	Machine    string         `json:"machine"`
	Background float64        `json:"background"` // processors that other programs kept busy before
	Profile    string         `json:"profile"`
	Results    []bench.Result `json:"results"`
}

// profile has every setting of the kernel's TCP that changes nothing of what is measured.
func profile() *stack.Profile {
	return &stack.Profile{
		Name: label, Stack: stack.Kernel, Fallback: stack.Refuse,
		Selector: policy.Selector{Requirements: policy.Requirements{Labels: map[string]string{label: "yes"}}},
		Settings: stack.Settings{
			Congestion: "cubic", InitialWindow: 10, PacingRate: 34_000_000_000, UserTimeout: stack.Duration(time.Minute), NotsentLowat: 1 << 30,
			Keepalive: &stack.KeepaliveTimes{Idle: stack.Duration(time.Hour), Interval: stack.Duration(time.Minute), Count: 9},
		},
	}
}

// Command is `heddle bench stacks`.
func Command() session.Command {
	var o bench.Options
	return session.Benchmark[Result]{
		Name:  "stacks",
		Short: "Measure new connections and streams with a stack profile, and without",
		Long: `Measures what a profile of the kernel's TCP with six settings costs each connection, beside Heddle without one and the host. The lab
must have four containers a node; --up makes one.`,
		Lab: session.Needs{Program: true, Size: lab.Size{Containers: 4}},
		Flags: func(f session.Flags) {
			f.Modes = []string{string(bench.Host), string(bench.Heddle)}
			f.DeclareWorkloads(append([]string{"iperf3"}, report.ConnectWorkloads...), "some of iperf3, crr, crr8, crr64")
			f.DeclareScopes()
			f.DeclareRuns(5, "runs of each workload, scope and mode")
			f.DeclareDuration(time.Second, "length of a run")
		},
		Check: func(s *session.Session) (err error) {
			o, err = s.Options()
			o.Modes = append(o.Modes, Profiled)
			return err
		},
		Run: func(ctx context.Context, s *session.Session) (r Result, err error) {
			r = Result{Machine: plot.Subtitle(o), Background: s.Background, Profile: profile().Settings.String()}
			o.Program = s.Program
			undo, err := apply(ctx, s.Lab)
			if err == nil {
				r.Results, err = bench.Run(ctx, place{s.Lab}, o)
			}
			return r, errors.Join(err, undo(context.WithoutCancel(ctx)))
		},
		Print: func(w io.Writer, _ *session.Session, r Result) error {
			if r.Background > machine.QuietMachine {
				if _, err := fmt.Fprintf(w, "other programs kept %.1f processors busy before: not to judge by\n", r.Background); err != nil {
					return err
				}
			}
			return report.WriteTable(w, r.Results)
		},
	}.Command()
}

// apply puts the profile in force, and labels who is to have it. undo takes both away, also after
// an error.
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
	for i, agent := range agents {
		if _, err := agent.EditStacks(ctx, api.StackEdit{Profiles: []*stack.Profile{profile()}}); err != nil {
			return undo, fmt.Errorf("put the profile in force: %w", err)
		}
		if i == 0 {
			undone = append(undone, func(ctx context.Context) error {
				_, err := agent.EditStacks(ctx, api.StackEdit{Delete: []string{label}})
				return err
			})
		}
		for _, c := range []string{"c3", "c4"} {
			name := fmt.Sprintf("n%d/%s", i+1, c)
			if _, err := agent.LabelEndpoint(ctx, name, api.LabelRequest{Set: map[string]string{label: "yes"}}); err != nil {
				return undo, fmt.Errorf("label %s: %w: bring the lab up with --containers 4", name, err)
			}
			undone = append(undone, func(ctx context.Context) error {
				_, err := agent.LabelEndpoint(ctx, name, api.LabelRequest{Remove: []string{label}})
				return err
			})
		}
	}
	return undo, nil
}
