package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/flow"
)

// How many flows are shown if nobody says, at once and before those that come.
const (
	shownFlows    = 100
	followedFlows = 10
)

// Bounds of what all nodes together are asked for.
const (
	// maxFlows is how many flows are in memory, whatever the filter chooses.
	maxFlows = 100_000
	// maxFollowed is how many nodes are followed: each has a connection.
	maxFollowed = 512
)

// filterFlags are the keys of a flow.Filter as flags, as they are written.
type filterFlags struct {
	from, to, labels, ports, events, verdicts, paths, reasons []string
	since                                                     string
	last                                                      string
}

func (f *filterFlags) register(flags *pflag.FlagSet) {
	for _, l := range []struct {
		to          *[]string
		name, usage string
	}{
		{&f.from, "from", "who opened the connection: an endpoint's name (* and ? stand for any characters), an address, or a prefix"},
		{&f.to, "to", "whom the connection is to: an endpoint's name (* and ? stand for any characters), an address, or a prefix"},
		{&f.labels, "label", "label of either end: KEY=VALUE, or KEY"},
		{&f.ports, "port", "destination port: 80, or 8000-8999"},
		{&f.events, "event", "what happened: open, fallback, end, fail, deny, cut"},
		{&f.verdicts, "verdict", "what became of it: allowed, denied, cut, failed"},
		{&f.paths, "path", "path it took: direct, local, loopback, overlay, node, outside, stack"},
		{&f.reasons, "reason", "why: name of a reason; * and ? stand for any characters: fallback_*"},
	} {
		flags.StringArrayVar(l.to, l.name, nil, l.usage)
	}
	flags.StringVar(&f.since, "since", "", "since when: 5m ago, or a time such as 2026-11-28T21:00:00Z")
	flags.StringVar(&f.last, "last", "", fmt.Sprintf("the latest so many (default %d; %d before those that come)", shownFlows, followedFlows))
}

// filter reads the flags that are set.
func (f *filterFlags) filter(set *pflag.FlagSet) (flow.Filter, error) {
	values := make(url.Values)
	for key, list := range map[string][]string{"from": f.from, "to": f.to, "label": f.labels, "port": f.ports, "event": f.events,
		"verdict": f.verdicts, "path": f.paths, "reason": f.reasons, "since": {f.since}, "last": {f.last}} {
		if set.Changed(key) {
			values[key] = list
		}
	}
	parsed, err := flow.ParseFilter(values)
	if err != nil {
		return parsed, fmt.Errorf("--%w", err)
	}
	if _, err := parsed.Since.Start(time.Now()); err != nil {
		return parsed, fmt.Errorf("--%w", err)
	}
	return parsed, nil
}

// observeFlags are those of `heddle observe`.
type observeFlags struct {
	agentFlags
	filterFlags
	follow, json bool
}

func newObserveCmd() *cobra.Command {
	var f observeFlags
	cmd := &cobra.Command{
		Use:   "observe",
		Short: "Show connections as they open, end, fail, are denied or cut",
		Long: `Shows what happened to the connections of a node's containers: both ends, the path, the rule that decided, why
it is not the best path, and what was carried. A node keeps the latest 16,384 in memory; --follow goes on with
those that come. Of several values of one filter any one is enough (of --label all), and all filters must hold.
With --json: a line for each, whose members docs/howto/observe.md lists.`,
		Example: "  heddle observe --verdict denied --since 10m\n  heddle observe --from 'web-*' --port 5432 --follow\n  heddle observe --event fallback --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			filter, err := f.filter(cmd.Flags())
			if err != nil {
				return err
			}
			from, err := f.findAll(cmd.Context())
			if err != nil {
				return err
			}
			f.json = f.json || f.output == jsonOutput
			show := &flowPrinter{out: cmd.OutOrStdout(), warn: cmd.ErrOrStderr(), json: f.json}
			if f.follow {
				return followFlows(cmd.Context(), from, filter, show)
			}
			return showFlows(cmd.Context(), from, filter, show)
		},
	}
	f.agentFlags.registerReading(cmd)
	f.filterFlags.register(cmd.Flags())
	cmd.Flags().BoolVarP(&f.follow, "follow", "f", false, "go on with those that come, until interrupted")
	cmd.Flags().BoolVar(&f.json, "json", false, "print JSON lines")
	return cmd
}

// showFlows prints what agents keep, the oldest first.
func showFlows(ctx context.Context, from agents, filter flow.Filter, show *flowPrinter) error {
	if filter.Last == 0 && filter.Since == (flow.Since{}) {
		filter.Last = shownFlows
	}
	var kept latestFlows
	_, err := ask(ctx, from, func(ctx context.Context, c *api.Client) (struct{}, error) {
		var list []flow.Flow
		var lost uint64
		err := c.Flows(ctx, api.FlowRequest{Filter: filter}, func(line api.FlowLine) error {
			if lost += line.Lost; line.Flow != nil {
				list = append(list, *line.Flow)
			}
			return nil
		})
		kept.add(list, lost, filter.Last)
		return struct{}{}, err
	})
	list := kept.sorted(filter.Last)
	if kept.lost > 0 {
		if _, err := fmt.Fprintf(show.warn, "%d flows are left out: a filter makes them fewer\n", kept.lost); err != nil {
			return err
		}
	}
	if err != nil && len(list) == 0 {
		return err // not beneath an empty table
	}
	return errors.Join(show.all(list), err)
}

// latestFlows are those of many nodes, as they answer: no more than are wanted.
type latestFlows struct {
	mu   sync.Mutex // guards the rest
	list []flow.Flow
	lost uint64
}

// add adds a node's, of which last are wanted; 0: as many as there is room for.
func (l *latestFlows) add(list []flow.Flow, lost uint64, last int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list, l.lost = append(l.list, list...), l.lost+lost
	if most := cmp.Or(min(last, maxFlows), maxFlows); len(l.list) > 2*most {
		l.trim(most, last)
	}
}

// trim leaves the latest ones, in order.
func (l *latestFlows) trim(most, last int) {
	slices.SortStableFunc(l.list, func(a, b flow.Flow) int { return cmp.Or(a.Time.Compare(b.Time), cmp.Compare(a.Node, b.Node)) })
	if n := len(l.list) - most; n > 0 {
		l.list = slices.Clone(l.list[n:])
		if last == 0 || last > most { // nobody has asked for fewer
			l.lost += uint64(n)
		}
	}
}

// sorted gives the latest ones, the oldest first.
func (l *latestFlows) sorted(last int) []flow.Flow {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.trim(cmp.Or(min(last, maxFlows), maxFlows), last)
	return l.list
}

// followFlows prints what agents keep and what comes, until ctx ends or one of them fails.
func followFlows(ctx context.Context, from agents, filter flow.Filter, show *flowPrinter) error {
	if n := len(from.clients); n > maxFollowed {
		return fmt.Errorf("--follow: %d nodes, at most %d are followed at a time; choose one with --node, or leave --follow out", n, maxFollowed)
	}
	if filter.Last == 0 && filter.Since == (flow.Since{}) {
		filter.Last = followedFlows
	}
	following, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var wg sync.WaitGroup
	for _, c := range from.clients {
		wg.Go(func() {
			defer c.Close()
			err := c.Flows(following, api.FlowRequest{Filter: filter, Follow: true}, show.line)
			if errors.Is(err, api.ErrNoAgent) {
				err = fmt.Errorf("%w: %s", err, startHint)
			}
			if len(from.clients) > 1 && (errors.Is(err, api.ErrUnavailable) || errors.Is(err, errNoQuestions)) {
				show.without(err)
				return
			}
			stop(err) // one that ends takes the others along: what is shown would no longer be all
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return nil // interrupted, as it should be
	}
	return context.Cause(following)
}

// errNoQuestions is what an agent that answers no others is told for.
var errNoQuestions error = &api.Error{Code: api.CodeUnsupported}

// without says of which node there are no flows, and why.
func (p *flowPrinter) without(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = fmt.Fprintf(p.warn, "heddle: %v\n", err) // those of the others matter more
}

// flowPrinter prints flows. Several goroutines may call line.
type flowPrinter struct {
	out, warn io.Writer
	json      bool
	mu        sync.Mutex // guards out, warn and begun
	begun     bool
}

// flowColumns are the columns of a table of flows, with their widths where rows come one by one.
var flowColumns = []struct {
	name  string
	width int
}{{"TIME", 12}, {"NODE", 6}, {"EVENT", 8}, {"FROM", 22}, {"TO", 22}, {"PATH", 8}, {"SENT", 8}, {"RECEIVED", 8}, {"RTT", 7}, {"TOOK", 7}, {"WHY", 0}}

// all prints flows at once.
func (p *flowPrinter) all(list []flow.Flow) error {
	if p.json {
		for i := range list {
			if err := p.line(api.FlowLine{Flow: &list[i]}); err != nil {
				return err
			}
		}
		return nil
	}
	names := make([]string, len(flowColumns))
	for i, c := range flowColumns {
		names[i] = c.name
	}
	t := newTable(names...)
	for i := range list {
		t.row(flowCells(&list[i])...)
	}
	return t.writeTo(p.out)
}

// line prints one as it comes.
func (p *flowPrinter) line(line api.FlowLine) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if line.Lost > 0 {
		if _, err := fmt.Fprintf(p.warn, "%d flows were lost: they came faster than this reads; a filter makes them fewer\n", line.Lost); err != nil {
			return err
		}
	}
	if line.Flow == nil && (p.json || p.begun) {
		return nil
	}
	if p.json {
		return json.NewEncoder(p.out).Encode(line.Flow)
	}
	if !p.begun {
		p.begun = true
		names := make([]string, len(flowColumns))
		for i, c := range flowColumns {
			names[i] = c.name
		}
		if err := p.padded(names); err != nil || line.Flow == nil {
			return err
		}
	}
	return p.padded(flowCells(line.Flow))
}

func (p *flowPrinter) padded(cells []string) error {
	var b strings.Builder
	for i, c := range cells {
		fmt.Fprintf(&b, "%-*s  ", flowColumns[i].width, cmp.Or(c, "-"))
	}
	_, err := fmt.Fprintln(p.out, strings.TrimRight(b.String(), " "))
	return err
}

// flowCells gives the row of a flow.
func flowCells(f *flow.Flow) []string {
	sent, received := "", ""
	if (f.Event == flow.End || f.Event == flow.Cut) && !f.Relayed {
		sent, received = byteCount(f.BytesSent), byteCount(f.BytesReceived)
	}
	return []string{f.Time.Local().Format("15:04:05.000"), f.Node, string(f.Event), f.From.String(), f.To.String(), string(f.Path),
		sent, received, shortDuration(f.RTT), shortDuration(f.Duration), whyText(f)}
}

// whyText says why a flow is not as usual: the reason, the error, and the rule that decided.
func whyText(f *flow.Flow) string {
	var parts []string
	for _, s := range []string{f.Reason, f.Error, f.Rule} {
		if s != "" {
			parts = append(parts, s)
		}
	}
	return strings.Join(parts, "; ")
}

// shortDuration gives three digits or so; empty for 0.
func shortDuration(d time.Duration) string {
	switch {
	case d == 0:
		return ""
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(10 * time.Microsecond).String()
	}
	return d.Round(10 * time.Millisecond).String()
}
