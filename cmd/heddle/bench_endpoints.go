package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/bench"
)

// newBenchEndpointsCmd makes `heddle bench endpoints`.
func newBenchEndpointsCmd() *cobra.Command {
	s := benchSettings{up: true}
	var endpoints int
	cmd := &cobra.Command{
		Use:   "endpoints",
		Short: "Measure the memory that an endpoint takes: the kernel's, and the agent's",
		Long: `Brings a lab up, makes endpoints on its first node and removes them, several times over, and prints what memory of
the kernel and of the agent one takes. The lab goes when it is done, also on Ctrl-C; one that was up before stays.
The kernel's memory is the whole machine's: keep it otherwise idle.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runBenchEndpoints(cmd.Context(), s, endpoints, cmd.OutOrStdout(), os.Stderr)
		},
	}
	f := cmd.Flags()
	f.IntVar(&endpoints, "endpoints", 200, "endpoints to make at a time")
	f.IntVar(&s.runs, "runs", 5, "how often they come and go")
	f.StringVar(&s.lab, "lab", "memory", "name of the lab")
	f.StringVar(&s.jsonFile, "json", "", "write the results to this file")
	return cmd
}

func runBenchEndpoints(ctx context.Context, s benchSettings, endpoints int, out io.Writer, progress *os.File) error {
	if err := s.checkFiles(); err != nil {
		return err
	}
	var result bench.EndpointMemoryResult
	err := s.inLab(ctx, progress, func(ctx context.Context, place bench.Lab) error {
		large, err := scaleLab(place)
		if err != nil {
			return err
		}
		result, err = bench.RunEndpointMemory(ctx, large.Agents[0], s.lab+"-bench", endpoints, s.runs, progress)
		return err
	})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "memory of an endpoint, of %d at a time, median of %d comings and goings:\nkernel  %s kB\nagent   %s kB\n",
		result.Endpoints, 2*result.Rounds, inKB(result.Kernel), inKB(result.Agent))
	if err != nil {
		return err
	}
	return s.writeFiles(result, nil)
}

func inKB(s bench.Spread) bench.Spread {
	return bench.Spread{Median: s.Median / 1e3, Min: s.Min / 1e3, Max: s.Max / 1e3}
}
