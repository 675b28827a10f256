package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/lab"
)

// newLabCmd makes `heddle lab`.
func newLabCmd() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "lab",
		Short: "Simulate several nodes on this machine",
		Long: `A lab is a few nodes on one machine: network namespaces joined by veth pairs, an agent in each, and
containers whose files are this machine's own. Nothing of the machine's own network is touched.`,
	}
	cmd.PersistentFlags().StringVar(&name, "lab", lab.DefaultName, "name of the lab")
	cmd.AddCommand(newLabUpCmd(&name), newLabDownCmd(&name), newLabExecCmd(&name), newLabIPCmd(&name), newLabListCmd())
	return cmd
}

func newLabUpCmd(name *string) *cobra.Command {
	var size lab.Size
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Bring the lab up, or complete it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for flag, n := range map[string]int{"nodes": size.Nodes, "containers": size.Containers} {
				if cmd.Flags().Changed(flag) && n < 1 {
					return fmt.Errorf("--%s %d: want 1 or more", flag, n)
				}
			}
			l, err := lab.Open(*name)
			if err != nil {
				return err
			}
			return l.Up(cmd.Context(), size, cmd.ErrOrStderr())
		},
	}
	cmd.Flags().StringVar(&size.Prefix6, "prefix6", "", "IPv6 prefix of the lab's overlay, 96 bits, or 'none' (default one made of the network's id)")
	cmd.Flags().StringVar(&size.Underlay, "underlay", "", "addresses by which the nodes of a new lab reach each other: 'ipv4' or 'ipv6' (default ipv4)")
	// 0 stands for "as the lab is, or 2".
	cmd.Flags().StringArrayVar(&size.AgentArgs, "agent-arg", nil, "argument for the agents that are started now, as --agent-arg=--endpoint-sockets=100; may be repeated")
	cmd.Flags().IntVar(&size.Nodes, "nodes", 0, "number of nodes: n1, n2 ... (default 2)")
	cmd.Flags().IntVar(&size.StoreMembers, "store-members", 0, "etcd servers s1, s2 ... beside the nodes, with certificates, instead of a store in n1's agent; needs etcd")
	cmd.Flags().BoolVar(&size.SocketPool, "socket-pool", false, "preload the pool of sockets in the containers of a new lab")
	cmd.Flags().BoolVar(&size.Guest, "guest", false, "let connections within a node go through memory in the containers of a new lab, as stack profiles say")
	cmd.Flags().BoolVar(&size.Stacks, "stacks", false, "let stack modules run the TCP of the containers of a new lab, as stack profiles say")
	cmd.Flags().BoolVar(&size.Verbs, "verbs", false, "give the containers of a new lab RDMA devices; needs libibverbs1 on this machine")
	cmd.Flags().Uint32Var(&size.VerbsSpinMicros, "verbs-spin-us", 0, "with --verbs: microseconds for which their programs look for work before they sleep; 0: as many as their node says")
	cmd.Flags().IntVar(&size.Containers, "containers", 0, "number of containers on each node: n1/c1, n1/c2 ... (default 2)")
	return cmd
}

func newLabDownCmd(name *string) *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "Remove the lab and everything in it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := lab.Open(*name)
			if err != nil {
				return err
			}
			return l.Down(cmd.Context(), cmd.ErrOrStderr())
		},
	}
}

// addModeFlag adds --mode; its value is read by lab.ParseMode.
func addModeFlag(cmd *cobra.Command, mode *string) {
	cmd.Flags().StringVar(mode, "mode", string(lab.ModeHeddle), "heddle, overlay (the same container, not intercepted) or host (the node's own network)")
}

func newLabExecCmd(name *string) *cobra.Command {
	var c lab.Command
	var mode string
	cmd := &cobra.Command{
		Use:   "exec [flags] NODE/CONTAINER -- COMMAND [ARGUMENT...]",
		Short: "Run a command in a container of the lab",
		Long: `Runs a command in a container of the lab. Standard input and output and the exit status pass through; the
working directory is the caller's if the container has it. PATH, HOME, TERM and LANG are the caller's, other
variables come with --env.`,
		Example: "  heddle lab exec n2/c1 -- iperf3 -s\n  heddle lab exec n1/c1 -- iperf3 -c $(heddle lab ip n2/c1)",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("no container: give one, such as n1/c1")
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) (err error) {
			if c.Mode, err = lab.ParseMode(mode); err != nil {
				return err
			}
			c.Container, c.Args = splitCommand(args)
			for _, e := range c.Env {
				if e == "" || strings.HasPrefix(e, "=") {
					return fmt.Errorf("--env %q: want NAME=VALUE, or NAME to pass the caller's value", e)
				}
			}
			l, err := lab.Open(*name)
			if err != nil {
				return err
			}
			status, err := l.Exec(c)
			if err == nil && status != 0 {
				os.Exit(status) // the command has said why
			}
			return err
		},
	}
	// What follows the container is the command's, flags as well.
	cmd.Flags().SetInterspersed(false)
	addModeFlag(cmd, &mode)
	cmd.Flags().StringArrayVarP(&c.Env, "env", "e", nil, "set a variable: NAME=VALUE, or NAME to pass the caller's value")
	cmd.Flags().StringVarP(&c.User, "user", "u", "", "run as UID[:GID] (default root)")
	cmd.Flags().StringVar(&c.Dir, "cwd", "", "working directory (default the caller's, if the container has it)")
	return cmd
}

// splitCommand splits "n1/c1 [--] CMD ARG..." as pflag leaves it.
func splitCommand(args []string) (container string, command []string) {
	command = args[1:]
	if len(command) > 0 && command[0] == "--" {
		command = command[1:]
	}
	return args[0], command
}

func newLabIPCmd(name *string) *cobra.Command {
	var mode string
	var family int
	cmd := &cobra.Command{
		Use:   "ip [flags] NODE/CONTAINER",
		Short: "Print the address a peer dials",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			m, err := lab.ParseMode(mode)
			if err != nil {
				return err
			}
			l, err := lab.Open(*name)
			if err != nil {
				return err
			}
			addr, err := l.Addr(args[0], m, lab.Family(family))
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), addr)
			return err
		},
	}
	addModeFlag(cmd, &mode)
	cmd.Flags().IntVar(&family, "family", int(lab.IPv4), "address family: 4 or 6")
	return cmd
}

func newLabListCmd() *cobra.Command {
	var format outputFormat
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the labs on this machine",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			labs, err := lab.List()
			if err != nil {
				return err
			}
			if format == jsonOutput {
				enc := json.NewEncoder(os.Stdout)
				enc.SetIndent("", "  ")
				return enc.Encode(map[string]any{"labs": labs})
			}
			return printLabs(labs)
		},
	}
	addOutputFlag(cmd, &format)
	return cmd
}

func printLabs(labs []lab.Listed) error {
	if len(labs) == 0 {
		_, err := fmt.Fprintln(os.Stderr, "no lab is up: `heddle lab up` brings one up")
		return err
	}
	fmt.Printf("%-20s %5s %10s %s\n", "LAB", "NODES", "CONTAINERS", "STATE")
	for _, s := range labs {
		fmt.Printf("%-20s %5d %10d %s\n", s.Name, s.Nodes, s.Containers, labState(s))
	}
	return nil
}

// labState says in a few words whether a lab can be used.
func labState(s lab.Listed) string {
	switch {
	case !s.Ready:
		return "incomplete"
	case len(s.Down) > 0:
		return "down: " + strings.Join(s.Down, "; ")
	}
	return "up"
}
