package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

func newLimitCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "limit",
		Short: "Cap, mark and prioritise what endpoints send and receive",
		Long: "Cap, mark and prioritise what endpoints send and receive. Changes hold for live connections at once. " +
			"What stays within a container is not limited.",
	}
	cmd.AddCommand(newLimitSetCmd(), newLimitClearCmd(), newLimitListCmd())
	return cmd
}

// limitFlag is a flag of `heddle limit set` and the field that it sets.
type limitFlag struct {
	name, usage string
	set         func(l *model.Limits, value string) error
}

// rateFlag is one whose field is a rate.
func rateFlag(name, usage string, field func(*model.Limits) *model.Rate) limitFlag {
	return limitFlag{name, usage + `, such as 100mbit; "none" lifts it`, func(l *model.Limits, value string) error {
		r, err := model.ParseRate(value)
		*field(l) = r
		return err
	}}
}

// quotaFlag is one whose field is a quota of RDMA.
func quotaFlag(name, usage string, field func(*model.VerbsLimits) *uint32) limitFlag {
	return limitFlag{name, "how many: " + usage + `; "none" leaves it to the node (heddled --` + name + ")", func(l *model.Limits, value string) error {
		if value == "none" {
			value = "0"
		}
		n, err := strconv.ParseUint(value, 10, 32)
		if err != nil {
			return fmt.Errorf("%.40q: want a number from 1 to %d, or none", value, uint32(math.MaxUint32))
		}
		*field(&l.Verbs) = uint32(n)
		return nil
	}}
}

var limitFlags = []limitFlag{
	rateFlag("egress", "cap of all that the endpoint sends", func(l *model.Limits) *model.Rate { return &l.Egress }),
	rateFlag("ingress", "cap of all that the endpoint receives", func(l *model.Limits) *model.Rate { return &l.Ingress }),
	rateFlag("connection-egress", "cap of what each TCP connection of the endpoint sends", func(l *model.Limits) *model.Rate { return &l.ConnectionEgress }),
	rateFlag("connection-ingress", "cap of what each TCP connection of the endpoint receives", func(l *model.Limits) *model.Rate { return &l.ConnectionIngress }),
	{"priority", `class of what the endpoint sends: high, normal or low; "none" leaves it to its programs`, setPriority},
	quotaFlag("verbs-qps", "queue pairs of the endpoint's RDMA device", func(v *model.VerbsLimits) *uint32 { return &v.QPs }),
	quotaFlag("verbs-cqs", "completion queues of the endpoint's RDMA device", func(v *model.VerbsLimits) *uint32 { return &v.CQs }),
	quotaFlag("verbs-mrs", "memory regions of the endpoint's RDMA device", func(v *model.VerbsLimits) *uint32 { return &v.MRs }),
	quotaFlag("verbs-memory", "MiB that queues of the endpoint's RDMA device share with the router", func(v *model.VerbsLimits) *uint32 { return &v.MemoryMiB }),
	quotaFlag("verbs-messages", "send requests a second of the endpoint's RDMA device, all queue pairs together", func(v *model.VerbsLimits) *uint32 { return &v.Messages }),
	{"dscp", `differentiated services code point of what the endpoint sends, 0 to 63; "none" leaves it to its programs`, setDSCP},
}

func setPriority(l *model.Limits, value string) error {
	if value == "none" {
		value = string(model.PriorityOwn)
	}
	l.Priority = model.Priority(value)
	return nil // Validate knows
}

func setDSCP(l *model.Limits, value string) error {
	if value == "none" {
		l.DSCP = nil
		return nil
	}
	n, err := strconv.ParseUint(value, 10, 8)
	if err != nil || n > model.MaxDSCP {
		return fmt.Errorf("%.40q: want a number from 0 to %d, or none", value, model.MaxDSCP)
	}
	dscp := uint8(n)
	l.DSCP = &dscp
	return nil
}

func newLimitSetCmd() *cobra.Command {
	var f agentFlags
	values := make(map[string]*string)
	cmd := &cobra.Command{
		Use:   "set NAME",
		Short: "Set limits of an endpoint; those not named stay as they are",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return changeLimits(cmd, f, args[0], func(l *model.Limits) error {
				var names []string
				given := false
				for _, flag := range limitFlags {
					names = append(names, "--"+flag.name)
					if !cmd.Flags().Changed(flag.name) {
						continue
					}
					given = true
					if err := flag.set(l, *values[flag.name]); err != nil {
						return fmt.Errorf("--%s: %w", flag.name, err)
					}
				}
				if !given {
					return fmt.Errorf("nothing to set: give at least one of %s", strings.Join(names, ", "))
				}
				return nil
			})
		},
	}
	f.register(cmd)
	for _, flag := range limitFlags {
		values[flag.name] = cmd.Flags().String(flag.name, "", flag.usage)
	}
	return cmd
}

func newLimitClearCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "clear NAME",
		Short: "Lift all limits of an endpoint",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return changeLimits(cmd, f, args[0], func(l *model.Limits) error {
				*l = model.Limits{}
				return nil
			})
		},
	}
	f.register(cmd)
	return cmd
}

// changeLimits changes the limits of the endpoint called name, on whichever of the agents has it,
// and prints them.
func changeLimits(cmd *cobra.Command, f agentFlags, name string, change func(*model.Limits) error) error {
	from, err := f.find()
	if err != nil {
		return err
	}
	changed, err := ask(cmd.Context(), from, func(ctx context.Context, c *api.Client) (done []model.LimitUse, err error) {
		err = api.UntilUnchanged(func() (err error) {
			done, err = changeLimitsOnce(ctx, c, name, change)
			return err
		})
		return done, err
	})
	if err != nil {
		return err
	}
	all := slices.Concat(changed...)
	if len(all) == 0 {
		return fmt.Errorf("endpoint %q: %w; `heddle endpoints` lists those there are", name, api.ErrNotFound)
	}
	return printAnswers(cmd, f.output, all, nil, printLimits)
}

// changeLimitsOnce changes what an agent has for the endpoint, if it has it.
func changeLimitsOnce(ctx context.Context, c *api.Client, name string, change func(*model.Limits) error) ([]model.LimitUse, error) {
	es, err := c.Endpoints(ctx)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(es, func(e model.Endpoint) bool { return e.Name == name })
	if i < 0 {
		return nil, nil
	}
	var was model.Limits
	if es[i].Limits != nil {
		was = *es[i].Limits
	}
	l := was
	if err := change(&l); err != nil {
		return nil, err
	}
	if _, err = c.SetLimits(ctx, name, api.LimitsChange{Limits: l, Was: &was}); err != nil {
		return nil, err
	}
	return []model.LimitUse{{Endpoint: name, Limits: l}}, nil
}

func newLimitListCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the endpoints that have limits",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			from, err := f.find()
			if err != nil {
				return err
			}
			lists, err := ask(cmd.Context(), from, func(ctx context.Context, c *api.Client) ([]model.LimitUse, error) {
				return c.LimitUse(ctx)
			})
			return printAnswers(cmd, f.output, slices.Concat(lists...), err, printLimits)
		},
	}
	f.register(cmd)
	return cmd
}

// printLimits prints a row for each endpoint.
func printLimits(out io.Writer, list []model.LimitUse) error {
	t := newTable("ENDPOINT", "EGRESS", "INGRESS", "CONNECTION-EGRESS", "CONNECTION-INGRESS", "PRIORITY", "DSCP", "DROPPED-OUT", "DROPPED-IN", "VERBS")
	for _, e := range list {
		l, dscp := e.Limits, ""
		if l.DSCP != nil {
			dscp = strconv.Itoa(int(*l.DSCP))
		}
		t.row(e.Endpoint, rateCell(l.Egress), rateCell(l.Ingress), rateCell(l.ConnectionEgress), rateCell(l.ConnectionIngress),
			string(l.Priority), dscp, strconv.FormatUint(e.Egress.Dropped, 10), strconv.FormatUint(e.Ingress.Dropped, 10), verbsLimitsText(l.Verbs))
	}
	return t.writeTo(out)
}

func rateCell(r model.Rate) string {
	if r == 0 {
		return ""
	}
	return r.String()
}
