package policy

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/proc"
	"heddle.dev/heddle/internal/bench/session"
)

// scaleChanges are the changes that are measured. A change is made and undone by turns; both are
// measured.
var scaleChanges = []struct {
	what     string
	rules    int // that change, about
	policies int // of scalePolicyRules each, beside the toggle's single rule
	every    int // one of so many of ScaleOptions.Changes
}{
	{"one rule", 1, 0, 1},
	{"1,000 rules", 1000, 10, 2},
}

// The limits of the experiment's waits.
const (
	inForceTimeout = time.Minute
	watchLifetime  = 19 * time.Minute       // of the watch and its server
	quiesceTime    = 200 * time.Millisecond // after a change
	idleTime       = time.Second            // in which is measured what agents use by themselves
)

// label tells the measured containers from others.
func (r *scaleRun) label(ctx context.Context) error {
	for container, agent := range r.measured() {
		if _, err := agent.LabelEndpoint(ctx, container, api.LabelRequest{Set: map[string]string{scaleLabel: "yes"}}); err != nil {
			return fmt.Errorf("label %s: %w", container, err)
		}
	}
	return nil
}

func (r *scaleRun) measured() map[string]*api.Client {
	return map[string]*api.Client{"n1/c1": r.agents[0], "n1/c2": r.agents[0], "n2/c1": r.agents[1]}
}

// lift takes away rules and labels, whatever became of the experiment.
func (r *scaleRun) lift() error {
	ctx, cancel := context.WithTimeout(context.Background(), inForceTimeout)
	defer cancel()
	err := r.clear(ctx)
	for container, agent := range r.measured() {
		_, labelErr := agent.LabelEndpoint(ctx, container, api.LabelRequest{Remove: []string{scaleLabel}})
		err = errors.Join(err, labelErr)
	}
	return err
}

// populate makes the network large.
func (r *scaleRun) populate(ctx context.Context) (stop func() error, err error) {
	if r.options.Endpoints == 0 {
		return func() error { return nil }, nil
	}
	r.say("%d nodes with %d endpoints are put into the store", r.options.Nodes, r.options.Endpoints)
	cmd, start, err := r.place.Populate(ctx, r.options.Nodes, r.options.Endpoints, false)
	if err != nil {
		return nil, err
	}
	s, err := proc.StartBy(ctx, cmd, loadgen.Ready, start, session.PopulateTimeout)
	if err != nil {
		return nil, fmt.Errorf("populate the store: %w", err)
	}
	return func() error { return s.StopWithin(session.PopulateTimeout) }, nil
}

// verdictWatch hears from a process in n1/c1 whether connects to n2/c1 succeed.
type verdictWatch struct {
	verdicts chan bool
	failed   func(error) error // adds what the process said
}

// How long the watch pauses between two connects: to tell times, and where its own sockets' cost
// would be in the way.
const (
	watchOften = 500 * time.Microsecond
	watchQuiet = 10 * time.Millisecond
)

// startWatch starts the watch and its server.
func (r *scaleRun) startWatch(ctx context.Context, every time.Duration) (stop func() error, err error) {
	place, program := r.place, r.options.Program
	address, err := r.runner.Address(ctx, bench.Heddle, "n2/c1")
	if err != nil {
		return nil, err
	}
	listen := netip.AddrPortFrom(bench.Unspecified(address), scaleWatchPort)
	server, err := proc.Start(ctx, place.Exec(ctx, bench.Heddle, "n2/c1", bench.Command(program, "server", "-listen", listen.String(), "-lifetime", watchLifetime.String())...), loadgen.Ready)
	if err != nil {
		return nil, fmt.Errorf("in n2/c1: %w", err)
	}
	cmd := place.Exec(ctx, bench.Heddle, "n1/c1", bench.Command(program, "watch", "-to", netip.AddrPortFrom(address, scaleWatchPort).String(),
		"-pause", every.String(), "-lifetime", watchLifetime.String())...)
	proc.Prepare(cmd)
	said := &proc.Tail{Limit: proc.TailLimit}
	cmd.Stderr = said
	stdin, err1 := cmd.StdinPipe()
	stdout, err2 := cmd.StdoutPipe()
	if err = errors.Join(err1, err2); err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch connects: %w", err), server.Stop())
	}
	// Room for every verdict of one change: it is read when the next is waited for.
	w := &verdictWatch{verdicts: make(chan bool, 64), failed: func(err error) error { return proc.WithOutput(err, said) }}
	go func() {
		defer close(w.verdicts)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			var v loadgen.Verdict
			if json.Unmarshal(lines.Bytes(), &v) == nil {
				w.verdicts <- v.Allowed
			}
		}
	}()
	r.watch = w
	stop = func() error {
		_ = stdin.Close() // it may have ended
		for range w.verdicts {
		}
		return errors.Join(cmd.Wait(), server.Stop())
	}
	if err := w.await(ctx, true); err != nil {
		return nil, errors.Join(err, stop())
	}
	return stop, nil
}

// forget drops verdicts that nobody waited for.
func (w *verdictWatch) forget() {
	for {
		select {
		case _, ok := <-w.verdicts:
			if ok {
				continue
			}
		default:
		}
		return
	}
}

// await returns when connects succeed, or are refused.
func (w *verdictWatch) await(ctx context.Context, allowed bool) error {
	timeout := time.After(inForceTimeout)
	for {
		select {
		case v, ok := <-w.verdicts:
			if !ok {
				return w.failed(errors.New("watch connects: it ended"))
			}
			if v == allowed {
				return nil
			}
		case <-timeout:
			return w.failed(fmt.Errorf("watch connects: no verdict allowed=%t after %s", allowed, inForceTimeout))
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// changes measures what changes cost among the rules in force.
func (r *scaleRun) changes(ctx context.Context, rules int) error {
	for kind, change := range scaleChanges {
		if rules < change.policies*scalePolicyRules {
			continue
		}
		cell, n := changeCell{rules, kind}, max(r.options.Changes/change.every, 1)
		err := r.watching(ctx, watchOften, func() (err error) {
			for i := 0; i < n && err == nil; i++ {
				err = r.timeChange(ctx, cell)
			}
			return err
		})
		if err == nil {
			err = r.watching(ctx, watchQuiet, func() error { return r.cpuOfChanges(ctx, cell, n) })
		}
		if err != nil {
			return fmt.Errorf("change of %s: %w", change.what, err)
		}
	}
	return nil
}

// watching runs do while connects are watched.
func (r *scaleRun) watching(ctx context.Context, every time.Duration, do func() error) error {
	stop, err := r.startWatch(ctx, every)
	if err != nil {
		return err
	}
	return errors.Join(do(), stop())
}

// changed makes a change; forbid says which way.
func (r *scaleRun) changed(ctx context.Context, kind int, forbid bool) error {
	var edit api.PolicyEdit
	for i := range scaleChanges[kind].policies {
		edit.Policies = append(edit.Policies, scalePolicy(i, r.apps(), forbid))
	}
	return r.toggle(ctx, edit, forbid)
}

// timeChange makes a change and undoes it. That connects are refused shows that one node knows;
// that they succeed again, that both do.
func (r *scaleRun) timeChange(ctx context.Context, cell changeCell) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	times := r.latency[cell]
	for _, forbid := range []bool{true, false} {
		r.watch.forget()
		began := time.Now()
		inForce := make(chan error, 1)
		var seen time.Duration
		go func() {
			err := r.watch.await(ctx, !forbid)
			seen = time.Since(began)
			inForce <- err
		}()
		editErr := r.changed(ctx, cell.kind, forbid)
		applied := time.Since(began)
		if editErr != nil {
			cancel() // there is nothing to wait for
		}
		if err := errors.Join(editErr, <-inForce); err != nil {
			return err
		}
		times[0] = append(times[0], applied.Seconds()*1e3)
		if !forbid {
			times[1] = append(times[1], seen.Seconds()*1e3)
		}
		if err := proc.Pause(ctx, quiesceTime); err != nil {
			return err
		}
	}
	r.latency[cell] = times
	return nil
}

// cpuOfChanges measures the processor time of both agents for 2n changes, less what they use by
// themselves.
func (r *scaleRun) cpuOfChanges(ctx context.Context, cell changeCell, n int) error {
	used := func(do func() error) (ms [2]float64, took time.Duration, err error) {
		before, err := r.agentsCPU(ctx)
		if err != nil {
			return ms, 0, err
		}
		began := time.Now()
		if err := do(); err != nil {
			return ms, 0, err
		}
		after, err := r.agentsCPU(ctx)
		for i := range ms {
			ms[i] = (after[i] - before[i]).Seconds() * 1e3
		}
		return ms, time.Since(began), err
	}
	// The watch goes on meanwhile: its sockets are part of what agents use by themselves.
	if err := proc.Pause(ctx, idleTime); err != nil { // for what earlier changes left to do
		return err
	}
	idle, idleTook, err := used(func() error { return proc.Pause(ctx, idleTime) })
	if err != nil {
		return err
	}
	busy, took, err := used(func() error {
		for range n {
			for _, forbid := range []bool{true, false} {
				if err := errors.Join(r.changed(ctx, cell.kind, forbid), r.watch.await(ctx, !forbid)); err != nil {
					return err
				}
			}
		}
		return proc.Pause(ctx, quiesceTime)
	})
	if err != nil {
		return err
	}
	cpu := r.cpu[cell]
	for i := range cpu {
		idleShare := idle[i] * took.Seconds() / idleTook.Seconds()
		cpu[i] = append(cpu[i], max(busy[i]-idleShare, 0)/float64(2*n))
	}
	r.cpu[cell] = cpu
	return nil
}

// agentsCPU reads the processor time of both agents, threads that have ended included.
func (r *scaleRun) agentsCPU(ctx context.Context) (used [2]time.Duration, err error) {
	for i := range used {
		pid, err := r.pid(ctx, i)
		if err != nil {
			return used, err
		}
		if used[i], err = machine.ProcessorTime(pid); err != nil {
			return used, err
		}
	}
	return used, nil
}

// pid asks agent i once.
func (r *scaleRun) pid(ctx context.Context, i int) (int, error) {
	if r.pids[i] == 0 {
		status, err := r.agents[i].Status(ctx)
		if err != nil {
			return 0, err
		}
		r.pids[i] = status.PID
	}
	return r.pids[i], nil
}

// resident gives the resident memory of n2's agent, which runs no store, in bytes.
func (r *scaleRun) resident(ctx context.Context) (float64, error) {
	pid, err := r.pid(ctx, 1)
	if err != nil {
		return 0, err
	}
	return machine.ResidentBytes(pid)
}
