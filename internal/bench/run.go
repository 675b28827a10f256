package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/proc"
)

// Options say what to measure.
type Options struct {
	Workloads []Workload
	Scopes    []Scope
	Modes     []Mode // host first; see ParseModes
	Runs      int    // of each workload, scope and mode
	Duration  time.Duration
	// Without, if set, names modes in which a workload is not measured.
	Without func(w Workload, m Mode) bool
	// Program is the command line that runs loadgen.Main inside the place.
	Program []string
	// Progress, if set, hears of every measurement before it starts.
	Progress func(Progress)
}

// The limits of Options.
const (
	MaxRuns     = 100
	MaxDuration = 5 * time.Minute
)

// Validate reports what is out of bounds.
func (o Options) Validate() error {
	switch {
	case o.Runs < 1 || o.Runs > MaxRuns:
		return fmt.Errorf("--runs %d: want 1..%d", o.Runs, MaxRuns)
	case o.Duration < 100*time.Millisecond || o.Duration > MaxDuration:
		return fmt.Errorf("--duration %s: want 100ms..%s", o.Duration, MaxDuration)
	}
	return nil
}

// Cell is one thing that is measured: a workload in a mode, with its ends in a scope.
type Cell struct {
	Workload Workload
	Scope    Scope
	Mode     Mode
}

// String names the cell in messages.
func (c Cell) String() string { return fmt.Sprintf("%s %s %s", c.Workload.Name, c.Scope, c.Mode) }

// Progress is what is about to be measured and how far the bench is.
type Progress struct {
	Cell        Cell
	Run         int // from 1
	Done, Total int // measurements
	// Remaining is an estimate from the measurements so far; 0 before the first.
	Remaining time.Duration
}

// RunError is a measurement that failed; its text says which, why and what to do.
type RunError struct {
	Cell Cell
	Run  int // from 1
	Err  error
}

// Error names the measurement, the cause and the remedy.
func (e *RunError) Error() string {
	modes := string(Host)
	if e.Cell.Mode != Host {
		modes += "," + string(e.Cell.Mode)
	}
	return fmt.Sprintf("%s, run %d: %v\nto see it alone: heddle bench --workloads %s --scopes %s --modes %s --runs 1; "+
		"`heddle doctor` checks the node", e.Cell, e.Run, e.Err, e.Cell.Workload.Name, e.Cell.Scope, modes)
}

// Unwrap gives the cause.
func (e *RunError) Unwrap() error { return e.Err }

// modesIn gives the modes in which a workload is measured in a scope.
func (o Options) modesIn(w Workload, s Scope) []Mode {
	return slices.DeleteFunc(slices.Clone(o.Modes), func(m Mode) bool {
		return !m.In(s) || m == Floor && !w.connects() || o.Without != nil && o.Without(w, m)
	})
}

// Schedule lists the measurements of one run (from 0): each workload and scope, its modes next to
// each other and in an order that rotates from run to run, so that no mode is always first.
func (o Options) Schedule(run int) []Cell {
	var cells []Cell
	for _, w := range o.Workloads {
		for _, s := range o.Scopes {
			modes := o.modesIn(w, s)
			for i := range modes {
				cells = append(cells, Cell{w, s, modes[(i+run)%len(modes)]})
			}
		}
	}
	return cells
}

// Run measures everything and gives one result for each metric of each cell. It stops at the first
// measurement that fails, with a *RunError: ratios of half a comparison would mislead.
func Run(ctx context.Context, place Place, o Options) ([]Result, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	cpus, err := machine.ChoosePinning()
	if err != nil {
		return nil, err
	}
	r := &Runner{Place: place, Options: o, CPUs: cpus, Addresses: make(map[string]netip.Addr), series: NewSeries()}
	start := time.Now()
	done, total := 0, o.Runs*len(o.Schedule(0))
	for run := range o.Runs {
		for _, cell := range o.Schedule(run) {
			if o.Progress != nil {
				p := Progress{Cell: cell, Run: run + 1, Done: done, Total: total}
				if done > 0 {
					p.Remaining = time.Since(start) / time.Duration(done) * time.Duration(total-done)
				}
				o.Progress(p)
			}
			sample, err := r.Measure(ctx, cell, done)
			if err == nil {
				err = r.series.Add(cell, sample)
			}
			if err != nil {
				return nil, &RunError{cell, run + 1, err}
			}
			done++
		}
	}
	return r.series.Results(o)
}

// Runner is the state of one Run; only its goroutine uses it.
type Runner struct {
	Place     Place
	Options   Options
	CPUs      machine.Pinning
	Addresses map[string]netip.Addr // of servers, by mode and container
	series    *Series
}

// Servers listen on one port after another, below the ephemeral range and clear of the direct
// ports: a server that lingers after a fault cannot get in the way of the next.
const (
	firstPort = 21000
	PortCount = 4000
)

// Port gives the port of a program's n-th server. Two programs at a time, in one network namespace
// (the packages' tests), begin with different ones.
func Port(n int) uint16 { return uint16(firstPort + (61*os.Getpid()+n)%PortCount) }

// Measure runs one cell once. n counts the measurements of the bench.
func (r *Runner) Measure(ctx context.Context, cell Cell, n int) (sample Sample, err error) {
	lifetime := r.Options.Duration + proc.ReadyTimeout + proc.ClientSlack
	ctx, cancel := context.WithTimeout(ctx, lifetime)
	defer cancel()
	client, server := cell.Scope.Ends()
	address, err := r.Address(ctx, cell.Mode, server)
	if err != nil {
		return nil, err
	}
	port := Port(n)
	w := cell.Workload
	l := Launch{
		Program: r.Options.Program, duration: r.Options.Duration, Lifetime: lifetime, CPUs: r.CPUs,
		Address: netip.AddrPortFrom(Unspecified(address), port),
	}
	process, err := proc.Start(ctx, r.Place.Exec(ctx, cell.Mode, server, w.server(l)...), w.ready)
	if err != nil {
		return nil, fmt.Errorf("in %s: %w", server, err)
	}
	defer func() {
		if stopErr := process.Stop(); stopErr != nil {
			err = errors.Join(err, fmt.Errorf("in %s: %w", server, stopErr))
		}
	}()
	l.Address = netip.AddrPortFrom(address, port)
	stdout, err := proc.Output(r.Place.Exec(ctx, cell.Mode, client, w.client(l)...))
	if err != nil {
		return nil, fmt.Errorf("client in %s to %s: %w (server said: %q)", client, l.Address, err, process.Output)
	}
	return w.read(stdout)
}

// Unspecified gives the wildcard address of a's family.
func Unspecified(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// Address asks for each address once.
func (r *Runner) Address(ctx context.Context, mode Mode, container string) (netip.Addr, error) {
	key := string(mode) + " " + container
	if a, known := r.Addresses[key]; known {
		return a, nil
	}
	a, err := r.Place.IP(ctx, mode, container)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("address of %s: %w", container, err)
	}
	r.Addresses[key] = a
	return a, nil
}
