package peers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/baseline"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/plot"
	"heddle.dev/heddle/internal/bench/report"
	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/netns"
)

// comparison is a benchmark with the networks of others: what is measured, and where it is shown.
type comparison struct {
	name        string // of the command, and of its part of the page of results
	short, long string
	workloads   []string     // without --workloads; nil: the core's
	without     []bench.Mode // that are measured only by name
	runs        int
	file, plot  string // committed results, and their plot
	page        string // of results, as session.Summary has it
	title       string // of the plot
	rows        []report.SummaryRow
}

// connections is `heddle bench peers`.
var connections = comparison{
	name:  "peers",
	short: "Compare with the networks of others: Docker's, and a BPF data path",
	long: `Is 'heddle bench' with further modes, on hosts of their own on the lab's fabric: bare (a host without Heddle), docker (Docker's overlay network between
nodes, its bridge on one), bpf (BPF redirection and native routing, as Cilium and Calico build it), bpf-vxlan (the same with
VXLAN), netkit; native, the overlay of a
second lab, whose nodes send without a tunnel; and floor, host with a caller whose socket() is answered by a program that does nothing else. What cannot run on this machine is named with its reason. The JSON has versions and settings beside the results.`,
	runs: 4, file: "peers.json", plot: "peers.svg", title: "Heddle and others' networks",
	rows: []report.SummaryRow{
		{"iperf3", "throughput_bps", "throughput"},
		{"iperf3", "cpu_s_per_gb", "processor time for a gigabyte"},
		{"rr", "rtt_p50_us", "round trip p50"},
		{"crr", "socket_connect_p50_us", "`socket()`+`connect()` p50"},
		{"crr", "socket_connect_p99_us", "p99"},
		{"crr", "connections_per_s", "connections"},
	},
}

// packets is `heddle bench packets`.
var packets = comparison{
	name:  "packets",
	short: "Compare UDP, QUIC and DNS with the networks of others",
	long: `Is 'heddle bench peers' with what is not TCP: round trips and datagrams of UDP, small and large, one by one and cut up by the kernel; QUIC by a library
in Go and by programs in C; DNS by dnsperf and unbound. Debian's packages dnsperf, unbound, ngtcp2-client and ngtcp2-server have the programs.`,
	workloads: bench.PacketWorkloads,
	without:   []bench.Mode{bench.Heddle, bench.Floor}, // these packets go as the overlay's
	runs:      5, file: "packets.json", plot: "packets.svg", page: "packets.md", title: "UDP, QUIC and DNS in Heddle and others' networks",
	rows: []report.SummaryRow{
		{"udprr", "rtt_p50_us", "UDP round trip p50"},
		{"udprr", "cpu_us_per_transaction", "its processor time"},
		{"udp64", "packets_per_s", "datagrams of 64 bytes"},
		{"udp1200", "packets_per_s", "datagrams of 1,200 bytes"},
		{"udp1200", "cpu_us_per_packet", "processor time for one"},
		{"udpgso", "throughput_bps", "the same with UDP_SEGMENT and UDP_GRO"},
		{"quic", "throughput_bps", "QUIC (Go), throughput"},
		{"quicrr", "rtt_p50_us", "QUIC (Go), request p50"},
		{"quicc", "throughput_bps", "QUIC (C), throughput"},
		{"dns", "queries_per_s", "DNS queries"},
		{"dns", "cpu_us_per_query", "processor time for one"},
	},
}

// Command is `heddle bench peers`.
func Command() session.Command { return connections.command() }

// PacketsCommand is `heddle bench packets`.
func PacketsCommand() session.Command { return packets.command() }

func (c comparison) command() session.Command {
	var o bench.Options
	usage := "workloads to run (default iperf3,rr,crr)"
	if c.workloads != nil {
		usage = "workloads to run"
	}
	return session.Benchmark[Result]{
		Name: c.name, Short: c.short, Long: c.long,
		Lab: session.Needs{Program: true},
		Flags: func(f session.Flags) {
			var all []string
			for _, m := range bench.AllModes {
				if !slices.Contains(c.without, m) {
					all = append(all, string(m))
				}
			}
			f.DeclareWorkloads(c.workloads, usage)
			f.DeclareScopes()
			f.DeclareModes("", all...)
			f.DeclareRuns(c.runs, "runs of each workload, scope and mode")
			f.DeclareDuration(time.Second, "length of one measurement (iperf3, dnsperf: whole seconds)")
		},
		Check: func(s *session.Session) (err error) { o, err = s.Options(); return err },
		Run:   func(ctx context.Context, s *session.Session) (Result, error) { return run(ctx, s, o) },
		Print: func(w io.Writer, _ *session.Session, r Result) error {
			return errors.Join(report.WriteTable(w, r.Results), WriteSkipped(w, r.Networks))
		},
		Report:    c.writeReport,
		Summaries: []session.Summary{{Page: c.page, Part: c.name, Write: c.summarize}},
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

func (c comparison) writeReport(d *report.Document) error {
	var r Result
	if err := d.Read(c.file, &r); err != nil {
		return err
	}
	text, err := section(r)
	if err != nil {
		return err
	}
	about := plot.Text{Title: c.title,
		Subtitle: fmt.Sprintf("%d runs of %g s each, interleaved; %s", r.Results[0].Runs, r.DurationS, r.Machine)}
	draw := func(w io.Writer) error { return plot.Write(w, r.Results, about) }
	return errors.Join(d.Plot(c.plot, draw), d.Section("", text))
}
