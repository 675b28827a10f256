package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/contender"
	"heddle.dev/heddle/internal/lab"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/netns"
)

// The networks of others in the bench: `--modes docker,bpf`, and `heddle bench peers`, which writes down what they are.

// inLabWithContenders is inLabWithPeer with the networks of others brought up that are among modes, on hosts of their own on
// the lab's fabric. They go with measure, however it ends.
func (s benchSettings) inLabWithContenders(ctx context.Context, progress *os.File, modes []bench.Mode,
	measure func(_ context.Context, _ bench.Place, _ *contender.Site, peer []string) error) error {
	return s.inLabWithPeer(ctx, progress, func(ctx context.Context, place bench.Lab, peer []string) (err error) {
		o := contender.Options{Modes: modes, Program: peer[0], Progress: func(line string) {
			// Progress is a courtesy.
			_, _ = fmt.Fprintln(progress, line)
		}}
		if n := contender.HostsOf(modes); n > 0 {
			l, err := openLab(place.Name)
			if err != nil {
				return err
			}
			defer func() {
				// The bench's context may be over; the hosts must go all the same.
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTimeout)
				defer cancel()
				err = errors.Join(err, l.RemoveGuests(ctx))
			}()
			if o.Hosts, err = contenderHosts(ctx, l, n); err != nil {
				return err
			}
		}
		site, err := contender.Start(ctx, o)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, site.Close()) }()
		return measure(ctx, bench.Places{Place: place, Of: site.Places}, site, peer)
	})
}

func openLab(name string) (lab.Lab, error) {
	if name == "" {
		name = lab.DefaultName
	}
	return lab.Open(name)
}

// contenderHosts makes guests of the lab.
func contenderHosts(ctx context.Context, l lab.Lab, n int) (hosts []contender.Host, err error) {
	guests, err := l.AddGuests(ctx, n)
	if err != nil {
		return nil, err
	}
	for _, g := range guests {
		hosts = append(hosts, contender.Host{
			Netns: g.Netns, Underlay: g.Underlay, Device: netcfg.FabricDevice, Dir: g.Dir, Cgroup: g.Cgroup, Cgroups: g.Cgroups, Container: g.Container,
		})
	}
	return hosts, nil
}

// newBenchPeersCmd makes `heddle bench peers`.
func newBenchPeersCmd() *cobra.Command {
	s := benchSettings{scopes: []string{"inter", "intra"}}
	cmd := &cobra.Command{
		Use:   "peers",
		Short: "Compare with the networks of others: Docker's, and a BPF data path",
		Long: `Is 'heddle bench' with further modes, on hosts of their own on the lab's fabric: bare (a host without Heddle), docker (Docker's overlay network between
nodes, its bridge on one), bpf (BPF redirection and native routing, as Cilium and Calico build it), bpf-vxlan (the same with
VXLAN), netkit. What cannot run on this machine is named with its reason. The JSON has versions and settings beside the results.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.runPeers(cmd.Context(), cmd.OutOrStdout(), os.Stderr)
		},
	}
	var all []string
	for _, m := range bench.AllModes {
		all = append(all, string(m))
	}
	f := cmd.Flags()
	f.StringSliceVar(&s.workloads, "workloads", nil, "workloads to run (default iperf3,rr,crr)")
	f.StringSliceVar(&s.scopes, "scopes", s.scopes, "inter (between nodes), intra (on one node)")
	f.StringSliceVar(&s.modes, "modes", all, "modes to compare; host is needed")
	f.IntVar(&s.runs, "runs", 4, "runs of each workload, scope and mode")
	f.DurationVar(&s.duration, "duration", quickDuration, "length of one measurement (iperf3: whole seconds)")
	f.StringVar(&s.lab, "lab", "", "name of the lab (default: the default lab)")
	f.StringVar(&s.jsonFile, "json", "", "write the results to this file")
	f.BoolVar(&s.up, "up", false, "bring the lab up if it is not, and down again afterwards")
	cmd.AddCommand(newBenchPeersReportCmd())
	return cmd
}

func (s benchSettings) runPeers(ctx context.Context, out io.Writer, progress *os.File) error {
	o, err := s.options(progress)
	if err != nil {
		return err
	}
	wanted := o.Modes
	result := bench.PeersResult{Machine: machine(), DurationS: s.duration.Seconds()}
	err = s.inLabWithContenders(ctx, progress, wanted, func(ctx context.Context, place bench.Place, site *contender.Site, peer []string) (err error) {
		o.Program, o.Modes = peer, site.Modes(wanted)
		if result.Background, err = bench.Background(ctx); err != nil {
			return err
		}
		if result.Results, err = bench.Run(ctx, place, o); err != nil {
			return err
		}
		for _, m := range wanted {
			n := bench.Network{Mode: m, Skipped: site.Skipped[m]}
			switch {
			case n.Skipped != "":
			case site.Places[m] != nil:
				n.Settings, err = site.Describe(ctx, m)
			default:
				n.Settings, err = s.describeLab(ctx, place, m)
			}
			if err != nil {
				return fmt.Errorf("settings of %s: %w", m, err)
			}
			result.Networks = append(result.Networks, n)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := bench.WriteTable(out, result.Results); err != nil {
		return err
	}
	if err := writeSkipped(out, result.Networks); err != nil {
		return err
	}
	return s.writeFiles(result, nil)
}

// writeSkipped names the modes that were not measured.
func writeSkipped(out io.Writer, networks []bench.Network) error {
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
func (s benchSettings) describeLab(ctx context.Context, place bench.Place, m bench.Mode) ([]string, error) {
	name := s.lab
	if name == "" {
		name = lab.DefaultName
	}
	node := netns.Path(name + "-n1")
	client := node
	if m == bench.Overlay {
		client = netns.Path(name + "-n1-c1")
	}
	var ways []contender.Way
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
		ways = append(ways, contender.Way{Scope: scope, Client: client, Node: node, To: to})
	}
	return contender.Describe(ctx, ways)
}
