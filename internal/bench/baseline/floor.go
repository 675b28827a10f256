package baseline

import (
	"context"
	"net/netip"
	"os/exec"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/netns"
)

// floor is where mode floor runs: servers in mode host, and callers whose socket() is answered with
// sockets of their node's namespace by the load generator itself. Those are started from outside of
// the lab's containers, which may not make network namespaces.
type floor struct{ session.Lab }

// Exec runs args on the container's node.
func (f floor) Exec(ctx context.Context, _ bench.Mode, container string, args ...string) *exec.Cmd {
	i := slices.Index(args, "crr")
	if i < 0 {
		return f.Lab.Exec(ctx, bench.Host, container, args...)
	}
	node, _, _ := strings.Cut(container, "/")
	words := in(netns.Path(f.Name+"-"+node), bench.Command(args[:i], "floor", "--")...)
	words = append(words, args...)
	return exec.CommandContext(ctx, words[0], words[1:]...)
}

// IP gives the address of the container's node.
func (f floor) IP(ctx context.Context, _ bench.Mode, container string) (netip.Addr, error) {
	return f.Lab.IP(ctx, bench.Host, container)
}
