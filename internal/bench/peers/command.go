package peers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/baseline"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/plot"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/netns"
)

// File is the name of the committed results.
const File = "peers.json"

// Command is `heddle bench peers`.
func Command() session.Command {
	var o bench.Options
	return session.Benchmark[Result]{
		Name:  "peers",
		Short: "Compare with the networks of others: Docker's, and a BPF data path",
		Long: `Is 'heddle bench' with further modes, on hosts of their own on the lab's fabric: bare (a host without Heddle), docker (Docker's overlay network between
nodes, its bridge on one), bpf (BPF redirection and native routing, as Cilium and Calico build it), bpf-vxlan (the same with
VXLAN), netkit. What cannot run on this machine is named with its reason. The JSON has versions and settings beside the results.`,
		Lab: session.Needs{Program: true},
		Flags: func(f session.Flags) {
			var all []string
			for _, m := range bench.AllModes {
				all = append(all, string(m))
			}
			f.DeclareWorkloads(nil, "workloads to run (default iperf3,rr,crr)")
			f.DeclareScopes()
			f.DeclareModes("", all...)
			f.DeclareRuns(4, "runs of each workload, scope and mode")
			f.DeclareDuration(time.Second, "length of one measurement (iperf3: whole seconds)")
		},
		Check: func(s *session.Session) (err error) { o, err = s.Options(); return err },
		Run:   func(ctx context.Context, s *session.Session) (Result, error) { return run(ctx, s, o) },
		Print: func(w io.Writer, _ *session.Session, r Result) error {
			return errors.Join(report.WriteTable(w, r.Results), WriteSkipped(w, r.Networks))
		},
		Report:    writeReport,
		Summaries: []session.Summary{{Part: "peers", Write: summarize}},
	}.Command()
}

func run(ctx context.Context, s *session.Session, o bench.Options) (r Result, err error) {
	r = Result{Machine: machine.Describe(), DurationS: s.Duration.Seconds()}
	wanted := o.Modes
	err = baseline.With(ctx, s, wanted, func(place bench.Place, site *baseline.Site) (err error) {
		o.Program, o.Modes = s.Program, site.Modes(wanted)
		if r.Background, err = machine.Background(ctx); err != nil { // with the baselines' own programs
			return err
		}
		if r.Results, err = bench.Run(ctx, place, o); err != nil {
			return err
		}
		for _, m := range wanted {
			n := Network{Mode: m, Skipped: site.Skipped[m]}
			switch {
			case n.Skipped != "":
			case site.Places[m] != nil:
				n.Settings, err = site.Describe(ctx, m)
			default:
				n.Settings, err = describeLab(ctx, s.Lab, m)
			}
			if err != nil {
				return fmt.Errorf("settings of %s: %w", m, err)
			}
			r.Networks = append(r.Networks, n)
		}
		return nil
	})
	return r, err
}

// WriteSkipped names the modes that were not measured.
func WriteSkipped(out io.Writer, networks []Network) error {
	for _, n := range networks {
		if n.Skipped == "" {
			continue
		}
		if _, err := fmt.Fprintf(out, "not measured: %s: %s\n", n.Mode, n.Skipped); err != nil {
			return err
		}
	}
	return nil
}

// describeLab says how one of the lab's own modes is set up.
func describeLab(ctx context.Context, place session.Lab, m bench.Mode) ([]string, error) {
	node := netns.Path(place.Name + "-n1")
	client := node
	if m == bench.Overlay {
		client = netns.Path(place.Name + "-n1-c1")
	}
	var ways []baseline.Way
	for _, scope := range bench.Scopes {
		_, server := scope.Ends()
		to, err := place.IP(ctx, m, server)
		if err == nil && m == bench.Heddle && scope == bench.Inter {
			// The direct path's packets have the nodes' addresses.
			to, err = place.IP(ctx, bench.Host, server)
		}
		if err != nil {
			return nil, err
		}
		if m == bench.Heddle && scope == bench.Intra {
			to = netip.AddrFrom4([4]byte{127, 0, 0, 1}) // by the node's loopback
		}
		ways = append(ways, baseline.Way{Scope: scope, Client: client, Node: node, To: to})
	}
	return baseline.Describe(ctx, ways)
}

func writeReport(d *report.Document) error {
	var r Result
	if err := d.Read(File, &r); err != nil {
		return err
	}
	text, err := section(r)
	if err != nil {
		return err
	}
	about := plot.Text{Title: "Heddle and others' networks",
		Subtitle: fmt.Sprintf("%d runs of %g s each, interleaved; %s", r.Results[0].Runs, r.DurationS, r.Machine)}
	draw := func(w io.Writer) error { return plot.Write(w, r.Results, about) }
	return errors.Join(d.Plot("peers.svg", draw), d.Section("", text))
}
