package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// newEndpointAddCmd attaches a container's network namespace to the overlay.
func newEndpointAddCmd() *cobra.Command {
	var (
		f    agentFlags
		req  api.EndpointRequest
		addr string

		labels, ports []string
	)
	cmd := &cobra.Command{
		Use:   "add NAME --netns PATH",
		Short: "Attach a network namespace to the overlay as an endpoint",
		Long: "Attach a network namespace to the overlay as an endpoint. Containers started in it through " +
			"heddle-runtime with the annotation io.heddle.endpoint=NAME get their TCP sockets from the node.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			req.Name = args[0]
			if addr != "" {
				if req.Addr, err = netip.ParseAddr(addr); err != nil {
					return fmt.Errorf("--addr %q: want an address of the node's prefix", addr)
				}
			}
			given, err := parseLabels(labels)
			if err != nil || len(given.Remove) > 0 {
				return errors.Join(err, errors.New("--label: write KEY=VALUE"))
			}
			req.Labels = given.Set
			if req.Ports, err = parsePorts(ports); err != nil {
				return fmt.Errorf("--publish: %w", err)
			}
			return oneAgent(cmd.Context(), f, func(ctx context.Context, c *api.Client) error {
				e, err := c.CreateEndpoint(ctx, req)
				if err != nil {
					return err
				}
				if f.output == jsonOutput {
					return printJSON(cmd.OutOrStdout(), e)
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: id %d, address %v\n", e.Name, e.ID, e.Addrs)
				return err
			})
		},
	}
	f.register(cmd)
	cmd.Flags().StringVar(&req.NetnsPath, "netns", "", "path of the container's network namespace (required)")
	cmd.Flags().BoolVar(&req.Intercepted, "intercepted", true, "the endpoint's containers' TCP sockets are made in the node's namespace")
	cmd.Flags().BoolVar(&req.Verbs.Wanted, "verbs", false, "the endpoint's containers with the annotation io.heddle.verbs=true have an RDMA device")
	cmd.Flags().Uint32Var(&req.Verbs.SpinMicros, "verbs-spin-us", 0, "microseconds for which programs with the RDMA device look for work before they sleep; 0: as many as the node says (docs/howto/rdma-library.md)")
	cmd.Flags().StringArrayVar(&labels, "label", nil, "label KEY=VALUE, for policy; may be given several times")
	cmd.Flags().StringVar(&addr, "addr", "", "overlay address (default: a free one)")
	cmd.Flags().StringArrayVarP(&ports, "publish", "p", nil, "port of the node that leads to the endpoint: [IP:]HOSTPORT:PORT[/tcp|/udp]; may be given several times")
	return cmd
}

// parsePorts reads what is to be published.
func parsePorts(texts []string) (out []model.PortRequest, err error) {
	for _, text := range texts {
		p, err := model.ParsePort(text)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

// newEndpointPublishCmd has ports of the node lead to an endpoint.
func newEndpointPublishCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "publish NAME [[IP:]HOSTPORT:PORT[/tcp|/udp]]...",
		Short: "Have ports of the node lead to an endpoint, in place of those that did",
		Long: "Have ports of the node lead to an endpoint, in place of those that did; without ports, none does. " +
			"HOSTPORT may be a range, FIRST-LAST, or be left out: then the agent chooses a free one. Engines do this for -p.",
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ports, err := parsePorts(args[1:])
			if err != nil {
				return err
			}
			return oneAgent(cmd.Context(), f, func(ctx context.Context, c *api.Client) error {
				e, err := c.SetPorts(ctx, args[0], ports)
				if err != nil {
					return err
				}
				if f.output == jsonOutput {
					return printJSON(cmd.OutOrStdout(), e)
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", e.Name, join(e.Ports))
				return err
			})
		},
	}
	f.register(cmd)
	return cmd
}

// newEndpointVerbsCmd gives one an RDMA device, as heddle-runtime does for those that ask for it.
func newEndpointVerbsCmd() *cobra.Command {
	var (
		f   agentFlags
		off bool
		v   = model.VerbsEndpoint{Wanted: true}
	)
	cmd := &cobra.Command{
		Use:   "verbs NAME",
		Short: "Give an endpoint an RDMA device for its containers, or take it away",
		Long: "Give an endpoint an RDMA device for its containers, or take it away. Containers that are started then with the " +
			"annotation io.heddle.verbs=true have it. Taking it away ends the devices that are open.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if off {
				v = model.VerbsEndpoint{}
			}
			return oneAgent(cmd.Context(), f, func(ctx context.Context, c *api.Client) error {
				var e model.Endpoint
				err := api.UntilUnchanged(func() (err error) {
					change := api.VerbsChange{VerbsEndpoint: v}
					if !off && !cmd.Flags().Changed("outside") {
						// Who starts containers does not change it.
						if change.Was, err = verbsOf(ctx, c, args[0]); err != nil {
							return err
						}
						change.Outside = change.Was.Outside
					}
					e, err = c.SetVerbs(ctx, args[0], change)
					return err
				})
				if err == nil && f.output == jsonOutput {
					err = printJSON(cmd.OutOrStdout(), e)
				}
				return err
			})
		},
	}
	f.register(cmd)
	cmd.Flags().Uint32Var(&v.SpinMicros, "spin-us", 0, "microseconds for which programs with the RDMA device look for work before they sleep; 0: as many as the node says (docs/howto/rdma-library.md)")
	cmd.Flags().BoolVar(&off, "off", false, "take the RDMA device away")
	cmd.Flags().BoolVar(&v.Outside, "outside", false, "the endpoint's programs may have RDMA peers without Heddle, by the node's card (heddled --rdma-outside); as it was, if this is not given")
	cmd.MarkFlagsMutuallyExclusive("off", "spin-us")
	cmd.MarkFlagsMutuallyExclusive("off", "outside")
	return cmd
}

// verbsOf gives what an endpoint has of the verbs plane; nothing of one that is not there.
func verbsOf(ctx context.Context, c *api.Client, name string) (*model.VerbsEndpoint, error) {
	es, err := c.Endpoints(ctx)
	if err != nil {
		return nil, err
	}
	for _, e := range es {
		if e.Name == name {
			return &e.Planes.Verbs.VerbsEndpoint, nil
		}
	}
	return new(model.VerbsEndpoint), nil
}

// newEndpointDeleteCmd detaches one.
func newEndpointDeleteCmd() *cobra.Command {
	var (
		f             agentFlags
		ignoreMissing bool
	)
	cmd := &cobra.Command{
		Use:   "delete NAME",
		Short: "Detach an endpoint and free its address",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return oneAgent(cmd.Context(), f, func(ctx context.Context, c *api.Client) error {
				err := c.DeleteEndpoint(ctx, args[0])
				if ignoreMissing && errors.Is(err, api.ErrNotFound) {
					return nil
				}
				return err
			})
		},
	}
	f.register(cmd)
	cmd.Flags().BoolVar(&ignoreMissing, "ignore-missing", false, "an endpoint that is not there is no error")
	return cmd
}
