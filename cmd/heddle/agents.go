package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/patience"
)

// labRunFolder holds LAB/NODE/api.sock of every lab that is up.
const labRunFolder = "/run/heddle/lab"

// askTimeout bounds one question to all agents. It only ends what hangs: 62,000 connections of a
// busy node take more than 15 seconds to be listed.
var askTimeout = patience.For(time.Minute)

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
func (f agentFlags) findAll(ctx context.Context) (agents, error) {
	found, err := f.find()
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

// find gives the agents that the flags mean.
func (f agentFlags) find() (agents, error) { return f.findIn(api.DefaultSocket, labRunFolder) }

// findIn is find with where sockets are.
func (f agentFlags) findIn(defaultSocket, labs string) (agents, error) {
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

// eachAgent calls each agent that the flags mean, one after the other, until one fails.
func eachAgent(ctx context.Context, f agentFlags, call func(context.Context, *api.Client) error) error {
	found, err := f.find()
	if err != nil {
		return err
	}
	for _, c := range found.clients {
		if _, err := ask(ctx, agents{clients: []*api.Client{c}}, func(ctx context.Context, c *api.Client) (struct{}, error) {
			return struct{}{}, call(ctx, c)
		}); err != nil {
			return err
		}
	}
	return nil
}

// firstAgent calls one of the agents that the flags mean: of what the network has in common all
// know the same.
func firstAgent[T any](ctx context.Context, f agentFlags, call func(context.Context, *api.Client) (T, error)) (answer T, err error) {
	found, err := f.find()
	if err != nil {
		return answer, err
	}
	found.clients = found.clients[:1]
	answers, err := ask(ctx, found, call)
	if err != nil {
		return answer, err
	}
	return answers[0], nil
}

// oneAgent runs change on the one agent that the flags mean.
func oneAgent(ctx context.Context, f agentFlags, change func(context.Context, *api.Client) error) error {
	found, err := f.find()
	if err != nil {
		return err
	}
	if len(found.clients) != 1 {
		return fmt.Errorf("%d agents are up: choose one with --node or --api", len(found.clients))
	}
	_, err = ask(ctx, found, func(ctx context.Context, c *api.Client) (struct{}, error) {
		return struct{}{}, change(ctx, c)
	})
	return err
}

// printAnswers prints what agents said, as JSON or by print; err is of those that did not answer.
func printAnswers[T any](cmd *cobra.Command, format outputFormat, list []T, err error, print func(io.Writer, []T) error) error {
	if format == jsonOutput {
		return errors.Join(printJSON(cmd.OutOrStdout(), list), err)
	}
	if err != nil && len(list) == 0 {
		return err // not beneath an empty table
	}
	return errors.Join(print(cmd.OutOrStdout(), list), err)
}
