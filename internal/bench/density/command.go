package density

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/plot"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/lab"
)

// File is the name of the committed results.
const File = "density.json"

// nodePrefix is the dense node's: the default, a /24, has room for 253 endpoints.
const nodePrefix = "10.244.128.0/18"

var size = lab.Size{Containers: 1, NodeArgs: map[string][]string{"n2": {"--prefix", nodePrefix}}}

// Command is `heddle bench density`.
func Command() session.Command {
	var o Options
	return session.Benchmark[Result]{
		Name:  "density",
		Short: "Measure what up to 1,000 containers and 100,000 live connections cost a node",
		Long: `Brings a lab of two nodes up and makes more and more containers on its second node, then more and more live connections between
them and servers. At each step it measures memory, connects, how many connections a listener accepts, and what the agent uses
at rest and while containers call socket() at fixed rates. A container is a network namespace, an endpoint and an intercepted thread of
one process. The lab goes when it is done, also on Ctrl-C; one that was up before stays, and what was made in it goes. The machine's memory and processors are measured: keep it otherwise idle.`,
		Lab: session.Needs{Name: "density", Up: true, Size: size},
		Flags: func(f session.Flags) {
			f.IntSliceVar(&o.Containers, "containers", Containers, "numbers of containers, ascending")
			f.IntSliceVar(&o.Connections, "connections", Connections, "numbers of live connections, ascending, the first 0")
			f.Float64SliceVar(&o.Rates, "rates", Rates, "calls of socket() a second")
			f.DeclareScopes()
			f.IntVar(&o.Rounds, "rounds", 3, "rounds of connects at each step")
			f.DeclareDuration(time.Second, "length of one measurement")
		},
		Check: func(s *session.Session) (err error) {
			o.Progress, o.Duration = s.Progress, s.Duration
			if o.Scopes, err = s.ParseScopes(); err != nil {
				return err
			}
			return o.Validate()
		},
		Run: func(ctx context.Context, s *session.Session) (r Result, err error) {
			place, err := placeIn(s.Lab)
			if err != nil {
				return r, err
			}
			o.Program = []string{s.Lab.Heddle, "bench", "loadgen"}
			r, err = Run(ctx, place, o)
			r.Machine, r.Background = machine.Describe(), s.Background
			return r, err
		},
		Print:     func(w io.Writer, _ *session.Session, r Result) error { return report.Print(w, r.tables()) },
		Report:    writeReport,
		Summaries: []session.Summary{{Part: "density", Write: summarize}},
	}.Command()
}

// placeIn finds what of a lab that is up is spoken to and changed.
func placeIn(of session.Lab) (place Lab, err error) {
	l, err := of.Open()
	if err != nil {
		return place, err
	}
	state, err := l.Load()
	if err != nil {
		return place, err
	}
	agents, err := of.Agents()
	if err != nil {
		return place, err
	}
	network, err := l.Network()
	if err != nil {
		return place, err
	}
	place.First, place.Stays = state.Containers+1, of.Stays
	place.Restart = func(ctx context.Context) error { return l.Up(ctx, size, io.Discard) }
	for i, n := range network.Nodes[:len(place.Nodes)] {
		place.Nodes[i] = Node{Agent: agents[i], Netns: n.Netns, Underlay: n.Underlay, SeccompSocket: n.SeccompSocket,
			AddNamespace:    func(i int) (string, string, error) { return l.AddNamespace(n.Name, i) },
			RemoveNamespace: func(i int) error { return l.RemoveNamespace(n.Name, i) }}
	}
	return place, nil
}

func writeReport(d *report.Document) error {
	var r Result
	if err := d.Read(File, &r); err != nil {
		return err
	}
	if len(r.Containers) == 0 {
		return fmt.Errorf("%s: no containers were measured", File)
	}
	about := plot.Text{Title: "Many containers and many connections on one node", Subtitle: r.Machine}
	draw := func(w io.Writer) error { return WritePlot(w, r, about) }
	return errors.Join(d.Plot("density.svg", draw), d.Section("", section(r)))
}
