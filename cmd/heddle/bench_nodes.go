package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/lab"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
)

// madeUp is where all made-up nodes are.
const madeUp = "198.19.0.0/16"

// startTimeout bounds the start of an agent into a large network.
const startTimeout = 2 * time.Minute

// newBenchNodesCmd makes `heddle bench nodes`.
func newBenchNodesCmd() *cobra.Command {
	var (
		o        bench.NodesOptions
		name     string
		jsonFile string
	)
	cmd := &cobra.Command{
		Use:   "nodes",
		Short: "Measure what up to 5,000 nodes and 100,000 endpoints cost one agent",
		Long: `Brings a lab of two nodes up and puts further nodes and endpoints into its store that do not exist. Measures n2's agent: memory, start,
how long changes take, and with --probes what it costs to probe every node (they all answer, by one host). The lab goes when it is done.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			ctx, cancel := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer cancel()
			o.Progress = os.Stderr
			if err := o.Validate(); err != nil {
				return err
			}
			place, down, err := nodesLab(ctx, name)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, down()) }()
			sizes, err := bench.RunNodes(ctx, place, o)
			if err != nil {
				return err
			}
			if err := bench.WriteNodes(cmd.OutOrStdout(), sizes); err != nil || jsonFile == "" {
				return err
			}
			return writeFile(jsonFile, func(w io.Writer) error {
				enc := json.NewEncoder(w)
				enc.SetIndent("", "  ")
				return enc.Encode(sizes)
			})
		},
	}
	f := cmd.Flags()
	f.IntSliceVar(&o.Nodes, "nodes", []int{50, 500, 5000}, "numbers of made-up nodes")
	f.IntVar(&o.Endpoints, "endpoints", 100000, "made-up endpoints among 5,000 nodes; among others in proportion")
	f.IntVar(&o.Changes, "changes", 10, "changes of each kind, there and back")
	f.BoolVar(&o.Probes, "probes", false, "have the nodes probed: takes 20 ms a node more")
	f.StringVar(&name, "lab", "nodes", "name of the lab")
	f.StringVar(&jsonFile, "json", "", "write the results to this file")
	return cmd
}

// nodesLab brings the lab up and gives what is done with it.
func nodesLab(ctx context.Context, name string) (place bench.NodesLab, down func() error, err error) {
	l, err := lab.Open(name)
	if err != nil {
		return place, nil, err
	}
	size := lab.Size{Nodes: 2, Containers: 1, AgentArgs: []string{"--pool=10.0.0.0/8"}}
	down = func() error { return l.Down(context.WithoutCancel(ctx), io.Discard) }
	defer func() {
		if err != nil {
			err = errors.Join(err, down())
		}
	}()
	if err := errors.Join(down(), l.Up(ctx, size, os.Stderr)); err != nil {
		return place, nil, err
	}
	network, err := l.Network()
	if err != nil {
		return place, nil, err
	}
	program, err := os.Executable()
	if err != nil {
		return place, nil, fmt.Errorf("find own program: %w", err)
	}
	socket := network.APISockets[1]
	place = bench.NodesLab{
		Agent: api.Dial(socket),
		Populate: func(ctx context.Context, nodes, endpoints int, probes bool) (*exec.Cmd, func() error) {
			cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(program), "heddled"), "populate", "--join-file", network.JoinFile,
				"--network-id", strconv.Itoa(int(network.ID)), "--nodes", strconv.Itoa(nodes), "--endpoints", strconv.Itoa(endpoints), "--probes="+strconv.FormatBool(probes))
			return cmd, func() error { return netns.Start(network.Netns, cmd) }
		},
		Restart: func(ctx context.Context) (time.Duration, error) { return restartAgent(ctx, l, size, socket) },
		Answer:  func() (func() error, error) { return answerProbes(netns.Path(name + "-outside")) },
	}
	return place, down, nil
}

// restartAgent ends the agent behind socket and has the lab start another. The lab would wait until that knows all direct
// paths; here it is enough that it answers.
func restartAgent(ctx context.Context, l lab.Lab, size lab.Size, socket string) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	client := api.Dial(socket)
	defer client.Close()
	before, err := client.Status(ctx)
	if err != nil {
		return 0, err
	}
	if err := syscall.Kill(before.PID, syscall.SIGTERM); err != nil {
		return 0, fmt.Errorf("end agent %d: %w", before.PID, err)
	}
	for syscall.Kill(before.PID, 0) == nil {
		if ctx.Err() != nil {
			return 0, fmt.Errorf("agent %d does not end: %w", before.PID, ctx.Err())
		}
		time.Sleep(5 * time.Millisecond)
	}
	began := time.Now()
	upCtx, stop := context.WithCancel(ctx)
	up := make(chan error, 1)
	go func() { up <- l.Up(upCtx, size, io.Discard) }()
	defer func() { stop(); <-up }()
	for {
		now, err := client.Status(ctx)
		if err == nil && now.PID != before.PID {
			return time.Since(began), nil
		}
		select {
		case err := <-up:
			up <- err
			if err != nil {
				return 0, err
			}
		case <-ctx.Done():
			return 0, fmt.Errorf("the new agent does not answer: %w", errors.Join(err, ctx.Err()))
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// answerProbes has the host outside a lab accept connects to every direct port of all made-up nodes.
func answerProbes(outside string) (stop func() error, err error) {
	route := func(verb string) error {
		cmd := exec.Command("ip", "route", verb, "local", madeUp, "dev", "lo")
		if err := netns.Start(outside, cmd); err != nil {
			return err
		}
		return cmd.Wait()
	}
	if err := route("replace"); err != nil {
		return nil, fmt.Errorf("make the addresses of made-up nodes local: %w", err)
	}
	var listeners []net.Listener
	stop = func() error {
		var errs []error
		for _, l := range listeners {
			errs = append(errs, l.Close())
		}
		return errors.Join(append(errs, route("del"))...)
	}
	err = netns.Do(outside, func() error {
		for port := int(model.DefaultDirectPorts.First); port <= int(model.DefaultDirectPorts.Last); port++ {
			l, err := net.Listen("tcp4", ":"+strconv.Itoa(port))
			if err != nil {
				return err
			}
			listeners = append(listeners, l)
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	for _, l := range listeners {
		go func() {
			for {
				conn, err := l.Accept()
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err == nil {
					_ = conn.Close() // a probe resets it
				}
			}
		}()
	}
	return stop, nil
}
