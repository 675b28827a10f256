package baseline

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"

	"heddle.dev/heddle/internal/bench"
)

// bare is two hosts as they are: no agent, no rules, no connection tracking. Mode host is a node of
// Heddle's, and pays for what the agent put there.
type bare struct{ hosts [2]Host }

// host gives the host that stands for the node of one of the lab's containers.
func (b bare) host(container string) (Host, error) {
	for i, h := range b.hosts {
		if len(container) > 3 && container[:3] == fmt.Sprintf("n%d/", i+1) {
			return h, nil
		}
	}
	return Host{}, fmt.Errorf("mode %s has no container %s", bench.Bare, container)
}

// Exec runs args in a host's network namespace and cgroup; the rest is the machine's.
func (b bare) Exec(ctx context.Context, _ bench.Mode, container string, args ...string) *exec.Cmd {
	h, err := b.host(container)
	if err != nil {
		return &exec.Cmd{Path: container, Err: err}
	}
	words := joined(h.Cgroups, in(h.Netns, args...)...)
	return exec.CommandContext(ctx, words[0], words[1:]...)
}

// IP gives a host's address.
func (b bare) IP(_ context.Context, _ bench.Mode, container string) (netip.Addr, error) {
	h, err := b.host(container)
	return h.Underlay.Addr(), err
}

// describe says how the first host is set up.
func (b bare) describe(ctx context.Context) ([]string, error) {
	at := b.hosts[0]
	return Describe(ctx, []Way{
		{bench.Inter, at.Netns, at.Netns, b.hosts[1].Underlay.Addr()}, {bench.Intra, at.Netns, at.Netns, at.Underlay.Addr()},
	})
}
