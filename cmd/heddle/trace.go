package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
)

// defaultTracePort is the port that is tried if nobody says which.
const defaultTracePort = 80

// errNotConnected is the outcome of a trace that found no connection.
var errNotConnected = errors.New("no connection")

func newTraceCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "trace SOURCE DESTINATION[:PORT]",
		Short: "Say whether a container may connect, and try it",
		Long: `Says what policy makes of a TCP connection, by which rule, and which path it would take and why; then makes one in the source's name, as a program
of it would, with the same policy, limits and path, and says how long that took, which path it went and why, and what
ended it. Nothing is sent by it, and it is closed at once. SOURCE is an intercepted endpoint: its name, address or id, on
a node that is asked. DESTINATION is an endpoint of any node, or an address ([ADDRESS]:PORT of IPv6); PORT is 80 if it is
missing. It exits with 1 if no connection came about.`,
		Example: "  heddle trace n1/c1 n2/c1:8080\n  heddle trace web 192.0.2.7:443",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			try, err := f.prepare(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			tr, err := try(cmd.Context())
			if err != nil {
				return err
			}
			if f.output == jsonOutput {
				err = printJSON(cmd.OutOrStdout(), tr)
			} else {
				err = printTrace(cmd.OutOrStdout(), tr)
			}
			if err == nil && !tr.Connected {
				err = errNotConnected
			}
			return err
		},
	}
	f.register(cmd)
	return cmd
}

// prepare finds who is to try a connection, and gives what tries it.
func (f agentFlags) prepare(ctx context.Context, source, destination string) (func(context.Context) (api.Trace, error), error) {
	to, port, err := parseDestination(destination)
	if err != nil {
		return nil, err
	}
	from, err := f.find()
	if err != nil {
		return nil, err
	}
	found, err := findContainer(ctx, from, source)
	if err != nil {
		return nil, err
	}
	from.clients = []*api.Client{found.agent}
	return func(ctx context.Context) (api.Trace, error) {
		answers, err := ask(ctx, from, func(ctx context.Context, c *api.Client) (api.Trace, error) {
			return c.Trace(ctx, api.TraceRequest{From: found.endpoint.Name, To: to, Port: port})
		})
		if err != nil {
			return api.Trace{}, err
		}
		return answers[0], nil
	}, nil
}

// parseDestination reads "web:80", "web", "10.244.0.2:80", "[fd48::2]:80" or an address.
func parseDestination(s string) (to string, port uint16, err error) {
	if at, err := netip.ParseAddrPort(s); err == nil && at.Port() != 0 {
		return at.Addr().String(), at.Port(), nil
	}
	if a, err := netip.ParseAddr(strings.Trim(s, "[]")); err == nil {
		return a.String(), defaultTracePort, nil
	}
	name, text, withPort := strings.Cut(s, ":")
	if !withPort {
		return s, defaultTracePort, nil
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 || name == "" {
		return "", 0, fmt.Errorf("destination %q: write NAME:PORT, ADDRESS:PORT or [ADDRESS]:PORT, with a port from 1 to 65535", s)
	}
	return name, uint16(n), nil
}

// printTrace prints a trace as its steps.
func printTrace(out io.Writer, tr api.Trace) error {
	t := newTable("STEP", "TOOK", "OUTCOME")
	p := tr.Policy
	for _, step := range tr.Steps {
		outcome := cmp.Or(step.Error, "connected")
		switch step.Name {
		case "policy":
			outcome = fmt.Sprintf("%s: %s to %s, port %d", p.Verdict, p.From, p.To, p.Port)
		case "told":
			continue // how long the node took to tell of it is nothing of the connection's
		}
		t.row(step.Name, shortDuration(step.Took), outcome)
		if step.Name == "policy" && !p.Itself {
			t.row("", "", "egress "+p.Egress.Text)
			t.row("", "", "ingress "+p.Ingress.Text)
		}
		if step.Name == "policy" && tr.Way != nil {
			t.row("way", "", wayText(tr.Way))
		}
	}
	if f := tr.Flow; f != nil {
		path := cmp.Or(string(f.Path), "none")
		if why := whyText(f); why != "" {
			path += ": " + why
		}
		t.row("path", "", path)
		if f.RTT > 0 {
			t.row("round trip", shortDuration(f.RTT), "smoothed")
		}
	}
	return t.writeTo(out)
}

// wayText says which path a connection would take.
func wayText(w *api.Way) string {
	text := w.Why
	if w.Path != "" {
		text = fmt.Sprintf("would go %s: %s", w.Path, text)
	}
	if w.Reason != "" {
		text += " (" + w.Reason + ")"
	}
	if w.Stack != "" {
		text += fmt.Sprintf("; its programs go by the stack %s, this try by the kernel's", w.Stack)
	}
	return text
}
