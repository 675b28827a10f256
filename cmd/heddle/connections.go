package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// nodeConnection is a connection with the node it is a socket of: the same two ends are listed by
// both nodes of a lab.
type nodeConnection struct {
	Node string `json:"node"`
	model.Connection
}

// connectionFlags narrow the list of connections.
type connectionFlags struct {
	agentFlags
	container string
	filter    api.ConnectionFilter
	listening bool
	states    []string
}

func newConnectionsCmd() *cobra.Command {
	var f connectionFlags
	cmd := &cobra.Command{
		Use:   "connections",
		Short: "List the live TCP connections of a node's containers",
		Long: `Lists the live TCP connections of a node's containers: the addresses their programs see, those the node's
kernel has, the path taken, why it was not the direct one, and the bytes carried.

With --container: what ss -tn would show in that container if its sockets were in its own namespace; with
--listening, what ss -tln would, with --all what ss -tan. Sockets that are only bound and connections in TIME_WAIT are not listed.
With --output json: a list of connections.`,
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			from, err := f.findAll(cmd.Context())
			if err != nil {
				return err
			}
			list, err := f.list(cmd.Context(), from)
			return printAnswers(cmd, f.output, list, err, func(out io.Writer, list []nodeConnection) error {
				if f.container != "" {
					return printContainerConnections(out, list)
				}
				return printConnections(out, list, from.several)
			})
		},
	}
	f.registerReading(cmd)
	flags := cmd.Flags()
	flags.StringVar(&f.container, "container", "", onlyContainer+"; shown as the container would see them")
	flags.StringVar(&f.filter.Endpoint, "endpoint", "", "only those of the endpoint of this name")
	flags.BoolVarP(&f.filter.Listeners, "all", "a", false, "list listening sockets beside connections")
	flags.BoolVarP(&f.listening, "listening", "l", false, "list listening sockets alone")
	flags.BoolVar(&f.filter.Listeners, "listeners", false, "")
	flags.BoolVar(&f.listening, "listen", false, "")
	deprecate(flags, "listeners", "all")
	deprecate(flags, "listen", "listening")
	flags.StringSliceVar(&f.states, "state", nil, "only those in these states: established, close-wait, ...")
	return cmd
}

// deprecate hides a flag's old name, which is there for one release, and has it say the new one.
func deprecate(flags *pflag.FlagSet, old, now string) {
	if err := flags.MarkDeprecated(old, "use --"+now); err != nil {
		panic(err)
	}
}

// list asks for the connections that the flags mean.
func (f connectionFlags) list(ctx context.Context, from agents) ([]nodeConnection, error) {
	if f.container != "" && f.filter.Endpoint != "" {
		return nil, errors.New("--container, --endpoint: they mean the same; leave one out")
	}
	states, err := parseStates(f.states)
	if err != nil {
		return nil, err
	}
	filter := f.filter
	if f.container != "" {
		c, err := findContainer(ctx, from, f.container)
		if err != nil {
			return nil, err
		}
		from.clients, filter.Endpoint = []*api.Client{c.agent}, c.endpoint.Name
	}
	filter.Listeners = filter.Listeners || f.listening || states["LISTEN"]
	list, err := askConnections(ctx, from, filter)
	return slices.DeleteFunc(list, func(c nodeConnection) bool {
		return len(states) > 0 && !states[c.State] || f.listening && c.Path != model.PathListen
	}), err
}

// stateNames are those of model.Connection.State.
var stateNames = []string{"ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "CLOSE_WAIT", "LAST_ACK", "LISTEN", "CLOSING"}

// parseStates reads the names of states as the kernel, ss and netstat write them: FIN_WAIT1,
// fin-wait-1, fin_wait1.
func parseStates(list []string) (map[string]bool, error) {
	plain := func(s string) string { return strings.ToUpper(strings.NewReplacer("-", "", "_", "").Replace(s)) }
	out := make(map[string]bool)
	for _, s := range list {
		i := slices.IndexFunc(stateNames, func(name string) bool { return plain(name) == plain(s) })
		if i < 0 {
			return nil, fmt.Errorf("--state %s: want one of %s", s, strings.ToLower(strings.Join(stateNames, ", ")))
		}
		out[stateNames[i]] = true
	}
	return out, nil
}

// container is an endpoint with the agent of its node.
type container struct {
	agent    *api.Client
	endpoint model.Endpoint
}

// onlyContainer is the usage of the flags whose value findContainer takes.
const onlyContainer = "only those of this container: its endpoint's name, address or id"

// findContainer finds the endpoint that what names: by its name, one of its addresses, or its id.
func findContainer(ctx context.Context, from agents, what string) (container, error) {
	lists, err := ask(ctx, from, func(ctx context.Context, c *api.Client) ([]container, error) {
		endpoints, err := c.Endpoints(ctx)
		list := make([]container, len(endpoints))
		for i, e := range endpoints {
			list[i] = container{c, e}
		}
		return list, err
	})
	// An agent that does not answer matters only if no other has the container.
	addr, _ := netip.ParseAddr(what)
	id, _ := strconv.ParseUint(what, 10, 32)
	byName := func(e model.Endpoint) bool { return e.Name == what }
	byAddr := func(e model.Endpoint) bool { return slices.Contains(e.Addrs, addr) }
	byID := func(e model.Endpoint) bool { return id != 0 && uint64(e.ID) == id }
	for _, matches := range []func(model.Endpoint) bool{byName, byAddr, byID} {
		var found []container
		for _, c := range slices.Concat(lists...) {
			if matches(c.endpoint) {
				found = append(found, c)
			}
		}
		if len(found) > 1 {
			return container{}, fmt.Errorf("%s: several nodes have it; choose one with --node", what)
		}
		if len(found) == 1 {
			return found[0], nil
		}
	}
	if err != nil {
		return container{}, err
	}
	return container{}, fmt.Errorf("%s: %w: `heddle endpoints` lists them", what, api.ErrNotFound)
}

// askConnections lists the connections of all agents. An endpoint lives on one node of a lab, so
// there it is an error only if no node knows it.
func askConnections(ctx context.Context, from agents, filter api.ConnectionFilter) ([]nodeConnection, error) {
	type answer struct {
		connections []nodeConnection
		unknown     error
	}
	answers, err := ask(ctx, from, func(ctx context.Context, c *api.Client) (answer, error) {
		list, err := c.Connections(ctx, filter)
		if filter.Endpoint != "" && errors.Is(err, api.ErrNotFound) {
			return answer{unknown: fmt.Errorf("--endpoint %s: %w", filter.Endpoint, err)}, nil
		}
		if err != nil {
			return answer{}, err
		}
		st, err := c.Status(ctx)
		if err != nil {
			return answer{}, err
		}
		var a answer
		for _, conn := range list {
			a.connections = append(a.connections, nodeConnection{st.Node.Name, conn})
		}
		return a, nil
	})
	var list []nodeConnection
	var unknown error
	known := false
	for _, a := range answers {
		list = append(list, a.connections...)
		known = known || a.unknown == nil
		unknown = cmp.Or(unknown, a.unknown)
	}
	if !known && err == nil {
		err = unknown
	}
	slices.SortFunc(list, func(a, b nodeConnection) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Name, b.Name), a.Local.Compare(b.Local),
			a.Remote.Compare(b.Remote), cmp.Compare(a.Cookie, b.Cookie))
	})
	return list, err
}
