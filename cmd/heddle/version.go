package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/doctor"
	"heddle.dev/heddle/internal/version"
)

// build is what `heddle version` tells of this program, its machine and agents.
type build struct {
	Version  string `json:"version"`
	Go       string `json:"go"`
	Platform string `json:"platform"` // OS/ARCHITECTURE, as Go names them
	// Least is the oldest mainline kernel on which an agent runs.
	Least  string         `json:"least_kernel"`
	Kernel string         `json:"kernel"` // this one; empty: /proc does not say
	Agents []agentVersion `json:"agents"` // those that answer
	// NoAgent is why one here does not.
	NoAgent string `json:"no_agent,omitempty"`
}

// agentVersion is what an agent was built from: after an upgrade of the package it is the earlier
// version until it is restarted.
type agentVersion struct {
	Node    string `json:"node"`
	Version string `json:"version"`
}

func newVersionCmd() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show what build this is, which kernels it needs, and what agents run",
		Long: `Shows the version of this program and of the agents that answer, which differ between an upgrade and the agents' restart,
and the oldest kernel on which an agent may run. What this kernel lacks is told by heddle doctor. That no agent answers is no error.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			b := build{
				Version: version.String(), Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
				Least: doctor.LeastKernel(), Kernel: runningKernel(), Agents: []agentVersion{},
			}
			err := b.ask(cmd.Context(), f)
			if err != nil && (agentFlags{output: f.output}) == f { // nobody has named an agent
				b.NoAgent, err = err.Error(), nil
			}
			if f.output == jsonOutput {
				return errors.Join(printJSON(cmd.OutOrStdout(), b), err)
			}
			return errors.Join(printBuild(cmd.OutOrStdout(), b), err)
		},
	}
	f.registerReading(cmd)
	return cmd
}

// ask adds the agents that the flags mean.
func (b *build) ask(ctx context.Context, f agentFlags) error {
	from, err := f.findAll(ctx)
	if err != nil {
		return err
	}
	list, err := ask(ctx, from, func(ctx context.Context, c *api.Client) (api.Status, error) { return c.Status(ctx) })
	for _, st := range list {
		b.Agents = append(b.Agents, agentVersion{st.Node.Name, st.Version})
	}
	return err
}

// runningKernel is this machine's, as `uname -r` has it.
func runningKernel() string {
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(release))
}

func printBuild(out io.Writer, b build) error {
	t := newTable()
	t.row("heddle", fmt.Sprintf("%s, %s, %s", b.Version, b.Go, b.Platform))
	t.row("kernel", fmt.Sprintf("%s; an agent needs %s or later, or what `heddle doctor` probes for brought to an earlier one", b.Kernel, b.Least))
	for _, a := range b.Agents {
		text := a.Version
		if a.Version != b.Version {
			text += ": another build; `systemctl restart heddled` starts the one that is installed"
		}
		t.row("agent of "+a.Node, text)
	}
	if b.NoAgent != "" {
		t.row("agent", b.NoAgent)
	}
	return t.writeTo(out)
}
