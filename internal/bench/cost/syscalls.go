package cost

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/proc"
)

// Syscall is what a system call takes under a filter, in nanoseconds, over rounds.
type Syscall struct {
	Filter string `json:"filter"`
	Call   string `json:"call"`
	bench.Spread
}

// filterKind is a seccomp filter that a container is started with.
type filterKind struct {
	name   string
	heddle bool // with Heddle's
	engine bool // with the engine's default profile
}

var filterKinds = []filterKind{
	{name: "none"}, {name: "heddle", heddle: true}, {name: "engine", engine: true}, {name: "engine and heddle", heddle: true, engine: true},
}

// syscallShare is how much shorter than a run of a workload a run of system calls is.
const syscallShare = 3

// measureSyscalls has a container make system calls under each filter.
func (r *Result) measureSyscalls(ctx context.Context, o Options, dir string) (err error) {
	program, err := os.ReadFile(o.Program[0])
	if err != nil {
		return fmt.Errorf("the container's program: %w", err)
	}
	c, err := newCostContainer(ctx, o, dir, "bench-syscalls", true, "/heddle", program)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.remove(context.WithoutCancel(ctx))) }()
	cpus, err := machine.ChoosePinning()
	if err != nil {
		return err
	}
	c.args = bench.Command(append([]string{"/heddle"}, o.Program[1:]...), "syscalls", "-duration", (o.Duration / syscallShare).String(), "-cpu", strconv.Itoa(cpus.Client))
	kinds := filterKinds
	if o.Profile == "" {
		kinds = kinds[:2]
	}
	times := make(map[string]map[string][]float64)
	for round := range o.Rounds {
		for i := range kinds {
			k := kinds[(i+round)%len(kinds)]
			ns, filter, err := c.syscalls(ctx, k, round == 0)
			if err != nil {
				return fmt.Errorf("filter %s: %w", k.name, err)
			}
			if filter != nil {
				r.Filters = append(r.Filters, *filter)
			}
			if times[k.name] == nil {
				times[k.name] = make(map[string][]float64)
			}
			for call, v := range ns {
				times[k.name][call] = append(times[k.name][call], v)
			}
		}
	}
	for _, k := range kinds {
		for _, call := range loadgen.SyscallNames {
			r.Syscalls = append(r.Syscalls, Syscall{k.name, call, bench.SpreadOf(times[k.name][call])})
		}
	}
	return nil
}

// syscalls runs the container once. look asks for its filter.
func (c *container) syscalls(ctx context.Context, k filterKind, look bool) (ns map[string]float64, filter *Filter, err error) {
	runtime, annotations := "runc", map[string]string(nil)
	if k.heddle {
		runtime, annotations = c.options.Runtime, c.annotated()
	}
	var profile any
	if k.engine {
		raw, err := os.ReadFile(c.options.Profile)
		if err != nil {
			return nil, nil, fmt.Errorf("the engine's profile: %w", err)
		}
		if err := json.Unmarshal(raw, &profile); err != nil {
			return nil, nil, fmt.Errorf("the engine's profile: %s: %w", c.options.Profile, err)
		}
	}
	if err := c.write(annotations, profile); err != nil {
		return nil, nil, err
	}
	if err := os.Remove(c.pidFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, nil, err
	}
	process, err := proc.Start(ctx, c.run(ctx, runtime), loadgen.Ready)
	if err != nil {
		return nil, nil, err
	}
	if look {
		filter = c.filter(ctx, k.name)
	}
	if err := process.Stdin.Close(); err != nil {
		return nil, nil, errors.Join(err, process.Stop())
	}
	select {
	case err := <-process.Exited:
		if err != nil {
			return nil, nil, process.Explain(err)
		}
	case <-ctx.Done():
		return nil, nil, errors.Join(ctx.Err(), process.Stop())
	}
	lines := strings.Split(process.Output.String(), "\n")
	var result loadgen.Syscalls
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &result); err != nil {
		return nil, nil, process.Explain(err)
	}
	return result.Ns, filter, nil
}

// filter describes the filter of the container that runs. What it cannot be read for, it says.
func (c *container) filter(ctx context.Context, name string) *Filter {
	fail := func(err error) *Filter { return &Filter{Name: name, Missing: err.Error()} }
	pid, err := c.pid(ctx)
	if err != nil {
		return fail(err)
	}
	filters, err := filtersOf(pid)
	if err != nil {
		return fail(err)
	}
	arch, err := auditArch()
	if err != nil {
		return fail(err)
	}
	f, err := describeFilter(name, filters, arch, map[string]seccompCall{
		"getpid":         {number: unix.SYS_GETPID},
		"clock_gettime":  {number: unix.SYS_CLOCK_GETTIME, args: [6]uint64{unix.CLOCK_MONOTONIC}},
		"read":           {number: unix.SYS_READ, args: [6]uint64{3}},
		"ioctl FIONREAD": {number: unix.SYS_IOCTL, args: [6]uint64{3, unix.TIOCINQ}},
		"socket AF_UNIX": {number: unix.SYS_SOCKET, args: [6]uint64{unix.AF_UNIX, unix.SOCK_DGRAM | unix.SOCK_CLOEXEC}},
		"socket TCP":     {number: unix.SYS_SOCKET, args: [6]uint64{unix.AF_INET, unix.SOCK_STREAM}},
	})
	if err != nil {
		return fail(err)
	}
	return &f
}
