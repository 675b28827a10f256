// Package cost measures what it costs that Heddle is there: BPF programs on the way of packets and
// calls, a seccomp filter before system calls, a wrapper and a hand-off before containers.
package cost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

// What it costs that Heddle is there: BPF programs on the way of packets and calls, a seccomp
// filter before every system call, a wrapper and a hand-off before every container.

// Options say what Run measures, and where.
type Options struct {
	Program []string // runs loadgen.Main in the lab's containers
	Scopes  []bench.Scope
	Nodes   [2]Node
	// Spaces are paths of all network namespaces of the lab in which TCP segments are counted.
	Spaces []string
	// Runtime and CNI are heddle-runtime and heddle-cni. Profile is a file with a container
	// engine's default seccomp profile as the OCI runtime specification has it; "" leaves it out.
	Runtime, CNI, Profile string

	Connections int           // of a round of steps
	Trips       int           // round trips of a round of steps
	Rounds      int           // of everything but starts
	Starts      int           // of each kind
	Duration    time.Duration // of a run of a workload; system calls take a third of it
	Progress    io.Writer
}

// Node is a node of the lab.
type Node struct {
	PinDir        string // of its agent
	APISocket     string
	SeccompSocket string
	Netns         string // path
}

// maxConnections fits the limit of file descriptors of a container.
const maxConnections = 4000

// Validate reports what is out of bounds.
func (o Options) Validate() error {
	switch {
	case o.Connections < 1 || o.Connections > maxConnections:
		return fmt.Errorf("--connections %d: want 1..%d", o.Connections, maxConnections)
	case o.Trips < 1 || o.Trips > 1e6:
		return fmt.Errorf("--trips %d: want 1..1000000", o.Trips)
	case o.Starts < 1 || o.Starts > bench.MaxRuns:
		return fmt.Errorf("--starts %d: want 1..%d", o.Starts, bench.MaxRuns)
	}
	return bench.Options{Runs: o.Rounds, Duration: o.Duration}.Validate()
}

// Result is what Run found. Its JSON form is the project's record.
type Result struct {
	Machine    string  `json:"machine"`
	Background float64 `json:"background"` // processors that other programs kept busy before
	// EmptyRunNs is what the kernel counts for a run of a program that does nothing. It is taken
	// off below.
	EmptyRunNs float64 `json:"empty_run_ns"`
	// NoCounters says why instructions could not be counted by the processor, "" if they could be.
	NoCounters string    `json:"no_hardware_counters,omitempty"`
	Programs   []Program `json:"programs"`
	Steps      []Step    `json:"steps"`
	// Workloads are rr and crr in host and heddle mode, while nothing is counted.
	Workloads []bench.Result `json:"workloads"`
	Filters   []Filter       `json:"filters"`
	Syscalls  []Syscall      `json:"syscalls"`
	Starts    []Duration     `json:"starts"`
}

// Duration is a time in milliseconds, over runs.
type Duration struct {
	Name string `json:"name"`
	bench.Spread
	Values []float64 `json:"values"` // of each round; of what is made more than once in one, of each time
}

// Run measures everything in a lab that is up. It leaves nothing behind.
func Run(ctx context.Context, place bench.Place, o Options) (r Result, err error) {
	if err := o.Validate(); err != nil {
		return r, err
	}
	dir, err := os.MkdirTemp("", "heddle-bench-")
	if err != nil {
		return r, fmt.Errorf("make directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	r.NoCounters = whyNoCounters()
	o.say("steps of a connection, runs of BPF programs counted")
	if err := r.measurePrograms(ctx, place, o); err != nil {
		return r, fmt.Errorf("BPF programs: %w", err)
	}
	o.say("round trips and connections, nothing counted")
	var workloads []bench.Workload
	for _, name := range []string{"rr", "crr"} {
		workloads = append(workloads, bench.WorkloadNamed(name))
	}
	r.Workloads, err = bench.Run(ctx, place, bench.Options{Workloads: workloads, Scopes: o.Scopes, Modes: []bench.Mode{bench.Host, bench.Heddle}, Runs: o.Rounds, Duration: o.Duration, Program: o.Program})
	if err != nil {
		return r, err
	}
	o.say("system calls with and without a filter")
	if err := r.measureSyscalls(ctx, o, filepath.Join(dir, "syscalls")); err != nil {
		return r, fmt.Errorf("system calls: %w", err)
	}
	o.say("starts of containers")
	if err := r.measureStarts(ctx, o, filepath.Join(dir, "starts")); err != nil {
		return r, fmt.Errorf("starts: %w", err)
	}
	return r, nil
}

func (o Options) say(what string) { _, _ = fmt.Fprintln(o.Progress, what) } // a courtesy

// whyNoCounters says why the processor's instruction counter cannot be had, "" if it can.
func whyNoCounters() string {
	fd, err := unix.PerfEventOpen(&unix.PerfEventAttr{Type: unix.PERF_TYPE_HARDWARE, Config: unix.PERF_COUNT_HW_INSTRUCTIONS,
		Size: unix.PERF_ATTR_SIZE_VER0}, 0, -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
	if err != nil {
		return fmt.Sprintf("perf_event_open(PERF_COUNT_HW_INSTRUCTIONS): %v", err)
	}
	_ = unix.Close(fd) // it was only to see
	return ""
}

// counting has the runs of BPF programs counted while f runs.
func counting(f func() error) (err error) {
	stop, err := datapath.CountRuns()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop.Close()) }()
	return f()
}
