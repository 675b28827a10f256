package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/lab"
	"heddle.dev/heddle/internal/netns"
)

// costSettings are the flags of `heddle bench cost`.
type costSettings struct {
	benchSettings
	connections, trips, starts int
	profile                    string
}

// defaultProfile is Docker's default seccomp profile, in the project's sources.
const defaultProfile = "internal/runtime/testdata/docker29.json"

// newBenchCostCmd makes `heddle bench cost`.
func newBenchCostCmd() *cobra.Command {
	var s costSettings
	cmd := &cobra.Command{
		Use:   "cost",
		Short: "Measure what it costs that Heddle is there: a packet, a connection, a system call, a container's start",
		Long: `Counts which BPF programs run, and how long, for each step in the life of TCP connections, in all modes; times cheap system calls in
containers with and without Heddle's seccomp filter; and times starts of containers and endpoints, with what they consist of.

Counting (BPF_ENABLE_STATS) is for the whole machine while it is on, and is switched off again.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.run(cmd.Context(), cmd.OutOrStdout(), os.Stderr)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&s.scopes, "scopes", []string{"inter", "intra"}, "inter (between nodes), intra (on one node)")
	f.IntVar(&s.runs, "runs", 3, "rounds of everything but starts")
	f.DurationVar(&s.duration, "duration", time.Second, "length of a run of a workload")
	f.IntVar(&s.connections, "connections", 2000, "connections of a round")
	f.IntVar(&s.trips, "trips", 10000, "round trips of a round")
	f.IntVar(&s.starts, "starts", 20, "containers and endpoints of each kind")
	f.StringVar(&s.profile, "profile", defaultProfile, "an engine's default seccomp profile; without the file it is left out")
	f.StringVar(&s.lab, "lab", "", "name of the lab (default: the default lab)")
	f.StringVar(&s.jsonFile, "json", "", "write the results to this file")
	f.BoolVar(&s.up, "up", false, "bring the lab up if it is not, and down again afterwards")
	cmd.AddCommand(newBenchCostReportCmd())
	return cmd
}

// newBenchCostReportCmd makes `heddle bench cost report`.
func newBenchCostReportCmd() *cobra.Command {
	var file, document string
	cmd := &cobra.Command{
		Use:   "report",
		Short: "Write the tables of results into the document, between its two marks",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return reportCost(file, document) },
	}
	cmd.Flags().StringVar(&file, "results", resultsFolder+"/cost.json", "what 'heddle bench cost --json' wrote")
	cmd.Flags().StringVar(&document, "document", resultTables, "the document with the tables")
	return cmd
}

// options says what to measure in a lab, and where its nodes are.
func (s costSettings) options(progress io.Writer) (o bench.CostOptions, err error) {
	o = bench.CostOptions{Connections: s.connections, Trips: s.trips, Rounds: s.runs, Starts: s.starts, Duration: s.duration, Profile: s.profile, Progress: progress}
	if o.Scopes, err = bench.ParseScopes(s.scopes); err != nil {
		return o, err
	}
	name := cmp.Or(s.lab, lab.DefaultName)
	for i, node := range []string{"n1", "n2"} {
		dir := filepath.Join(labRunFolder, name, node)
		o.Nodes[i] = bench.CostNode{
			PinDir: filepath.Join(dir, "bpf", "heddle"), APISocket: filepath.Join(dir, "api.sock"), SeccompSocket: filepath.Join(dir, "seccomp.sock"),
			Netns: netns.Path(name + "-" + node),
		}
		for _, space := range []string{node, node + "-c1", node + "-c2"} {
			o.Spaces = append(o.Spaces, netns.Path(name+"-"+space))
		}
	}
	if s.profile == defaultProfile {
		if _, err := os.Stat(s.profile); err != nil {
			o.Profile = ""
		}
	} else if _, err := os.Stat(s.profile); err != nil {
		return o, fmt.Errorf("--profile: %w", err)
	}
	if err := s.checkFiles(); err != nil {
		return o, err
	}
	return o, o.Validate()
}

func (s costSettings) run(ctx context.Context, out io.Writer, progress *os.File) error {
	o, err := s.options(progress)
	if err != nil {
		return err
	}
	var result bench.CostResult
	err = s.inLabWithPeer(ctx, progress, func(ctx context.Context, place bench.Lab, peer []string) (err error) {
		o.Program = peer
		programs := filepath.Dir(place.Heddle)
		o.Runtime, o.CNI = filepath.Join(programs, "heddle-runtime"), filepath.Join(programs, "heddle-cni")
		busy, err := bench.Background(ctx)
		if err != nil {
			return err
		}
		result, err = bench.RunCost(ctx, place, o)
		result.Machine, result.Background = machine(), busy
		return err
	})
	if err != nil {
		return err
	}
	if err := bench.WriteCost(out, result); err != nil {
		return err
	}
	return s.writeFiles(result, nil)
}

func reportCost(file, document string) (err error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var result bench.CostResult
	if err := json.Unmarshal(raw, &result); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	old, err := os.ReadFile(document)
	if err != nil {
		return err
	}
	changed, err := bench.ReplaceCostDoc(old, result)
	if err != nil {
		return fmt.Errorf("%s: %w", document, err)
	}
	return writeFile(document, func(w io.Writer) error { _, err := w.Write(changed); return err })
}
