package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/doctor"
	"heddle.dev/heddle/internal/model"
)

func newStatusCmd() *cobra.Command {
	var f agentFlags
	var all bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show what an agent runs and counts",
		Long: `Shows the agent, its store, peers, endpoints and interception, and every counter of paths, fallbacks, drops
and refusals that is not zero. With --output json: a list with one status for each agent asked.`,
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			from, err := f.findAll(cmd.Context())
			if err != nil {
				return err
			}
			list, err := ask(cmd.Context(), from, askStatus)
			return printAnswers(cmd, f.output, list, err, func(out io.Writer, list []nodeStatus) error { return printStatus(out, list, all, time.Now()) })
		},
	}
	f.registerReading(cmd)
	cmd.Flags().BoolVar(&all, "all", false, "show counters that are zero, too")
	return cmd
}

// nodeStatus is an agent's status with the sum of what its endpoints' sockets did.
type nodeStatus struct {
	api.Status
	Traffic model.Traffic `json:"traffic"`
}

func askStatus(ctx context.Context, c *api.Client) (nodeStatus, error) {
	st, err := c.Status(ctx)
	if err != nil {
		return nodeStatus{}, err
	}
	traffic, err := c.Traffic(ctx)
	if err != nil {
		return nodeStatus{}, err
	}
	sum := model.Traffic{Live: map[model.Path]uint64{}}
	for _, t := range traffic {
		sum.Add(t)
	}
	return nodeStatus{st, sum}, nil
}

// endpointTraffic is an endpoint with what is wrong with it and what its sockets did.
type endpointTraffic struct {
	model.Endpoint
	endpointExtras
}

type endpointExtras struct {
	Faults []api.Fault `json:"faults,omitempty"`
	// Stack is by which stack profile it has its TCP; nil: none.
	Stack   *api.EndpointStack `json:"stack,omitempty"`
	Traffic *model.Traffic     `json:"traffic,omitempty"`
}

// MarshalJSON writes the members of both in one object.
func (e endpointTraffic) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		model.EndpointMembers
		endpointExtras
	}{e.Members(), e.endpointExtras})
}

// askEndpoints lists the endpoints of one agent, with their traffic if stats is set.
func askEndpoints(ctx context.Context, c *api.Client, stats bool) ([]endpointTraffic, error) {
	endpoints, err := c.Endpoints(ctx)
	if err != nil {
		return nil, err
	}
	traffic := map[model.EndpointID]*model.Traffic{}
	if stats {
		list, err := c.Traffic(ctx)
		if err != nil {
			return nil, err
		}
		for _, t := range list {
			traffic[t.Endpoint] = &t
		}
	}
	status, err := c.Status(ctx)
	if err != nil {
		return nil, err
	}
	faults := map[string][]api.Fault{}
	for _, f := range status.Faults {
		faults[f.Endpoint] = append(faults[f.Endpoint], f)
	}
	st, err := c.Stacks(ctx)
	if err != nil && !errors.Is(err, api.ErrNotFound) { // an agent of an earlier build has none
		return nil, err
	}
	stacks := map[string]*api.EndpointStack{}
	for _, s := range st.Endpoints {
		stacks[s.Endpoint] = &s
	}
	list := make([]endpointTraffic, len(endpoints))
	for i, e := range endpoints {
		list[i] = endpointTraffic{e, endpointExtras{faults[e.Name], stacks[e.Name], traffic[e.ID]}}
	}
	return list, nil
}

func newEndpointsCmd() *cobra.Command {
	var f agentFlags
	var stats bool
	cmd := &cobra.Command{
		Use:   "endpoints",
		Short: "List the containers attached to a node",
		Long: `Lists the containers attached to a node, with what is wrong with one (heddle status says more); with --stats the connections that their TCP sockets opened, accepted, failed
to open and closed, those now live by path, and the payload sent and received. With --output json: a list of endpoints.`,
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			from, err := f.findAll(cmd.Context())
			if err != nil {
				return err
			}
			lists, err := ask(cmd.Context(), from, func(ctx context.Context, c *api.Client) ([]endpointTraffic, error) {
				return askEndpoints(ctx, c, stats)
			})
			list := slices.Concat(lists...)
			slices.SortFunc(list, func(a, b endpointTraffic) int {
				return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Name, b.Name))
			})
			print := printEndpoints
			if stats {
				print = printTraffic
			}
			return printAnswers(cmd, f.output, list, err, func(out io.Writer, list []endpointTraffic) error { return print(out, list, from.several) })
		},
	}
	f.registerReading(cmd)
	cmd.Flags().BoolVar(&stats, "stats", false, "show what their TCP sockets did")
	cmd.AddCommand(newEndpointAddCmd(), newEndpointDeleteCmd(), newEndpointVerbsCmd(), newEndpointPublishCmd(), newEndpointLabelCmd())
	return cmd
}

// doctorReport is what `heddle doctor --output json` prints.
type doctorReport struct {
	// OK is false if something is missing without which Heddle does not work.
	OK     bool        `json:"ok"`
	Checks []api.Check `json:"checks"`
}

func newDoctorCmd() *cobra.Command {
	var output outputFormat
	var card string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check this machine for what Heddle needs",
		Long: `Tries every kernel feature, setting and program that Heddle builds on, and names what is missing, what that
costs and the remedy. Needs root and no agent; changes nothing. The exit code is 1 if something is missing
without which Heddle does not work. With --output json: an object with "ok" and "checks".`,
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			checks := doctor.Run(cmd.Context(), card)
			missing := doctor.Missing(checks)
			var err error
			if output == jsonOutput {
				err = printJSON(cmd.OutOrStdout(), doctorReport{OK: len(missing) == 0, Checks: checks})
			} else {
				err = printChecks(cmd.OutOrStdout(), checks)
			}
			if len(missing) > 0 {
				err = errors.Join(err, fmt.Errorf("missing, and needed by Heddle: %s", strings.Join(missing, ", ")))
			}
			return err
		},
	}
	cmd.Flags().StringVar(&card, "rdma-device", "", "RDMA card that heddled is to have (its flag of this name): whether it can be used")
	addOutputFlag(cmd, &output)
	return cmd
}
