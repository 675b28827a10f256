package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/policy/document"
)

func newPolicyCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Say who may connect to whom",
		Long: `Policies are kept in the network's store and enforced by every node. Files hold Heddle's documents or Kubernetes'
NetworkPolicy and Namespace objects, in YAML or JSON: see docs/howto/policy.md.`,
	}
	cmd.AddCommand(newPolicyApplyCmd(), newPolicyCheckCmd(), newPolicyListCmd(), newPolicyGetCmd(), newPolicyDeleteCmd(), newPolicyExplainCmd())
	return cmd
}

// readPolicies reads files, "-" for standard input, all or none.
func readPolicies(names []string, stdin io.Reader) (document.Set, error) {
	files, err := readFiles(names, stdin, "-f FILE")
	if err != nil {
		return document.Set{}, err
	}
	return document.Parse(files...)
}

func newPolicyApplyCmd() *cobra.Command {
	var (
		f     agentFlags
		files []string
	)
	cmd := &cobra.Command{
		Use:   "apply -f FILE...",
		Short: "Put policies in force: all of the files, or nothing",
		Long: `Reads policies and namespaces from files and puts them in force in one step; those of the same name are replaced, others
stay. Doing it again changes nothing. It returns when the nodes whose agents were asked enforce them, live connections
included. A file that is not understood as a whole is refused, and nothing is changed.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := readPolicies(files, cmd.InOrStdin())
			if err != nil {
				return err
			}
			edit := api.PolicyEdit{Policies: set.Policies, Namespaces: set.Namespaces}
			return applyEdit(cmd, f, func(ctx context.Context, c *api.Client) ([]api.PolicyOutcome, error) {
				return c.EditPolicies(ctx, edit)
			})
		},
	}
	f.register(cmd)
	cmd.Flags().StringArrayVarP(&files, "filename", "f", nil, "file with policies, - for standard input; may be given several times")
	return cmd
}

func newPolicyCheckCmd() *cobra.Command {
	var files []string
	cmd := &cobra.Command{
		Use:   "check -f FILE...",
		Short: "Read policies and say what is wrong with them, without applying them",
		Long:  "Reads files as apply does. Needs no agent.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set, err := readPolicies(files, cmd.InOrStdin())
			if err != nil {
				return err
			}
			rules := 0
			for _, p := range set.Policies {
				rules += p.RuleCount()
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%d policies with %d rules, %d namespaces: in order\n", len(set.Policies), rules, len(set.Namespaces))
			return err
		},
	}
	cmd.Flags().StringArrayVarP(&files, "filename", "f", nil, "file with policies, - for standard input; may be given several times")
	return cmd
}

func newPolicyListCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the network's policies",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			docs, err := firstAgent(cmd.Context(), f, askPolicies)
			if err != nil {
				return err
			}
			if f.output == jsonOutput {
				return printJSON(cmd.OutOrStdout(), docs)
			}
			t := newTable("POLICY", "SOURCE", "SUBJECT", "INGRESS", "EGRESS", "RULES")
			for _, p := range docs.Policies {
				t.row(p.Name, p.Source, subjectText(p.Subject), directionText(p.Ingress), directionText(p.Egress), fmt.Sprint(p.RuleCount()))
			}
			return t.writeTo(cmd.OutOrStdout())
		},
	}
	f.register(cmd)
	return cmd
}

func askPolicies(ctx context.Context, c *api.Client) (api.PolicyDocuments, error) {
	return c.Policies(ctx)
}

func directionText(d *policy.Direction) string {
	switch {
	case d == nil:
		return ""
	case d.Default == policy.DefaultDeny && d.Deny == policy.Drop:
		return "default deny (drop)"
	case d.Default != policy.DefaultNone:
		return "default " + string(d.Default)
	}
	return "rules only"
}

func subjectText(s policy.Subject) string {
	parts := requirementsText("", s.Requirements)
	if n := s.Namespace; n != nil {
		if n.Name != "" {
			parts = append(parts, "namespace="+n.Name)
		}
		parts = append(parts, requirementsText("namespace ", n.Requirements)...)
	}
	for _, p := range s.Prefixes {
		parts = append(parts, p.String())
	}
	if len(parts) == 0 {
		return "all"
	}
	return strings.Join(parts, ",")
}

func requirementsText(of string, r policy.Requirements) (parts []string) {
	for k, v := range r.Labels {
		parts = append(parts, of+k+"="+v)
	}
	slices.Sort(parts)
	for _, e := range r.Expressions {
		parts = append(parts, strings.TrimSpace(fmt.Sprintf("%s%s %s %s", of, e.Key, e.Operator, strings.Join(e.Values, "|"))))
	}
	return parts
}

func newPolicyGetCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "get NAME",
		Short: "Print one policy as a document that apply takes",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			docs, err := firstAgent(cmd.Context(), f, askPolicies)
			if err != nil {
				return err
			}
			for _, p := range docs.Policies {
				if p.Name == args[0] {
					p.Source = "" // apply makes it an operator's
					return printJSON(cmd.OutOrStdout(), struct {
						APIVersion string `json:"apiVersion"`
						Kind       string `json:"kind"`
						*policy.Policy
					}{"heddle.dev/v1", "Policy", p})
				}
			}
			return fmt.Errorf("no policy %s: `heddle policy list` shows those there are", args[0])
		},
	}
	f.register(cmd)
	return cmd
}

func newPolicyDeleteCmd() *cobra.Command {
	var (
		f          agentFlags
		namespaces []string
		all        bool
	)
	cmd := &cobra.Command{
		Use:   "delete NAME...",
		Short: "Delete policies: all that are named, or none",
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args)+len(namespaces) > 0) {
				return errors.New("name policies to delete, or give --all")
			}
			edit := api.PolicyEdit{Delete: args, DeleteNamespaces: namespaces}
			if all {
				docs, err := firstAgent(cmd.Context(), f, askPolicies)
				if err != nil {
					return err
				}
				for _, p := range docs.Policies {
					edit.Delete = append(edit.Delete, p.Name)
				}
				for _, n := range docs.Namespaces {
					edit.DeleteNamespaces = append(edit.DeleteNamespaces, n.Name)
				}
				if len(edit.Delete)+len(edit.DeleteNamespaces) == 0 {
					return nil
				}
			}
			return deleteEdit(cmd, f, "enforces", func(ctx context.Context, c *api.Client) ([]api.PolicyOutcome, error) {
				return c.EditPolicies(ctx, edit)
			}, func(ctx context.Context, c *api.Client) (bool, error) {
				docs, err := c.Policies(ctx)
				return !slices.ContainsFunc(docs.Policies, func(p *policy.Policy) bool { return slices.Contains(edit.Delete, p.Name) }), err
			})
		},
	}
	f.register(cmd)
	cmd.Flags().StringArrayVar(&namespaces, "namespace", nil, "forget the labels of this namespace; may be given several times")
	cmd.Flags().BoolVar(&all, "all", false, "delete every policy, and the labels of every namespace")
	return cmd
}

func newPolicyExplainCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "explain FROM TO PORT[/PROTOCOL]",
		Short: "Say what the rules make of a connection, and which rule it is",
		Long: `Names the verdict on a connection, and the rule of either end that leads to it. FROM and TO are names of endpoints, of
any node, or addresses. PORT is the destination's, with /tcp or /udp; or icmp.`,
		Example: "  heddle policy explain n1/c1 n2/c1 80\n  heddle policy explain 192.0.2.7 n1/c1 53/udp",
		Args:    cobra.ExactArgs(3),
		RunE: func(cmd *cobra.Command, args []string) error {
			ports, err := api.ParseExplainPort(args[2])
			if err != nil {
				return err
			}
			x, err := firstAgent(cmd.Context(), f, func(ctx context.Context, c *api.Client) (api.Explanation, error) {
				return c.ExplainPolicy(ctx, api.ExplainRequest{From: args[0], To: args[1], Ports: ports})
			})
			if err != nil {
				return err
			}
			if f.output == jsonOutput {
				return printJSON(cmd.OutOrStdout(), x)
			}
			return printExplanation(cmd.OutOrStdout(), x)
		},
	}
	f.register(cmd)
	return cmd
}

func printExplanation(out io.Writer, x api.Explanation) error {
	what := x.Protocol
	if x.Port != 0 {
		what = fmt.Sprintf("%s/%d", x.Protocol, x.Port)
	}
	t := newTable()
	t.row("verdict", x.Verdict)
	t.row("connection", fmt.Sprintf("%s to %s, %s", x.From, x.To, what))
	if x.Itself {
		t.row("rules", "none: both ends are endpoint "+x.Egress.Endpoint)
		return t.writeTo(out)
	}
	t.row("egress", x.Egress.Text)
	t.row("ingress", x.Ingress.Text)
	return t.writeTo(out)
}

// newEndpointLabelCmd changes labels.
func newEndpointLabelCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "label NAME KEY=VALUE... KEY-...",
		Short: "Set labels of a live endpoint, or remove them",
		Long:  "Sets labels (KEY=VALUE) and removes others (KEY-). When it returns, the endpoint's node enforces what policies make of them.",
		Args:  cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := parseLabels(args[1:])
			if err != nil {
				return err
			}
			return oneAgent(cmd.Context(), f, func(ctx context.Context, c *api.Client) error {
				e, err := c.LabelEndpoint(ctx, args[0], req)
				if err != nil {
					return err
				}
				if f.output == jsonOutput {
					return printJSON(cmd.OutOrStdout(), e)
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: labels %s\n", e.Name, labelsText(e.Labels))
				return err
			})
		},
	}
	f.register(cmd)
	return cmd
}

func parseLabels(args []string) (req api.LabelRequest, err error) {
	req.Set = make(map[string]string)
	for _, arg := range args {
		k, v, isSet := strings.Cut(arg, "=")
		switch {
		case isSet && k != "":
			if _, again := req.Set[k]; again {
				return req, fmt.Errorf("label %s is given twice", k)
			}
			req.Set[k] = v
		case !isSet && len(arg) > 1 && strings.HasSuffix(arg, "-"):
			req.Remove = append(req.Remove, strings.TrimSuffix(arg, "-"))
		default:
			return req, fmt.Errorf("label %q: write KEY=VALUE to set it, KEY- to remove it", arg)
		}
	}
	return req, nil
}
