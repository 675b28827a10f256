package cost

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/netns"
)

// File is the name of the committed results.
const File = "cost.json"

// defaultProfile is Docker's default seccomp profile, in the project's sources.
const defaultProfile = "internal/runtime/testdata/docker29.json"

// Command is `heddle bench cost`.
func Command() session.Command {
	var o Options
	return session.Benchmark[Result]{
		Name:  "cost",
		Short: "Measure what it costs that Heddle is there: a packet, a connection, a system call, a container's start",
		Long: `Counts which BPF programs run, and how long, for each step in the life of TCP connections, in all modes; times cheap system calls in
containers with and without Heddle's seccomp filter; and times starts of containers and endpoints, with what they consist of.

Counting (BPF_ENABLE_STATS) is for the whole machine while it is on, and is switched off again.`,
		Lab: session.Needs{Program: true},
		Flags: func(f session.Flags) {
			f.DeclareScopes()
			f.DeclareRuns(3, "rounds of everything but starts")
			f.DeclareDuration(time.Second, "length of a run of a workload")
			f.IntVar(&o.Connections, "connections", 2000, "connections of a round")
			f.IntVar(&o.Trips, "trips", 10000, "round trips of a round")
			f.IntVar(&o.Starts, "starts", 20, "containers and endpoints of each kind")
			f.StringVar(&o.Profile, "profile", defaultProfile, "an engine's default seccomp profile; without the file it is left out")
		},
		Check: func(s *session.Session) (err error) {
			o.Rounds, o.Duration, o.Progress = s.Runs, s.Duration, s.Progress
			if o.Scopes, err = s.ParseScopes(); err != nil {
				return err
			}
			if _, err := os.Stat(o.Profile); err != nil && o.Profile != defaultProfile {
				return fmt.Errorf("--profile: %w", err)
			} else if err != nil {
				o.Profile = ""
			}
			return o.Validate()
		},
		Run: func(ctx context.Context, s *session.Session) (r Result, err error) {
			o.Program, o.Runtime, o.CNI = s.Program, s.Lab.Sibling("heddle-runtime"), s.Lab.Sibling("heddle-cni")
			network, err := s.Lab.Network()
			if err != nil {
				return r, err
			}
			for i := range o.Nodes {
				n := network.Nodes[i]
				o.Nodes[i] = Node{PinDir: n.PinDir, APISocket: network.APISockets[i], SeccompSocket: n.SeccompSocket, Netns: n.Netns}
				for _, space := range []string{n.Name, n.Name + "-c1", n.Name + "-c2"} {
					o.Spaces = append(o.Spaces, netns.Path(s.Lab.Name+"-"+space))
				}
			}
			r, err = Run(ctx, s.Lab, o)
			r.Machine, r.Background = machine.Describe(), s.Background
			return r, err
		},
		Print: func(w io.Writer, _ *session.Session, r Result) error { return report.Print(w, r.grids()) },
		Report: func(d *report.Document) error {
			var r Result
			if err := d.Read(File, &r); err != nil {
				return err
			}
			return d.Section("", section(r))
		},
		Summaries: []session.Summary{{Part: "cost", Write: summarize}},
	}.Command()
}
