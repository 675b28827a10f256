// Package stacks measures what stack profiles cost and give: streams, writes, connections and redis
// with each stack, beside the host and Heddle without a profile, and a line with losses.
package stacks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/plot"
	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/lab"
)

// Result is what `heddle bench stacks` found.
type Result struct {
	Machine    string  `json:"machine"`
	Background float64 `json:"background"` // processors that other programs kept busy before
	// Profile is that of the row heddle+profile.
	Profile string `json:"profile"`
	// ProfileUs is what a connection takes longer with it, microseconds.
	ProfileUs *bench.Spread  `json:"profile_us,omitempty"`
	Results   []bench.Result `json:"results"`
	Copies    []Copy         `json:"copies,omitempty"`
	Queues    []Queue        `json:"queues,omitempty"`
	Line      FarLine        `json:"line"`
	Far       []Far          `json:"far,omitempty"`
	Tenants   []Tenants      `json:"tenants,omitempty"`
}

// Copy is table 1 of the NetKernel paper: what it takes to copy a chunk between two places in
// memory that no cache holds.
type Copy struct {
	Bytes int          `json:"bytes"`
	NS    bench.Spread `json:"ns"`
}

// workloads are what is measured unless some are named.
var workloads = append([]string{"crr"}, bench.StackWorkloads...)

// programs are what has to be installed, with their Debian packages.
var programs = map[string]string{"iperf3": "iperf3", "redis-server": "redis-server", "redis-benchmark": "redis-tools"}

// Command is `heddle bench stacks`.
func Command() session.Command {
	var (
		o           bench.Options
		far, shared bool
	)
	return session.Benchmark[Result]{
		Name:  "stacks",
		Short: "Measure each stack that a profile can choose, between nodes and over a line with losses",
		Long: fmt.Sprintf(`Measures streams, writes, new connections and redis with each stack, beside Heddle without a profile, the overlay and the host, and what arrives
of a stream over a line of 12 Mb/s with a round trip of 350 ms and losses. The lab must have been made with --stacks and %d containers a
node; --up does that.`, labContainers),
		Lab: session.Needs{Program: true, Size: lab.Size{Containers: labContainers, Stacks: true}, Installed: func() error { return session.Lacking(programs) }},
		Flags: func(f session.Flags) {
			f.Modes, f.Scopes = []string{string(bench.Host), string(bench.Overlay), string(bench.Heddle)}, []string{string(bench.Inter)}
			f.DeclareWorkloads(workloads, "some of them, or iperf3, rr, crr8, crr64")
			f.BoolVar(&far, "far", true, "measure over the line with losses, too")
			f.BoolVar(&shared, "tenants", true, "measure containers that share a module, too")
			f.DeclareRuns(3, "runs of each workload and mode")
			f.DeclareDuration(time.Second, "length of a run")
		},
		Check: func(s *session.Session) (err error) {
			o, err = s.Options()
			o.Without = func(w bench.Workload, m bench.Mode) bool {
				row, ok := rowOf(m)
				return ok && Rows[row].Without[w.Name] != ""
			}
			o.Modes = append(o.Modes, modes(func(r Row) bool { return r.Lab })...)
			return err
		},
		Run: func(ctx context.Context, s *session.Session) (r Result, err error) {
			r = Result{Machine: plot.Subtitle(o), Background: s.Background, Profile: harmless.String()}
			o.Program = s.Program
			undo, err := apply(ctx, s.Lab)
			if err == nil {
				r.Results, err = bench.Run(ctx, place{s.Lab}, o)
			}
			if err == nil {
				var us bench.Spread
				us, err = profileCost(ctx, s)
				r.ProfileUs = &us
			}
			if err == nil && far {
				r.Line = FarLine{farRate, farTrip.Seconds() * 1e3, farQueue, farLoss, farDuration.Seconds(), farRuns}
				r.Far, err = runFar(ctx, s)
			}
			if err == nil && shared {
				r.Tenants, err = runTenants(ctx, s)
			}
			if err == nil {
				r.Copies = copies(s.Runs)
				r.Queues, err = queues(ctx, s)
			}
			return r, errors.Join(err, undo(context.WithoutCancel(ctx)))
		},
		Print:     func(w io.Writer, _ *session.Session, r Result) error { return printResult(w, r) },
		Report:    writeReport,
		Summaries: []session.Summary{{Page: "stacks.md", Part: "stacks", Write: summarize}},
	}.Command()
}

// copies measures table 1 so many times.
func copies(runs int) (all []Copy) {
	sizes := []int{64, 512, 1 << 10, 2 << 10, 4 << 10, 8 << 10}
	values := make([][]float64, len(sizes))
	for range runs {
		for i, size := range sizes {
			values[i] = append(values[i], float64(size)/machine.CopyRate(size, machine.FarSpan)*1e9)
		}
	}
	for i, size := range sizes {
		all = append(all, Copy{size, bench.SpreadOf(values[i])})
	}
	return all
}
