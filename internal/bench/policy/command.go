package policy

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/pflag"

	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/plot"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/bench/session"
)

// minPhase leaves enough half seconds in a phase for a median.
const minPhase = 3 * time.Second

// CapsCommand is `heddle bench policy`.
func CapsCommand() session.Command {
	return session.Benchmark[CapsResult]{
		Name:  "policy",
		Short: "Repeat figure 7 of the Slim paper: caps and a rule on live connections",
		Long: `Two containers of one node send to another node, over one connection each. One of them is capped at 15, 10 and 5
units, then barred by a rule. A unit is a 37th of what both get without a cap, as in the paper. The lab must be
otherwise idle and without policies of your own that speak of its containers.`,
		Flags: func(f session.Flags) {
			f.DurationVar(&f.Settings.Duration, "phase", 5*time.Second, "length of a phase between two changes")
		},
		Check: func(s *session.Session) error {
			if s.Duration < minPhase {
				return fmt.Errorf("--phase %s: want %s or more", s.Duration, minPhase)
			}
			return nil
		},
		Run: func(ctx context.Context, s *session.Session) (CapsResult, error) {
			return RunCaps(ctx, s.Lab, s.Duration, s.Progress)
		},
		Print: func(w io.Writer, _ *session.Session, r CapsResult) error {
			return report.Print(w, []report.Grid{r.table()})
		},
		Plot: func(w io.Writer, _ *session.Session, r CapsResult) error {
			return WriteCapsPlot(w, r, plot.Text{Title: "Caps and a rule on live connections (figure 7 of the Slim paper)",
				Subtitle: "Two containers of one node send to another node; payload that arrived, by half seconds. " + machine.Describe()})
		},
		Summaries: []session.Summary{{Part: "policy", Write: summarize}},
	}.Command()
}

// table has a row for each phase.
func (r CapsResult) table() report.Grid {
	g := report.Grid{Rows: [][]string{{"PHASE", "CAP Gbit/s", r.Limited, "OF CAP", r.Other}}}
	gbit := func(bps float64) string { return fmt.Sprintf("%.3f", bps/1e9) }
	for _, p := range r.Phases {
		limit, of := "-", "-"
		if p.CapBPS > 0 {
			limit, of = gbit(p.CapBPS), fmt.Sprintf("%.3f", p.LimitedBPS/p.CapBPS)
		}
		g.Add(p.What, limit, gbit(p.LimitedBPS), of, gbit(p.OtherBPS))
	}
	return g
}

// What --quick runs of policy-scale: that it works, not what it costs.
const (
	quickEndpoints = 200
	quickNodes     = 10
)

var quickRules = []int{0, 100, 1000}

// quick makes what was not asked for otherwise short.
func (o *ScaleOptions) quick(asked *pflag.FlagSet) {
	for flag, set := range map[string]func(){
		"rules":     func() { o.Rules = quickRules },
		"endpoints": func() { o.Endpoints = quickEndpoints },
		"nodes":     func() { o.Nodes = quickNodes },
		"rounds":    func() { o.Rounds = 1 },
		"changes":   func() { o.Changes = 1 },
		"duration":  func() { o.Duration = 100 * time.Millisecond },
	} {
		if !asked.Changed(flag) {
			set()
		}
	}
}

// ScaleCommand is `heddle bench policy-scale`.
func ScaleCommand() session.Command {
	var o ScaleOptions
	var flags *pflag.FlagSet
	return session.Benchmark[ScaleResult]{
		Name:  "policy-scale",
		Short: "Measure connects and changes of rules among up to 100,000 rules and 10,000 endpoints",
		Long: `Brings a lab of two nodes up, puts further nodes and endpoints into its store that do not exist, and then more and
more rules that all are about the measured containers. Among each number of rules it measures new connections in every
mode, and what changes of one and of 1,000 rules take until both nodes enforce them. All numbers of rules are gone through
several times. The lab goes when it is done, also on Ctrl-C; one that was up before stays, without what was put into it.`,
		Lab: session.Needs{Name: "scale", Up: true, Program: true},
		Flags: func(f session.Flags) {
			flags = f.FlagSet
			f.IntSliceVar(&o.Rules, "rules", ScaleRules, "numbers of rules to compare: ascending multiples of 100, the first 0")
			f.IntVar(&o.Endpoints, "endpoints", ScaleEndpoints, "made-up endpoints")
			f.IntVar(&o.Nodes, "nodes", ScaleNodes, "made-up nodes that have them")
			f.IntVar(&o.Rounds, "rounds", 5, "rounds through all numbers of rules")
			f.IntVar(&o.Changes, "changes", 5, "changes of one rule to measure in each round, there and back")
			f.DurationVar(&o.Duration, "duration", time.Second, "length of one measurement of connects")
			f.DeclareScopes()
			f.BoolVar(&f.Quick, "quick", false, fmt.Sprintf("one short round of %v rules, %d endpoints", quickRules, quickEndpoints))
		},
		Check: func(s *session.Session) (err error) {
			if s.Quick {
				o.quick(flags)
			}
			o.Progress = s.Progress
			if o.Scopes, err = s.ParseScopes(); err != nil {
				return err
			}
			return o.Validate()
		},
		Run: func(ctx context.Context, s *session.Session) (ScaleResult, error) {
			o.Program = s.Program
			return RunScale(ctx, s.Lab, o)
		},
		Print: func(w io.Writer, _ *session.Session, r ScaleResult) error {
			return report.Print(w, r.tables())
		},
	}.Command()
}
