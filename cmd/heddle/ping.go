package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
)

// Bounds of a ping.
const (
	minPingInterval = 200 * time.Millisecond
	maxPingCount    = 10_000
)

// pingFlags are those of `heddle ping`.
type pingFlags struct {
	agentFlags
	count    int
	interval time.Duration
}

func newPingCmd() *cobra.Command {
	var f pingFlags
	cmd := &cobra.Command{
		Use:   "ping SOURCE DESTINATION[:PORT]",
		Short: "Try a container's connection again and again, and say how long it takes",
		Long: `Makes one TCP connection after the other in a container's name, as "heddle trace" makes one, and says of each how long connect
took, its round trip and its path; and in the end of all the least, median and most, and how many came to nothing. Nothing is sent
by them. It ends after --count, or when it is interrupted. It exits with 1 if no connection came about.`,
		Example: "  heddle ping n1/c1 n2/c1:8080\n  heddle ping web 192.0.2.7:443 --count 20 --interval 200ms",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.count < 1 || f.count > maxPingCount {
				return fmt.Errorf("--count %d: want 1 to %d", f.count, maxPingCount)
			}
			if f.interval < minPingInterval || f.interval > time.Hour {
				return fmt.Errorf("--interval %s: want %s to 1h", f.interval, minPingInterval)
			}
			try, err := f.prepare(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			return f.run(cmd.Context(), try, cmd.OutOrStdout())
		},
	}
	f.register(cmd)
	cmd.Flags().IntVarP(&f.count, "count", "c", 5, "how many connections to try")
	cmd.Flags().DurationVarP(&f.interval, "interval", "i", time.Second, "time from the beginning of one connection to that of the next")
	return cmd
}

// run tries connections until there are enough or ctx ends.
func (f *pingFlags) run(ctx context.Context, try func(context.Context) (api.Trace, error), out io.Writer) error {
	var all pinged
	tick := time.NewTicker(f.interval)
	defer tick.Stop()
	for n := range f.count {
		tr, err := try(ctx)
		if ctx.Err() != nil {
			break // interrupted: what is known is told
		}
		if err != nil {
			return err
		}
		all.add(tr)
		if f.output != jsonOutput {
			if n == 0 {
				if _, err := fmt.Fprintln(out, firstLine(tr)); err != nil {
					return err
				}
			}
			if _, err := fmt.Fprintf(out, "%d: %s\n", n+1, probeLine(tr)); err != nil {
				return err
			}
		}
		if n+1 == f.count {
			break
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	var err error
	if f.output == jsonOutput {
		err = printJSON(out, all.report())
	} else {
		_, err = io.WriteString(out, all.report().text())
	}
	if err == nil && len(all.connects) == 0 {
		err = errNotConnected
	}
	return err
}

// firstLine says what is tried, and which way it would take.
func firstLine(tr api.Trace) string {
	p := tr.Policy
	text := fmt.Sprintf("%s to %s, port %d: %s", p.From, p.To, p.Port, p.Verdict)
	if tr.Way != nil {
		text += ", " + wayText(tr.Way)
	}
	return text
}

// connectOf gives the step in which the connection was tried.
func connectOf(tr api.Trace) api.TraceStep {
	if i := slices.IndexFunc(tr.Steps, func(s api.TraceStep) bool { return s.Name == "connect" }); i >= 0 {
		return tr.Steps[i]
	}
	return api.TraceStep{}
}

// probeLine says what became of one.
func probeLine(tr api.Trace) string {
	step := connectOf(tr)
	parts := []string{fmt.Sprintf("%s after %s", cmp.Or(step.Error, "connected"), shortDuration(step.Took))}
	if f := tr.Flow; f != nil {
		if f.Path != "" {
			parts = append(parts, string(f.Path))
		}
		if f.RTT > 0 {
			parts = append(parts, "round trip "+shortDuration(f.RTT))
		}
		if why := whyText(f); why != "" {
			parts = append(parts, why)
		}
	}
	return strings.Join(parts, ", ")
}

// pinged is what became of connections.
type pinged struct {
	traces         []api.Trace
	connects, rtts []time.Duration // of those that came about
}

func (p *pinged) add(tr api.Trace) {
	p.traces = append(p.traces, tr)
	if !tr.Connected {
		return
	}
	p.connects = append(p.connects, connectOf(tr).Took)
	if tr.Flow != nil && tr.Flow.RTT > 0 {
		p.rtts = append(p.rtts, tr.Flow.RTT)
	}
}

// spread is of some times.
type spread struct {
	Min    time.Duration `json:"min_ns"`
	Median time.Duration `json:"median_ns"`
	Max    time.Duration `json:"max_ns"`
}

// spreadOf gives that of times; nil: there are none.
func spreadOf(times []time.Duration) *spread {
	if len(times) == 0 {
		return nil
	}
	sorted := slices.Sorted(slices.Values(times))
	return &spread{sorted[0], sorted[len(sorted)/2], sorted[len(sorted)-1]}
}

// pingReport is what `heddle ping --output json` prints.
type pingReport struct {
	Tried     int         `json:"tried"`
	Connected int         `json:"connected"`
	Connect   *spread     `json:"connect,omitempty"`
	RTT       *spread     `json:"rtt,omitempty"`
	Traces    []api.Trace `json:"traces"`
}

func (p *pinged) report() pingReport {
	return pingReport{len(p.traces), len(p.connects), spreadOf(p.connects), spreadOf(p.rtts), append([]api.Trace{}, p.traces...)}
}

func (r pingReport) text() string {
	lost := 0
	if r.Tried > 0 {
		lost = 100 * (r.Tried - r.Connected) / r.Tried
	}
	text := fmt.Sprintf("\n%d tried, %d connected, %d %% lost\n", r.Tried, r.Connected, lost)
	for _, of := range []struct {
		name string
		*spread
	}{{"connect", r.Connect}, {"round trip", r.RTT}} {
		if of.spread != nil {
			text += fmt.Sprintf("%s min/median/max %s / %s / %s\n", of.name, shortDuration(of.Min), shortDuration(of.Median), shortDuration(of.Max))
		}
	}
	return text
}
