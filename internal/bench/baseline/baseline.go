// Package baseline brings up the networks of others that the bench compares Heddle with: Docker's
// own, and a BPF data path as Cilium and Calico build it. They run on hosts of their own on the
// lab's fabric, so that neither their rules nor their programs are in the way of the lab's modes.
// None of it is a part of Heddle.
//
// The BPF programs are in bpf/; bpf2go turns them into baseline_bpfel.go and an object file, both
// committed.
package baseline

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/bench"
)

// Host is a host for a baseline: a network namespace on the lab's fabric. Whoever made it removes
// it, with whatever runs and lies there.
type Host struct {
	Netns    string       // path of its network namespace
	Underlay netip.Prefix // its address
	Device   string       // its device on the fabric
	Dir      string       // for files
	Cgroup   string       // for what a runtime starts, as its path in every hierarchy
	Cgroups  []string     // directories of that cgroup in which processes can be put; the unified hierarchy's first
	// Container gives the name of a network namespace for container i, from 1.
	Container func(i int) string
}

// HostsOf gives how many hosts the baselines among modes need.
func HostsOf(modes []bench.Mode) int {
	n := 0
	for _, pair := range [][]bench.Mode{{bench.Bare}, {bench.Docker}, {bench.BPF, bench.BPFVXLAN}} {
		if slices.ContainsFunc(pair, func(m bench.Mode) bool { return slices.Contains(modes, m) }) {
			n += 2
		}
	}
	return n
}

// Options say what to bring up.
type Options struct {
	Modes []bench.Mode // those that are no baselines are left alone
	Hosts []Host       // as many as HostsOf gives
	// Program is the path of the program that runs in the containers.
	Program string
	// Progress hears of what takes a while.
	Progress func(string)
}

// Site is where baselines run.
type Site struct {
	Places map[bench.Mode]bench.Place
	// Skipped are modes that cannot run here, with the reason.
	Skipped map[bench.Mode]string
	docker  *docker
	bpf     *bpf
}

// Start brings baselines up. What cannot run on this machine is no error: Site.Skipped says why.
func Start(ctx context.Context, o Options) (*Site, error) {
	s := &Site{Places: map[bench.Mode]bench.Place{}, Skipped: map[bench.Mode]string{}}
	if want := HostsOf(o.Modes); len(o.Hosts) != want {
		return nil, fmt.Errorf("%d hosts for baselines: want %d", len(o.Hosts), want)
	}
	hosts := o.Hosts
	if slices.Contains(o.Modes, bench.Bare) {
		s.Places[bench.Bare] = bare{[2]Host(hosts)}
		hosts = hosts[2:]
	}
	if slices.Contains(o.Modes, bench.Docker) {
		o.Progress("starting Docker on two hosts")
		d, err := startDocker(ctx, [2]Host(hosts), o.Program)
		hosts = hosts[2:]
		if err == nil {
			s.docker, s.Places[bench.Docker] = d, d
		} else if err = s.skip(ctx, bench.Docker, err); err != nil {
			return nil, err
		}
	}
	if len(hosts) > 0 {
		if err := s.startBPF(ctx, o, [2]Host(hosts)); err != nil {
			return nil, errors.Join(err, s.Close())
		}
	}
	if slices.Contains(o.Modes, bench.Netkit) {
		if err := s.skip(ctx, bench.Netkit, netkit(ctx)); err != nil {
			return nil, errors.Join(err, s.Close())
		}
	}
	for _, m := range bench.Baselines {
		if reason := s.Skipped[m]; reason != "" {
			o.Progress(fmt.Sprintf("mode %s cannot run here and is left out: %s", m, reason))
		}
	}
	return s, nil
}

// startBPF starts the wanted variants of the BPF data path.
func (s *Site) startBPF(ctx context.Context, o Options, hosts [2]Host) (err error) {
	wanted := func(m bench.Mode) bool { return slices.Contains(o.Modes, m) }
	if s.bpf, err = startBPF(ctx, hosts); err != nil {
		for _, m := range []bench.Mode{bench.BPF, bench.BPFVXLAN} {
			if wanted(m) {
				if err := s.skip(ctx, m, err); err != nil {
					return err
				}
			}
		}
		return nil
	}
	for _, m := range []bench.Mode{bench.BPF, bench.BPFVXLAN} {
		if wanted(m) {
			s.Places[m] = s.bpf
		}
	}
	return nil
}

// skip notes why a mode cannot run, unless it is only that the bench was interrupted.
func (s *Site) skip(ctx context.Context, m bench.Mode, reason error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.Skipped[m] = strings.Join(strings.Fields(reason.Error()), " ")
	return nil
}

// Modes gives those of modes that can run.
func (s *Site) Modes(modes []bench.Mode) []bench.Mode {
	return slices.DeleteFunc(slices.Clone(modes), func(m bench.Mode) bool { return s.Skipped[m] != "" })
}

// Close ends what a Site holds itself; the rest goes with its hosts.
func (s *Site) Close() error {
	var errs []error
	if s.docker != nil {
		errs = append(errs, s.docker.stop())
	}
	if s.bpf != nil {
		errs = append(errs, s.bpf.close())
	}
	return errors.Join(errs...)
}

// netkit says why there is no measurement on netkit devices.
func netkit(ctx context.Context) error {
	// In a namespace of its own, which goes with the command.
	out, err := exec.CommandContext(ctx, "unshare", "--net", "ip", "link", "add", "type", "netkit").CombinedOutput()
	if err != nil {
		return fmt.Errorf("the kernel has no netkit devices (CONFIG_NETKIT): %s", strings.TrimSpace(string(out)))
	}
	return errors.New("the kernel has netkit devices, but the bench has no data path on them: no kernel it was written on had them")
}

// run runs a command and gives what it printed, or an error with its complaint.
func run(ctx context.Context, args ...string) (string, error) { return runWith(ctx, "", args...) }

// runWith is run with text as standard input.
func runWith(ctx context.Context, in string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdin = strings.NewReader(in)
	var out, complaint strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &complaint
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(complaint.String()))
	}
	return strings.TrimSpace(out.String()), nil
}

// in gives the words that run args in a network namespace; `ip netns exec` would hide the cgroups.
func in(netns string, args ...string) []string {
	return append([]string{"nsenter", "--net=" + netns, "--"}, args...)
}

// joined gives the words that run args in cgroups, which must exist.
func joined(cgroups []string, args ...string) []string {
	words := append([]string{"/bin/sh", "-c", `while [ "$1" != -- ]; do echo 0 >"$1/cgroup.procs" || exit; shift; done; shift; exec "$@"`, "sh"}, cgroups...)
	return append(append(words, "--"), args...)
}
