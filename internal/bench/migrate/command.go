package migrate

import (
	"context"
	"fmt"
	"io"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/bench/session"
)

// imageBytes is the size of the paper's image.
const imageBytes = 58e6

// Command is `heddle bench migrate`.
func Command() session.Command {
	return session.Benchmark[Result]{
		Name:  "migrate",
		Short: "Repeat table 4 of the Slim paper: moving a stopped container to another node",
		Long: `A container with a server and an image of 58 MB is stopped on one node of the lab and started on the other with its
address, on the overlay and with Heddle. Each step is timed, up to the first byte that peers on both nodes get.`,
		Lab:   session.Needs{Program: true},
		Flags: func(f session.Flags) { f.DeclareRuns(5, "migrations in each mode") },
		Check: func(s *session.Session) error {
			if s.Runs < 1 {
				return fmt.Errorf("--runs %d: want 1 or more", s.Runs)
			}
			return nil
		},
		Run: func(ctx context.Context, s *session.Session) (r Result, err error) {
			network, err := s.Lab.Network()
			if err != nil {
				return r, err
			}
			o := Options{Runs: s.Runs, ImageBytes: imageBytes, Runtime: s.Lab.Sibling("heddle-runtime")}
			for i := range o.Sockets {
				o.Sockets[i], o.Netns[i] = network.APISockets[i], network.Nodes[i].Netns
			}
			return Run(ctx, s.Lab, s.Program, o, s.Progress)
		},
		Print: func(w io.Writer, _ *session.Session, r Result) error {
			return report.Print(w, []report.Grid{r.table()}, false)
		},
	}.Command()
}

// table has a row for each step.
func (r Result) table() report.Grid {
	g := report.Grid{Rows: [][]string{{"STEP", "overlay, s", "heddle, s"}}}
	row := func(what string, median func(bench.Mode) float64) {
		g.Add(what, fmt.Sprintf("%.3f", median(bench.Overlay)), fmt.Sprintf("%.3f", median(bench.Heddle)))
	}
	for i, what := range Steps {
		row(what, func(m bench.Mode) float64 { return r.Median(m, i) })
	}
	row("total", r.MedianTotal)
	return g
}
