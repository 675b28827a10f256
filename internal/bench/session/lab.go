package session

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/proc"
	"heddle.dev/heddle/internal/lab"
	"heddle.dev/heddle/internal/netns"
)

// Lacking names what is not installed of programs, given with their Debian packages.
func Lacking(programs map[string]string) error {
	var errs []error
	for program, debian := range programs {
		if _, err := exec.LookPath(program); err != nil {
			errs = append(errs, fmt.Errorf("%w: install Debian's package %s", err, debian))
		}
	}
	return errors.Join(errs...)
}

// Needs says which lab a benchmark is run in. Without more it is one of two nodes with two
// containers each, which is up or which --up brings up.
type Needs struct {
	Name  string   // that --lab is unless it is given; "" for the default lab
	Size  lab.Size // of a lab that is brought up
	Up    bool     // bring it up without being asked to
	Fresh bool     // take down one that is up before
	// Installed says what the benchmark lacks on this machine. It is asked once the flags have been
	// read and a lab is up or is to be.
	Installed func() error
	// Program has the load generator of this program looked for in the containers.
	Program bool
}

// Lab is a Place: a lab that is up.
type Lab struct {
	Heddle string // path of the heddle program
	Name   string
	Stays  bool // it was up before, and others may use it afterwards
}

// Exec runs args by `heddle lab exec`.
func (l Lab) Exec(ctx context.Context, mode bench.Mode, container string, args ...string) *exec.Cmd {
	words := append([]string{"lab", "exec", "--lab", l.Name, "--mode", string(mode), container, "--"}, args...)
	return exec.CommandContext(ctx, l.Heddle, words...)
}

// IP asks `heddle lab ip`.
func (l Lab) IP(ctx context.Context, mode bench.Mode, container string) (netip.Addr, error) {
	out, err := proc.Output(exec.CommandContext(ctx, l.Heddle, "lab", "ip", "--lab", l.Name, "--mode", string(mode), container))
	if err != nil {
		return netip.Addr{}, fmt.Errorf("heddle lab ip: %w", err)
	}
	a, err := netip.ParseAddr(string(bytes.TrimSpace(out)))
	if err != nil {
		return netip.Addr{}, fmt.Errorf("heddle lab ip: %w", err)
	}
	return a, nil
}

// Sibling gives the path of another of the project's programs, which are beside this one.
func (l Lab) Sibling(program string) string { return filepath.Join(filepath.Dir(l.Heddle), program) }

// Open gives the lab itself.
func (l Lab) Open() (lab.Lab, error) { return lab.Open(l.Name) }

// Network gives what programs need that speak to the lab's agents.
func (l Lab) Network() (lab.Network, error) {
	opened, err := l.Open()
	if err != nil {
		return lab.Network{}, err
	}
	return opened.Network()
}

// Agents gives clients of all nodes' agents, in order.
func (l Lab) Agents() (agents []*api.Client, err error) {
	network, err := l.Network()
	for _, s := range network.APISockets {
		agents = append(agents, api.Dial(s))
	}
	return agents, err
}

// The limits of what is done to a lab.
const (
	downTimeout = 2 * time.Minute // also when the benchmark was interrupted
	// PopulateTimeout bounds each answer of the populating program.
	PopulateTimeout = 5 * time.Minute
)

// Populate gives a program that puts made-up nodes and endpoints into the lab's store and takes
// commands (package populate), with how to start it where the store can be reached.
func (l Lab) Populate(ctx context.Context, nodes, endpoints int, probes bool) (cmd *exec.Cmd, start func() error, err error) {
	network, err := l.Network()
	if err != nil {
		return nil, nil, err
	}
	cmd = exec.CommandContext(ctx, l.Sibling("heddled"), "populate", "--join-file", network.JoinFile,
		"--network-id", strconv.Itoa(int(network.ID)), "--nodes", strconv.Itoa(nodes), "--endpoints", strconv.Itoa(endpoints),
		"--probes="+strconv.FormatBool(probes))
	return cmd, func() error { return netns.Start(network.Netns, cmd) }, nil
}

// inLab runs measure with the session's lab up, and takes down what it brought up.
func (s *Session) inLab(ctx context.Context, needs Needs, measure func() error) (err error) {
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own program: %w", err)
	}
	s.Lab = Lab{Heddle: program, Name: cmp.Or(s.Settings.Lab, lab.DefaultName)}
	down, err := s.bringUp(ctx, needs)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, down()) }()
	if needs.Program {
		words, remove, err := FindProgram(ctx, s.Lab, program)
		if err != nil {
			return err
		}
		s.Program = words
		defer func() { err = errors.Join(err, remove()) }()
	}
	return measure()
}

// Beside brings up a further lab, called as the session's with a suffix; down removes it.
func (s *Session) Beside(ctx context.Context, suffix string, size lab.Size) (l Lab, down func() error, err error) {
	beside := *s
	beside.Lab.Name += suffix
	down, err = beside.bringUp(ctx, Needs{Up: true, Fresh: true, Size: size})
	return beside.Lab, down, err
}

// bringUp makes sure that the lab is up; down undoes what it did, and nothing if the lab was up
// before.
func (s *Session) bringUp(ctx context.Context, needs Needs) (down func() error, err error) {
	l, err := s.Lab.Open()
	if err != nil {
		return nil, err
	}
	down = func() error {
		// The benchmark's context may be over; the lab must go all the same.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTimeout)
		defer cancel()
		return l.Down(ctx, s.Progress)
	}
	size := needs.Size
	size.Nodes, size.Containers = cmp.Or(size.Nodes, 2), cmp.Or(size.Containers, 2)
	state, missing := l.Load()
	if missing == nil && (!state.Ready || state.Nodes < size.Nodes || state.Containers < size.Containers) {
		missing = fmt.Errorf("lab %s is incomplete, or smaller than %d nodes with %d containers", s.Lab.Name, size.Nodes, size.Containers)
	}
	if missing != nil && !needs.Up && !s.Up {
		return nil, fmt.Errorf("lab is not up: %w\nbring it up with `heddle lab up`, or use --up", missing)
	}
	if needs.Installed != nil {
		if err := needs.Installed(); err != nil {
			return nil, err
		}
	}
	switch {
	case missing == nil && !needs.Fresh:
		s.Lab.Stays = true
		return func() error { return nil }, nil
	case needs.Fresh:
		if err := down(); err != nil {
			return nil, err
		}
	}
	if err := l.Up(ctx, size, s.Progress); err != nil {
		return nil, errors.Join(err, down())
	}
	return down, nil
}
