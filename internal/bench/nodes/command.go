package nodes

import (
	"context"
	"fmt"
	"io"
	"strconv"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/bench/session"
)

// Command is `heddle bench nodes`.
func Command() session.Command {
	var o Options
	return session.Benchmark[[]Size]{
		Name:  "nodes",
		Short: "Measure what up to 5,000 nodes and 100,000 endpoints cost one agent",
		Long: `Brings a lab of two nodes up and puts further nodes and endpoints into its store that do not exist. Measures n2's agent: memory, start,
how long changes take, and with --probes what it costs to probe every node (they all answer, by one host). The lab goes when it is done.`,
		Lab: session.Needs{Name: "nodes", Up: true, Fresh: true, Size: size},
		Flags: func(f session.Flags) {
			f.IntSliceVar(&o.Nodes, "nodes", []int{50, 500, 5000}, "numbers of made-up nodes")
			f.IntVar(&o.Endpoints, "endpoints", 100000, "made-up endpoints among 5,000 nodes; among others in proportion")
			f.IntVar(&o.Changes, "changes", 10, "changes of each kind, there and back")
			f.BoolVar(&o.Probes, "probes", false, "have the nodes probed: takes 20 ms a node more")
		},
		Check: func(s *session.Session) error {
			o.Progress = s.Progress
			return o.Validate()
		},
		Run: func(ctx context.Context, s *session.Session) ([]Size, error) { return Run(ctx, s.Lab, o) },
		Print: func(w io.Writer, _ *session.Session, r []Size) error {
			return report.Print(w, []report.Grid{table(r)})
		},
	}.Command()
}

// table has a column for each size.
func table(sizes []Size) (g report.Grid) {
	row := func(what string, cell func(Size) string) {
		cells := []string{what}
		for _, s := range sizes {
			cells = append(cells, cell(s))
		}
		g.Add(cells...)
	}
	spread := func(s bench.Spread) string { return fmt.Sprintf("%.1f (%.1f..%.1f)", s.Median, s.Min, s.Max) }
	row("nodes", func(s Size) string { return strconv.Itoa(s.Nodes) })
	row("endpoints", func(s Size) string { return strconv.Itoa(s.Endpoints) })
	row("agent, resident, MB", func(s Size) string { return fmt.Sprintf("%.0f", s.AgentMB) })
	row("after a start, MB", func(s Size) string { return fmt.Sprintf("%.0f", s.StartedMB) })
	row("BPF maps, MB", func(s Size) string { return fmt.Sprintf("%.0f", s.MapsMB) })
	row("start of an agent, s", func(s Size) string { return fmt.Sprintf("%.1f", s.StartS) })
	row("its processor time, s", func(s Size) string { return fmt.Sprintf("%.1f", s.StartCPUS) })
	for _, c := range changes {
		row("one "+c.what+": in force after, ms", func(s Size) string { return spread(s.LatencyMs[c.what]) })
		row("one "+c.what+": processor time, ms", func(s Size) string { return spread(s.CPUMs[c.what]) })
	}
	row("all direct paths proven after, s", func(s Size) string { return fmt.Sprintf("%.0f", s.ProbedS) })
	row("idle, of a processor", func(s Size) string { return fmt.Sprintf("%.3f", s.IdleCPU) })
	return g
}
