package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/doctor"
	"heddle.dev/heddle/internal/model"
)

// labRunFolder holds LAB/NODE/api.sock of every lab that is up.
const labRunFolder = "/run/heddle/lab"

// askTimeout bounds one question to all agents.
const askTimeout = 15 * time.Second

// askAtOnce bounds how many agents are asked at the same time.
const askAtOnce = 64

// startHint is what to do when no agent answers.
const startHint = "start one with `heddled`, or a lab with `heddle lab up`"

// outputFormat is the value of --output.
type outputFormat string

const (
	tableOutput outputFormat = "table"
	jsonOutput  outputFormat = "json"
)

// String implements pflag.Value.
func (f *outputFormat) String() string { return string(*f) }

// Set implements pflag.Value.
func (f *outputFormat) Set(s string) error {
	if s != string(tableOutput) && s != string(jsonOutput) {
		return fmt.Errorf("want %s or %s", tableOutput, jsonOutput)
	}
	*f = outputFormat(s)
	return nil
}

// Type implements pflag.Value.
func (f *outputFormat) Type() string { return "table|json" }

func addOutputFlag(cmd *cobra.Command, f *outputFormat) {
	*f = tableOutput
	cmd.Flags().VarP(f, "output", "o", "how to print")
}

// agentFlags say which agents to ask.
type agentFlags struct {
	api, lab, node string
	allNodes       bool
	output         outputFormat
}

func (f *agentFlags) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.api, "api", "", fmt.Sprintf("the agent's socket (default %s, or those of the lab that is up)", api.DefaultSocket))
	flags.StringVar(&f.lab, "lab", "", "ask the agents of this lab")
	flags.StringVar(&f.node, "node", "", "ask the agent of this node only: of the lab, or by way of the agent here")
	addOutputFlag(cmd, &f.output)
}

// registerReading is register for what all nodes can be asked by way of one agent.
func (f *agentFlags) registerReading(cmd *cobra.Command) {
	f.register(cmd)
	cmd.Flags().BoolVarP(&f.allNodes, "all-nodes", "A", false, "ask the agents of all nodes, by way of one")
}

// agents are the agents to ask; several says that they are a lab's or a network's, so that tables
// need a column NODE.
type agents struct {
	clients []*api.Client
	several bool
}

// findAll is find, with all nodes by way of the first agent if the flags mean those.
func (f agentFlags) findAll(ctx context.Context, defaultSocket, labs string) (agents, error) {
	found, err := f.find(defaultSocket, labs)
	if err != nil || !f.allNodes {
		return found, err
	}
	if f.node != "" {
		return agents{}, errors.New("--all-nodes, --node: leave one out")
	}
	found.clients = found.clients[:1]
	nodes, err := ask(ctx, found, func(ctx context.Context, c *api.Client) ([]api.Node, error) { return c.Nodes(ctx) })
	if err != nil {
		return agents{}, err
	}
	all := agents{several: true}
	for _, n := range nodes[0] {
		all.clients = append(all.clients, found.clients[0].On(n.Name))
	}
	return all, nil
}

// find gives the agents that the flags mean. defaultSocket and labs are api.DefaultSocket and
// labRunFolder except in tests.
func (f agentFlags) find(defaultSocket, labs string) (agents, error) {
	if f.api != "" {
		if f.lab != "" || f.node != "" {
			return agents{}, errors.New("--api: it names one agent already; leave out --lab and --node")
		}
		return agents{clients: []*api.Client{api.Dial(f.api)}}, nil
	}
	for flag, name := range map[string]string{"--lab": f.lab, "--node": f.node} {
		if name == "" {
			continue
		}
		if err := model.ValidateName(flag, name); err != nil {
			return agents{}, err
		}
	}
	if f.lab == "" {
		// Stat errors other than "no such file" are the client's to report.
		if _, err := os.Stat(defaultSocket); !errors.Is(err, fs.ErrNotExist) {
			here := api.Dial(defaultSocket)
			if f.node != "" {
				here = here.On(f.node)
			}
			return agents{clients: []*api.Client{here}}, nil
		}
	}
	return f.findLab(defaultSocket, labs)
}

// findLab gives the agents of the lab that the flags mean, or of the only one that is up.
func (f agentFlags) findLab(defaultSocket, labs string) (agents, error) {
	lab, node := cmp.Or(f.lab, "*"), cmp.Or(f.node, "*")
	sockets, err := filepath.Glob(filepath.Join(labs, lab, node, "api.sock"))
	if err != nil {
		return agents{}, err
	}
	byLab := map[string][]string{}
	for _, s := range sockets {
		l := filepath.Base(filepath.Dir(filepath.Dir(s)))
		byLab[l] = append(byLab[l], s)
	}
	switch {
	case len(byLab) == 0 && f.node != "":
		return agents{}, fmt.Errorf("--node %s: no lab node of that name is up; `heddle lab up` brings a lab up", f.node)
	case len(byLab) == 0 && f.lab != "":
		return agents{}, fmt.Errorf("--lab %s: no node of that lab is up; `heddle lab up` brings a lab up", f.lab)
	case len(byLab) == 0:
		return agents{}, fmt.Errorf("%w on %s and no lab is up: %s", api.ErrNoAgent, defaultSocket, startHint)
	case len(byLab) > 1:
		var names []string
		for l := range byLab {
			names = append(names, l)
		}
		slices.Sort(names)
		return agents{}, fmt.Errorf("several labs are up (%s): choose one with --lab", strings.Join(names, ", "))
	}
	found := agents{several: true}
	for _, s := range sockets {
		found.clients = append(found.clients, api.Dial(s))
	}
	return found, nil
}

// ask puts one question to every agent at once. It gives the answers in the order of the agents,
// without those of agents that failed: their errors are joined, and say how to start an agent if
// none answers.
func ask[T any](ctx context.Context, from agents, question func(context.Context, *api.Client) (T, error)) ([]T, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	answers := make([]T, len(from.clients))
	errs := make([]error, len(from.clients))
	var wg sync.WaitGroup
	turns := make(chan struct{}, askAtOnce)
	for i, c := range from.clients {
		wg.Go(func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			defer c.Close()
			answers[i], errs[i] = question(ctx, c)
			if errors.Is(errs[i], api.ErrNoAgent) {
				errs[i] = fmt.Errorf("%w: %s", errs[i], startHint)
			} else if errors.Is(errs[i], fs.ErrPermission) {
				errs[i] = fmt.Errorf("%w: run this as root", errs[i])
			}
		})
	}
	wg.Wait()
	var good []T
	for i, a := range answers {
		if errs[i] == nil {
			good = append(good, a)
		}
	}
	return good, errors.Join(errs...)
}

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
			from, err := f.findAll(cmd.Context(), api.DefaultSocket, labRunFolder)
			if err != nil {
				return err
			}
			list, err := ask(cmd.Context(), from, askStatus)
			if f.output == jsonOutput {
				return errors.Join(printJSON(cmd.OutOrStdout(), list), err)
			}
			if err != nil && len(list) == 0 {
				return err // not beneath an empty table
			}
			return errors.Join(printStatus(cmd.OutOrStdout(), list, all, time.Now()), err)
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
			from, err := f.findAll(cmd.Context(), api.DefaultSocket, labRunFolder)
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
			if f.output == jsonOutput {
				return errors.Join(printJSON(cmd.OutOrStdout(), list), err)
			}
			if err != nil && len(list) == 0 {
				return err // not beneath an empty table
			}
			print := printEndpoints
			if stats {
				print = printTraffic
			}
			return errors.Join(print(cmd.OutOrStdout(), list, from.several), err)
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
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check this machine for what Heddle needs",
		Long: `Tries every kernel feature, setting and program that Heddle builds on, and names what is missing, what that
costs and the remedy. Needs root and no agent; changes nothing. The exit code is 1 if something is missing
without which Heddle does not work. With --output json: an object with "ok" and "checks".`,
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			checks := doctor.Run(cmd.Context())
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
	addOutputFlag(cmd, &output)
	return cmd
}
