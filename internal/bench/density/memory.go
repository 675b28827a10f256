package density

import (
	"context"
	"errors"
	"time"

	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/proc"
)

// memory is what takes memory, in bytes, and what else may run out.
type memory struct {
	kernel        float64 // of the whole machine: caches of objects, per-CPU memory, stacks, page tables
	agent, keeper float64 // resident
	maps          float64 // of the agent's BPF maps
	threads       int     // of the agent
	files         int     // of the agent
	keeperFiles   int
}

// What machine.Steady is told.
const (
	still       = 128 << 10
	steadyLimit = 2500 * time.Millisecond // of short runs, less
	// An agent gives memory back that it does not use in its second period of rest (cmd/heddled).
	restsWithin = 12 * time.Second // of short runs, less
)

// resting is steady once the agent has given back what it does not use.
func (r *run) resting(ctx context.Context) (memory, error) {
	if err := proc.Pause(ctx, min(restsWithin, 12*r.options.Duration)); err != nil {
		return memory{}, err
	}
	return r.steady(ctx)
}

// steady reads all memory once the kernel's has stopped moving.
func (r *run) steady(ctx context.Context) (m memory, err error) {
	if m.kernel, err = machine.Steady(ctx, machine.ContainerMemory, still, min(steadyLimit, 4*r.options.Duration)); err != nil {
		return m, err
	}
	var e1, e2, e3, e4, e5 error
	m.agent, e1 = machine.ResidentBytes(r.pid)
	m.maps, e2 = machine.MapBytes(r.pid)
	m.threads, e3 = machine.Entries(r.pid, "task")
	m.files, e4 = machine.Entries(r.pid, "fd")
	if keeper := machine.KeeperOf(r.pid); keeper > 0 {
		m.keeper, e5 = machine.ResidentBytes(keeper)
		m.keeperFiles, _ = machine.Entries(keeper, "fd") // it may have ended since
	}
	return m, errors.Join(e1, e2, e3, e4, e5)
}

// rest measures what the agent uses while nothing is asked of it.
func (r *run) rest(ctx context.Context, duration time.Duration) (rest Rest, err error) {
	cpu, e1 := machine.ProcessorTime(r.pid)
	switches, e2 := machine.VoluntarySwitches(r.pid)
	began := time.Now()
	if err := errors.Join(e1, e2, proc.Pause(ctx, duration)); err != nil {
		return rest, err
	}
	cpuAfter, e1 := machine.ProcessorTime(r.pid)
	elapsed := time.Since(began).Seconds()
	after, e2 := machine.VoluntarySwitches(r.pid)
	return Rest{CPU: (cpuAfter - cpu).Seconds() / elapsed, SwitchesPerS: max(0, after-switches) / elapsed}, errors.Join(e1, e2)
}
