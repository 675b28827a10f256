package paper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/bench/session"
)

// File is the name of the committed results.
const File = "paper.json"

// Command is `heddle bench paper`.
func Command() session.Command {
	var o Options
	var merge bool
	var earlier Result
	return session.Benchmark[Result]{
		Name:  "paper",
		Short: "Repeat the evaluation of the Slim paper with real applications",
		Long: `Runs the applications of the Slim paper's section 6, server and client in containers on two nodes of a lab, in every
mode in turn and several times over: throughput, latencies, processor time by user, system and softirq. Figure 7 is
'heddle bench policy'.`,
		Lab: session.Needs{Program: true},
		Flags: func(f session.Flags) {
			f.DeclareWorkloads(nil, "applications to run, or families of them (default all)")
			f.DeclareModes("", "host", "overlay", "heddle")
			f.IntVar(&o.Rounds, "rounds", 3, "rounds through all modes")
			f.DeclareDuration(5*time.Second, "length of one measurement")
			f.Float64Var(&o.Scale, "scale", 1, "multiplies the fixed rates")
			f.StringVar(&o.Kafka, "kafka", "out/kafka", "folder with Kafka's jars: make kafka fetches them")
			f.BoolVar(&merge, "merge", false, "keep what the file of --json has of other applications")
		},
		Check: func(s *session.Session) (err error) {
			if o.Apps, err = ParseApps(s.Workloads); err != nil {
				return err
			}
			if o.Modes, err = bench.ParseModes(s.Modes); err != nil {
				return err
			}
			o.Duration, o.Step = s.Duration, s.Step
			if merge && s.JSON != "" {
				if earlier, err = readFile(s.JSON); err != nil {
					return err
				}
			}
			return o.Validate()
		},
		Run: func(ctx context.Context, s *session.Session) (r Result, err error) {
			o.Program = s.Program
			r, err = Run(ctx, s.Lab, o)
			for i := range r.Apps {
				if e := &r.Apps[i]; e.Skipped == "" {
					e.Machine, e.Background = machine.Describe(), s.Background
				}
			}
			return r, err
		},
		Print:     func(w io.Writer, _ *session.Session, r Result) error { return WriteTable(w, r) },
		WriteJSON: func(w io.Writer, r Result) error { return WriteJSON(w, earlier.Merge(r)) },
		Report:    writeReport,
		Summaries: []session.Summary{{Part: "paper", Write: summarize}},
	}.Command()
}

// readFile reads the results that are to be kept. A file that is not there has none.
func readFile(file string) (r Result, err error) {
	if err = report.ReadFile(file, &r); errors.Is(err, fs.ErrNotExist) {
		return r, nil
	}
	return r, err
}

// writeReport draws the figures that were measured, and writes the tables; without the results of
// `heddle bench` their rows say that they were not measured.
func writeReport(d *report.Document) error {
	var paper Result
	var core []bench.Result
	if err := d.Read(File, &paper); err != nil {
		return err
	}
	if err := d.Read("core.json", &core); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, figure := range Figures {
		err := d.Plot("paper-"+figure.Number+".svg", func(w io.Writer) error { return figure.Write(w, paper) })
		if errors.Is(err, ErrNotMeasured) {
			fmt.Fprintln(os.Stderr, err)
		} else if err != nil {
			return err
		}
	}
	text, err := section(paper, core)
	if err != nil {
		return err
	}
	return d.Section("", text)
}
