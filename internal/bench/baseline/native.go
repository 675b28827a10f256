package baseline

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/lab"
	"heddle.dev/heddle/internal/netns"
)

// nativeTimeout bounds how long nodes may take to find that they need no tunnel.
const nativeTimeout = 30 * time.Second

// nativeLab is where mode native runs: in containers that are not intercepted, on nodes that send
// without a tunnel.
type nativeLab struct{ session.Lab }

// startNative brings it up, to where packets go without a tunnel.
func startNative(ctx context.Context, s *session.Session) (n nativeLab, down func() error, err error) {
	s.Say("bringing up a second lab, of nodes that send without a tunnel")
	n.Lab, down, err = s.Beside(ctx, "-native", lab.Size{AgentArgs: []string{"--tunnel=auto"}})
	if err != nil {
		return n, nil, err
	}
	if err := n.await(ctx); err != nil {
		return n, nil, errors.Join(err, down())
	}
	return n, down, nil
}

// await sends until both nodes have found each other.
func (n nativeLab) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, nativeTimeout)
	defer cancel()
	client, server := bench.Inter.Ends()
	to, err := n.IP(ctx, bench.Native, server)
	if err != nil {
		return err
	}
	agents, err := n.Agents()
	if err != nil {
		return err
	}
	for {
		// One packet a second, as long as it takes.
		if out, err := n.Exec(ctx, bench.Native, client, "ping", "-c", "1", "-i", "1", to.String()).CombinedOutput(); err != nil {
			return fmt.Errorf("packets without a tunnel: %w: %s", err, out)
		}
		without := 0
		for _, a := range agents {
			st, err := a.Status(ctx)
			if err != nil {
				return err
			}
			if st.Packets.Native > 0 {
				without++
			}
		}
		if without == len(agents) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("nodes send to each other in a tunnel still: %w", ctx.Err())
		case <-time.After(time.Second / 4):
		}
	}
}

// Exec and IP are the lab's for its plain containers.
func (n nativeLab) Exec(ctx context.Context, _ bench.Mode, container string, args ...string) *exec.Cmd {
	return n.Lab.Exec(ctx, bench.Overlay, container, args...)
}

// IP is Exec's other half.
func (n nativeLab) IP(ctx context.Context, _ bench.Mode, container string) (netip.Addr, error) {
	return n.Lab.IP(ctx, bench.Overlay, container)
}

// describe says how it is set up and that what was measured did go without a tunnel: an error if
// not.
func (n nativeLab) describe(ctx context.Context) ([]string, error) {
	agents, err := n.Agents()
	if err != nil {
		return nil, err
	}
	counts := map[string]uint64{}
	for _, a := range agents {
		st, err := a.Status(ctx)
		if err != nil {
			return nil, err
		}
		for _, c := range st.Counters {
			counts[c.Name] += c.Value
		}
	}
	if without, within := counts["redirect_native"], counts["redirect_overlay"]; without < 100*within {
		return nil, fmt.Errorf("mode %s: %d packets in a tunnel, %d without", bench.Native, within, without)
	}
	_, server := bench.Inter.Ends()
	to, err := n.IP(ctx, bench.Native, server)
	if err != nil {
		return nil, err
	}
	node := netns.Path(n.Name + "-n1")
	return Describe(ctx, []Way{{bench.Inter, node + "-c1", node, to}})
}
