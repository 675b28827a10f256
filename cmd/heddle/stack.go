package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/policy/document"
	"heddle.dev/heddle/internal/stack"
)

func newStackCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "stack",
		Short: "Say who runs the TCP of which containers, and how",
		Long: `Shows the network's stack profiles, its own congestion controls, and which endpoint has which profile, with what a node
cannot serve and why, and what stack modules use: processor time, bytes of buffers, connections, and so on, since they began, for
all and for each endpoint. Profiles are kept in the network's store: see docs/howto/stacks.md. With --output json: a list, one object a node.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			from, err := f.findAll(cmd.Context())
			if err != nil {
				return err
			}
			list, err := ask(cmd.Context(), from, askStacks)
			return printAnswers(cmd, f.output, list, err, printStacks)
		},
	}
	f.registerReading(cmd)
	cmd.AddCommand(newStackApplyCmd(), newStackDeleteCmd(), newStackShowCmd(), newStackLoadCmd(), newStackUnloadCmd())
	return cmd
}

// nodeStacks is what one node says of stacks.
type nodeStacks struct {
	Node string `json:"node"`
	api.Stacks
}

func askStacks(ctx context.Context, c *api.Client) (nodeStacks, error) {
	status, err := c.Status(ctx)
	if err != nil {
		return nodeStacks{}, err
	}
	st, err := c.Stacks(ctx)
	return nodeStacks{status.Node.Name, st}, err
}

// printStacks prints four tables, those that have rows, and what is not as it should be.
func printStacks(out io.Writer, list []nodeStacks) error {
	if len(list) == 0 {
		return nil
	}
	first := list[0]
	profiles := newTable("PROFILE", "PRIORITY", "ENDPOINTS", "STACK", "FALLBACK", "SETTINGS", "CHANGEABLE")
	for _, p := range first.Profiles {
		users := 0
		for _, n := range list {
			for _, e := range n.Endpoints {
				if e.Profile == p.Name {
					users++
				}
			}
		}
		profiles.row(p.Name, fmt.Sprint(p.Priority), fmt.Sprint(users), string(p.Stack), cmp.Or(string(p.Fallback), string(stack.ToKernel)), p.Settings.String(), settingNames(p.Changeable))
	}
	congestion := newTable("CONGESTION", "NODE", "STATE", "BYTES", "SHA256")
	endpoints := newTable("ENDPOINT", "NODE", "PROFILE", "STACK", "SETTINGS", "FAULT")
	modules, tenants := newTable(append([]string{"MODULE", "NODE", "PID", "ENDED"}, useColumns...)...), 0
	for _, n := range list {
		for _, c := range n.Congestion {
			congestion.row(c.Name, n.Node, string(c.State), fmt.Sprint(c.Bytes), c.SHA256[:min(12, len(c.SHA256))])
		}
		for _, e := range n.Endpoints {
			endpoints.row(e.Endpoint, n.Node, e.Profile, cmp.Or(string(e.Stack), "refused"), settingsText(&e), e.Fault)
		}
		for _, m := range n.Modules {
			modules.row(append([]string{string(m.Stack), n.Node, cmp.Or(zeroless(m.PID), "-"), fmt.Sprint(m.Ended)}, useOf(m.StackUse)...)...)
			for _, t := range m.Tenants {
				modules.row(append([]string{"  " + t.Endpoint, n.Node, "", ""}, useOf(t.StackUse)...)...)
			}
			tenants++
		}
	}
	for _, t := range []struct {
		rows  int
		table *table
	}{{1, profiles}, {len(first.Congestion), congestion}, {1, endpoints}, {tenants, modules}} {
		if t.rows == 0 {
			continue
		}
		if err := t.table.writeTo(out); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(out); err != nil {
			return err
		}
	}
	for _, note := range stackNotes(list) {
		if _, err := fmt.Fprintln(out, note); err != nil {
			return err
		}
	}
	return nil
}

// stackNotes say what is not as it should be, in the whole network at last.
func stackNotes(list []nodeStacks) (notes []string) {
	for _, n := range list {
		for _, c := range n.Congestion {
			if c.Error != "" {
				notes = append(notes, fmt.Sprintf("%s: congestion control %s: %s", n.Node, c.Name, c.Error))
			}
		}
		for _, e := range n.Endpoints {
			notes = append(notes, lackNotes(n.Node, e)...)
		}
		for _, m := range n.Modules {
			if m.Drain == nil {
				continue
			}
			when := ""
			if m.Drain.Until != nil {
				when = ", at the latest at " + m.Drain.Until.Format(time.RFC3339)
			}
			notes = append(notes, fmt.Sprintf("%s: another build of the module %s is installed: it takes over when no connection lives by this one%s", n.Node, m.Stack, when))
		}
		for _, fault := range n.Faults {
			notes = append(notes, n.Node+": "+fault)
		}
	}
	for _, name := range list[0].Behind {
		notes = append(notes, "node "+name+": its agent is of an earlier build, which does not know stack profiles")
	}
	return notes
}

// settingsText gives what is in force of a profile for an endpoint.
func settingsText(e *api.EndpointStack) string {
	if e.Own != nil && !e.Intercepted {
		return e.Own.Settings
	}
	return e.Settings
}

// lackNotes says what of its profile a container that is not intercepted has not.
func lackNotes(node string, e api.EndpointStack) (notes []string) {
	if e.Own == nil || e.Intercepted {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(e.Own.Lacks)) {
		notes = append(notes, fmt.Sprintf("%s: %s is not intercepted, and has not %s: %s", node, e.Endpoint, name, e.Own.Lacks[name]))
	}
	return notes
}

// useColumns are what is shown of what a module uses, useOf their values.
var useColumns = []string{"PROCESSOR", "MEMORY", "CONNECTIONS", "SENT", "RECEIVED", "RETRANSMITS", "RTT", "SEND-QUEUE", "RECEIVE-QUEUE", "DROPPED", "REFUSED"}

func useOf(u api.StackUse) []string {
	rtt := "-"
	if u.RTT != 0 {
		rtt = u.RTT.Round(time.Microsecond).String()
	}
	out := []string{u.Processor.Round(time.Millisecond).String()}
	for _, n := range []uint64{u.Memory, u.Connections, u.BytesSent, u.BytesReceived, u.Retransmits} {
		out = append(out, fmt.Sprint(n))
	}
	out = append(out, rtt)
	for _, n := range []uint64{u.SendQueue, u.ReceiveQueue, u.Dropped, u.Refused} {
		out = append(out, fmt.Sprint(n))
	}
	return out
}

// zeroless gives a number as text, none for 0.
func zeroless(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprint(n)
}

func settingNames(list []stack.Setting) string {
	names := make([]string, len(list))
	for i, s := range list {
		names[i] = string(s)
	}
	return strings.Join(names, ",")
}

func newStackApplyCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "apply FILE...",
		Short: "Put stack profiles in force: all of the files, or nothing",
		Long: `Reads stack profiles from files, - for standard input, and puts them in force in one step; those of the same name are replaced,
others stay. It returns when the nodes whose agents were asked have told their endpoints' stacks. A file that is not understood as a
whole is refused, and nothing is changed. What a node cannot serve is no error here: it has what the profile's fallback says, and
heddle stack names it.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			files, err := readFiles(args, cmd.InOrStdin(), "FILE")
			if err != nil {
				return err
			}
			profiles, err := document.ParseStacks(files...)
			if err != nil {
				return err
			}
			return editStacks(cmd, f, api.StackEdit{Profiles: profiles})
		},
	}
	f.register(cmd)
	return cmd
}

// editStacks has the first agent make an edit that can be repeated, and waits until the others have
// it, too.
func editStacks(cmd *cobra.Command, f agentFlags, edit api.StackEdit) error {
	err := applyEdit(cmd, f, func(ctx context.Context, c *api.Client) ([]api.PolicyOutcome, error) {
		return c.EditStacks(ctx, edit)
	})
	if err != nil {
		return err
	}
	return warnOfFaults(cmd, f)
}

// warnOfFaults names on standard error what the nodes cannot serve.
func warnOfFaults(cmd *cobra.Command, f agentFlags) error {
	from, err := f.find()
	if err != nil {
		return err
	}
	list, err := ask(cmd.Context(), from, askStacks)
	for _, n := range list {
		for _, e := range n.Endpoints {
			if e.Fault != "" {
				fmt.Fprintf(cmd.ErrOrStderr(), "node %s: endpoint %s has %s: profile %s: %s\n", n.Node, e.Endpoint, cmp.Or(string(e.Stack), "no TCP"), e.Profile, e.Fault)
			}
		}
		for _, c := range n.Congestion {
			if c.Error != "" {
				fmt.Fprintf(cmd.ErrOrStderr(), "node %s: congestion control %s: %s\n", n.Node, c.Name, c.Error)
			}
		}
	}
	return err
}

func newStackDeleteCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "delete NAME...",
		Short: "Delete stack profiles: all that are named, or none",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return deleteStacks(cmd, f, api.StackEdit{Delete: args})
		},
	}
	f.register(cmd)
	return cmd
}

// deleteStacks has the first agent delete, and waits until no agent has any of it.
func deleteStacks(cmd *cobra.Command, f agentFlags, edit api.StackEdit) error {
	return deleteEdit(cmd, f, "has", func(ctx context.Context, c *api.Client) ([]api.PolicyOutcome, error) {
		return c.EditStacks(ctx, edit)
	}, func(ctx context.Context, c *api.Client) (bool, error) {
		st, err := c.Stacks(ctx)
		return !slices.ContainsFunc(st.Profiles, func(p *stack.Profile) bool { return slices.Contains(edit.Delete, p.Name) }) &&
			!slices.ContainsFunc(st.Congestion, func(o api.CongestionControl) bool { return slices.Contains(edit.DeleteObjects, o.Name) }), err
	})
}

func newStackShowCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "show NAME",
		Short: "Print one stack profile as a document that apply takes",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			st, err := firstAgent(cmd.Context(), f, askStacks)
			if err != nil {
				return err
			}
			for _, p := range st.Profiles {
				if p.Name == args[0] {
					return printJSON(cmd.OutOrStdout(), struct {
						APIVersion string `json:"apiVersion"`
						Kind       string `json:"kind"`
						*stack.Profile
					}{"heddle.dev/v1", "StackProfile", p})
				}
			}
			return fmt.Errorf("no stack profile %s: `heddle stack` shows those there are", args[0])
		},
	}
	f.register(cmd)
	return cmd
}

func newStackLoadCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "load FILE.bpf.o...",
		Short: "Bring congestion controls of your own to every node's kernel",
		Long: `Each file is a BPF object with a struct_ops of type tcp_congestion_ops, whose member name is what profiles call it. The asked
node's kernel verifies it first; what it refuses is not stored, and its verifier's last lines are told. Nodes register it as long as a
profile names it. One of the same name is replaced: new connections have the new one.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, name := range args { // one at a time: they are large
				elf, err := readObject(name)
				if err != nil {
					return err
				}
				if err := editStacks(cmd, f, api.StackEdit{Objects: [][]byte{elf}}); err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
			}
			return nil
		},
	}
	f.register(cmd)
	return cmd
}

// readObject reads a BPF object of at most stack.MaxObject bytes.
func readObject(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	elf, err := io.ReadAll(io.LimitReader(f, stack.MaxObject+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if len(elf) > stack.MaxObject {
		return nil, fmt.Errorf("%s: more than %d bytes: strip it with llvm-strip -g", name, stack.MaxObject)
	}
	return elf, nil
}

func newStackUnloadCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "unload NAME...",
		Short: "Take congestion controls of your own from every node's kernel",
		Long:  "A congestion control that a profile names is not unloaded. Connections that still have one go on with it.",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return deleteStacks(cmd, f, api.StackEdit{DeleteObjects: args})
		},
	}
	f.register(cmd)
	return cmd
}
