package bench

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
)

// Lab is a Place: a lab that is up, driven through the command line that stays stable (`heddle lab`).
type Lab struct {
	Heddle string // path of the heddle program
	Name   string // of the lab; empty for the default one
	// SocketPool makes Up give the containers the preloaded pool of sockets.
	SocketPool bool
}

// command gives `heddle lab VERB` with the lab's name.
func (l Lab) command(ctx context.Context, verb string, args ...string) *exec.Cmd {
	words := []string{"lab", verb}
	if l.Name != "" {
		words = append(words, "--lab", l.Name)
	}
	return exec.CommandContext(ctx, l.Heddle, append(words, args...)...)
}

// Exec runs args by `heddle lab exec`.
func (l Lab) Exec(ctx context.Context, mode Mode, container string, args ...string) *exec.Cmd {
	return l.command(ctx, "exec", append([]string{"--mode", string(mode), container, "--"}, args...)...)
}

// IP asks `heddle lab ip`.
func (l Lab) IP(ctx context.Context, mode Mode, container string) (netip.Addr, error) {
	out, err := l.output(ctx, "ip", "--mode", string(mode), container)
	if err != nil {
		return netip.Addr{}, err
	}
	a, err := netip.ParseAddr(string(bytes.TrimSpace(out)))
	if err != nil {
		return netip.Addr{}, fmt.Errorf("heddle lab ip: %w", err)
	}
	return a, nil
}

// Up brings the lab up with two nodes of two containers; it may be up already. What it prints goes to
// log: a file and not a pipe, because the agents it starts outlive it and could hold a pipe open.
func (l Lab) Up(ctx context.Context, log *os.File) error {
	args := []string{"--nodes", "2", "--containers", "2"}
	if l.SocketPool {
		args = append(args, "--socket-pool")
	}
	cmd := l.command(ctx, "up", args...)
	prepare(cmd)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("heddle lab up: %w", err)
	}
	return nil
}

// Ready reports whether the lab is up with both ends of every scope; the error says what is missing.
func (l Lab) Ready(ctx context.Context) error {
	for _, scope := range Scopes {
		client, server := scope.Ends()
		for _, container := range []string{client, server} {
			if _, err := l.IP(ctx, Heddle, container); err != nil {
				return err
			}
		}
	}
	return nil
}

// Down takes the lab down.
func (l Lab) Down(ctx context.Context) error {
	_, err := l.output(ctx, "down")
	return err
}

// output runs `heddle lab VERB` and gives what it printed, or an error with its complaint.
func (l Lab) output(ctx context.Context, verb string, args ...string) ([]byte, error) {
	out, err := runClient(l.command(ctx, verb, args...))
	if err != nil {
		return nil, fmt.Errorf("heddle lab %s: %w", verb, err)
	}
	return out, nil
}
