package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/plot"
	"heddle.dev/heddle/internal/lab"
	"heddle.dev/heddle/internal/netns"
)

// What --quick runs: that it works, not what it costs.
const (
	quickScaleEndpoints = 200
	quickScaleNodes     = 10
)

var quickScaleRules = []int{0, 100, 1000}

// newBenchScaleCmd makes `heddle bench policy-scale`.
func newBenchScaleCmd() *cobra.Command {
	s := benchSettings{up: true}
	o := bench.ScaleOptions{}
	cmd := &cobra.Command{
		Use:   "policy-scale",
		Short: "Measure connects and changes of rules among up to 100,000 rules and 10,000 endpoints",
		Long: `Brings a lab of two nodes up, puts further nodes and endpoints into its store that do not exist, and then more and
more rules that all are about the measured containers. Among each number of rules it measures new connections in every
mode, and what changes of one and of 1,000 rules take until both nodes enforce them. All numbers of rules are gone through
several times. The lab goes when it is done, also on Ctrl-C; one that was up before stays, without what was put into it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if s.quick {
				s.quickScale(&o, cmd.Flags().Changed)
			}
			return runBenchScale(cmd.Context(), s, o, cmd.OutOrStdout(), os.Stderr)
		},
	}
	f := cmd.Flags()
	f.IntSliceVar(&o.Rules, "rules", bench.ScaleRules, "numbers of rules to compare: ascending multiples of 100, the first 0")
	f.IntVar(&o.Endpoints, "endpoints", bench.ScaleEndpoints, "made-up endpoints")
	f.IntVar(&o.Nodes, "nodes", bench.ScaleNodes, "made-up nodes that have them")
	f.IntVar(&o.Rounds, "rounds", 5, "rounds through all numbers of rules")
	f.IntVar(&o.Changes, "changes", 5, "changes of one rule to measure in each round, there and back")
	f.DurationVar(&o.Duration, "duration", time.Second, "length of one measurement of connects")
	f.StringSliceVar(&s.scopes, "scopes", []string{"inter", "intra"}, "inter (between nodes), intra (on one node)")
	f.StringVar(&s.lab, "lab", "scale", "name of the lab")
	f.StringVar(&s.jsonFile, "json", "", "write the results to this file")
	f.StringVar(&s.plotFile, "plot", "", "draw the results into this SVG file")
	f.BoolVar(&s.markdown, "markdown", false, "print Markdown tables")
	f.BoolVar(&s.quick, "quick", false, fmt.Sprintf("one short round of %v rules, %d endpoints", quickScaleRules, quickScaleEndpoints))
	return cmd
}

// quickScale makes what was not asked for otherwise short.
func (s benchSettings) quickScale(o *bench.ScaleOptions, asked func(flag string) bool) {
	for flag, set := range map[string]func(){
		"rules":     func() { o.Rules = quickScaleRules },
		"endpoints": func() { o.Endpoints = quickScaleEndpoints },
		"nodes":     func() { o.Nodes = quickScaleNodes },
		"rounds":    func() { o.Rounds = 1 },
		"changes":   func() { o.Changes = 1 },
		"duration":  func() { o.Duration = 100 * time.Millisecond },
	} {
		if !asked(flag) {
			set()
		}
	}
}

func runBenchScale(ctx context.Context, s benchSettings, o bench.ScaleOptions, out io.Writer, progress *os.File) (err error) {
	o.Progress = progress
	if o.Scopes, err = bench.ParseScopes(s.scopes); err != nil {
		return err
	}
	if err := errors.Join(o.Validate(), s.checkFiles()); err != nil {
		return err
	}
	var result bench.ScaleResult
	err = s.inLabWithPeer(ctx, progress, func(ctx context.Context, place bench.Lab, peer []string) error {
		o.Program = peer
		large, err := scaleLab(place)
		if err != nil {
			return err
		}
		result, err = bench.RunScale(ctx, large, o)
		return err
	})
	if err != nil {
		return err
	}
	return s.reportScale(result, out)
}

// scaleLab finds what of a lab that is up can be spoken to.
func scaleLab(place bench.Lab) (bench.ScaleLab, error) {
	l, err := lab.Open(place.Name)
	if err != nil {
		return bench.ScaleLab{}, err
	}
	network, err := l.Network()
	if err != nil {
		return bench.ScaleLab{}, err
	}
	large := bench.ScaleLab{Lab: place}
	for _, s := range network.APISockets {
		large.Agents = append(large.Agents, api.Dial(s))
	}
	agent := filepath.Join(filepath.Dir(place.Heddle), "heddled")
	large.Populate = func(ctx context.Context, nodes, endpoints int) (*exec.Cmd, func() error) {
		cmd := exec.CommandContext(ctx, agent, "populate", "--join-file", network.JoinFile, "--network-id", strconv.Itoa(int(network.ID)),
			"--nodes", strconv.Itoa(nodes), "--endpoints", strconv.Itoa(endpoints))
		return cmd, func() error { return netns.Start(network.Netns, cmd) }
	}
	return large, nil
}

// reportScale prints the tables and writes the files.
func (s benchSettings) reportScale(result bench.ScaleResult, out io.Writer) error {
	write := bench.WriteScale
	if s.markdown {
		write = bench.WriteScaleMarkdown
	}
	if err := write(out, result); err != nil {
		return err
	}
	text := plot.Text{Title: "New connections and changes among more and more rules",
		Subtitle: fmt.Sprintf("%d endpoints on %d nodes; rounds through all numbers of rules: %d; %s", result.Endpoints, result.Nodes, result.Rounds, machine())}
	return s.writeFiles(result, func(w io.Writer) error { return plot.WriteScale(w, result, text) })
}
