// Package nodes measures what a network of many nodes and endpoints costs one agent.
package nodes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/proc"
	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/model"
)

// The nodes experiment: what a network of many nodes and endpoints costs one agent. Two nodes are a
// lab's, all others are in its store only. n2's agent is measured, because it runs no store.

// Options say what to measure.
type Options struct {
	Nodes     []int // made-up nodes; each number is measured anew
	Endpoints int   // for each 5,000 nodes
	Changes   int   // of each kind
	// Probes waits until the agent has probed every node, which takes 20 ms for each, and measures
	// what probes cost.
	Probes   bool
	Progress io.Writer
}

// endpointsPer is how many nodes NodesOptions.Endpoints is for.
const endpointsPer = 5000

// Validate reports what is out of bounds.
func (o Options) Validate() error {
	if len(o.Nodes) == 0 || o.Changes < 1 || o.Changes > bench.MaxRuns {
		return fmt.Errorf("nodes %v, %d changes: want at least one number and 1..%d", o.Nodes, o.Changes, bench.MaxRuns)
	}
	for _, n := range o.Nodes {
		if n < 1 || n > 10000 || o.Endpoints < 0 || o.Endpoints > 40*endpointsPer {
			return fmt.Errorf("%d nodes with %d endpoints for %d: want 1..10000 and 0..%d", n, o.Endpoints, endpointsPer, 40*endpointsPer)
		}
	}
	return nil
}

// Size is what one size of network costs.
type Size struct {
	Nodes     int `json:"nodes"`
	Endpoints int `json:"endpoints"`
	// FilledS is from the first write of everything to its being in force on n2.
	FilledS float64 `json:"filled_s"`
	// AgentMB and MapsMB are the agent's resident memory and that of its BPF maps, StartedMB that
	// of an agent that has started into this network, all in 1e6 bytes.
	AgentMB   float64 `json:"agent_rss_mb"`
	StartedMB float64 `json:"started_rss_mb"`
	MapsMB    float64 `json:"maps_mb"`
	// StartS is from the start of an agent to its first answer, StartCPUS its processor time until
	// then.
	StartS    float64 `json:"start_s"`
	StartCPUS float64 `json:"start_cpu_s"`
	// Latencies are from a change's being in the store to its being in force on n2, and CPU its
	// processor time, by what has changed.
	LatencyMs map[string]bench.Spread `json:"latency_ms"`
	CPUMs     map[string]bench.Spread `json:"cpu_ms"`
	// IdleCPU is the share of one processor that the agent uses when nothing changes, probes
	// included; ProbedS is how long it took until all nodes' direct paths were proven.
	IdleCPU float64 `json:"idle_cpu"`
	ProbedS float64 `json:"probed_s,omitempty"`
}

// changes that are measured, as the populating program knows them. The second of each pair undoes
// the first.
var changes = []struct{ what, do, undo string }{
	{"endpoint", "add endpoint", "delete endpoint"},
	{"node", "add node", "delete node"},
}

// Run runs the experiment in a lab that is up. What is made up is gone when it returns.
func Run(ctx context.Context, place session.Lab, o Options) ([]Size, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	agents, err := place.Agents()
	if err != nil {
		return nil, err
	}
	var out []Size
	for _, n := range o.Nodes {
		r := &run{place: place, agent: agents[1], options: o, begun: time.Now(), size: Size{Nodes: n, Endpoints: o.Endpoints * n / endpointsPer,
			LatencyMs: make(map[string]bench.Spread), CPUMs: make(map[string]bench.Spread)}}
		if err := r.run(ctx); err != nil {
			return nil, fmt.Errorf("%d nodes: %w", n, err)
		}
		out = append(out, r.size)
	}
	return out, nil
}

// run is the measurement of one size.
type run struct {
	place    session.Lab
	agent    *api.Client // of n2
	options  Options
	size     Size
	begun    time.Time
	populate *proc.Dialog // the populating program
	process  *os.Process  // its own
}

func (r *run) say(format string, args ...any) {
	_, _ = fmt.Fprintf(r.options.Progress, "[%4.0f s] %d nodes: %s\n", time.Since(r.begun).Seconds(), r.size.Nodes, fmt.Sprintf(format, args...)) // a courtesy
}

func (r *run) run(ctx context.Context) (err error) {
	stopAnswers := func() error { return nil }
	if r.options.Probes {
		if stopAnswers, err = answerProbes(r.place); err != nil {
			return err
		}
	}
	defer func() { err = errors.Join(err, stopAnswers()) }()
	stop, err := r.fill(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	for _, step := range []func(context.Context) error{r.memory, r.changes, r.start, r.probes} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// fill makes the network large, and returns when n2 has all of it in force.
func (r *run) fill(ctx context.Context) (stop func() error, err error) {
	cmd, start, err := r.place.Populate(ctx, r.size.Nodes, r.size.Endpoints, r.options.Probes)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	intime := func() bool { return true }
	r.populate, err = proc.Talk(cmd, func() error {
		if err := start(); err != nil {
			return err
		}
		r.process = cmd.Process
		intime = r.killLater()
		return nil
	}, loadgen.Ready)
	intime()
	if err != nil {
		return nil, fmt.Errorf("populate the store: %w", err)
	}
	stop = r.populate.Close
	filled := time.Since(began)
	if err := r.await(ctx, func(s api.Status) bool { return s.Peers > r.size.Nodes }); err != nil {
		return nil, errors.Join(err, stop())
	}
	// Everything was written before its answer, so one more change is behind all of it.
	if _, err := r.change(ctx, changes[0].do); err != nil {
		return nil, errors.Join(err, stop())
	}
	if _, err := r.change(ctx, changes[0].undo); err != nil {
		return nil, errors.Join(err, stop())
	}
	r.size.FilledS = time.Since(began).Seconds()
	r.say("in the store after %.1f s, in force on n2 after %.1f s", filled.Seconds(), r.size.FilledS)
	return stop, nil
}

// killLater ends the populating program if it says nothing for too long, unless intime is called
// before.
func (r *run) killLater() (intime func() bool) {
	return time.AfterFunc(session.PopulateTimeout, func() { _ = r.process.Kill() }).Stop
}

// await asks the agent until its status is as wanted.
func (r *run) await(ctx context.Context, ok func(api.Status) bool) error {
	ctx, cancel := context.WithTimeout(ctx, session.PopulateTimeout)
	defer cancel()
	for {
		status, err := r.agent.Status(ctx)
		if err == nil && ok(status) {
			return nil
		}
		if proc.Pause(ctx, 5*time.Millisecond) != nil {
			return fmt.Errorf("the agent is not where it should be: %d peers, revision %d, store %q: %w", status.Peers, status.Store.Revision, status.Store.Error, errors.Join(err, ctx.Err()))
		}
	}
}

// change has the populating program change something, and gives the time from its being done to its
// being in force on n2.
func (r *run) change(ctx context.Context, command string) (took time.Duration, err error) {
	intime := r.killLater()
	answer, err := r.populate.Ask(command)
	intime()
	if err != nil {
		return 0, fmt.Errorf("%s: %w", command, r.populate.Explain(err))
	}
	done := time.Now()
	revision, err := strconv.ParseInt(strings.TrimPrefix(string(answer), "revision "), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", command, err)
	}
	err = r.await(ctx, func(s api.Status) bool { return s.Store.Revision >= revision && s.Store.Healthy })
	return time.Since(done), err
}

func (r *run) memory(ctx context.Context) error {
	pid, err := r.pid(ctx)
	if err != nil {
		return err
	}
	rss, err := machine.ResidentBytes(pid)
	if err != nil {
		return err
	}
	maps, err := machine.MapBytes(pid)
	r.size.AgentMB, r.size.MapsMB = rss/1e6, maps/1e6
	r.say("agent %.0f MB, BPF maps %.0f MB", r.size.AgentMB, r.size.MapsMB)
	return err
}

func (r *run) pid(ctx context.Context) (int, error) {
	status, err := r.agent.Status(ctx)
	return status.PID, err
}

// changes measures changes of one endpoint and of one node.
func (r *run) changes(ctx context.Context) error {
	pid, err := r.pid(ctx)
	if err != nil {
		return err
	}
	for _, c := range changes {
		var latency, cpu []float64
		for range r.options.Changes {
			for _, command := range []string{c.do, c.undo} {
				before, err := machine.ProcessorTime(pid)
				if err != nil {
					return err
				}
				took, err := r.change(ctx, command)
				if err != nil {
					return err
				}
				after, err := machine.ProcessorTime(pid)
				if err != nil {
					return err
				}
				latency, cpu = append(latency, took.Seconds()*1e3), append(cpu, (after-before).Seconds()*1e3)
			}
		}
		r.size.LatencyMs[c.what], r.size.CPUMs[c.what] = bench.SpreadOf(latency), bench.SpreadOf(cpu)
		r.say("one %s: in force after %.1f ms (%.1f..%.1f), %.1f ms of processor", c.what, r.size.LatencyMs[c.what].Median,
			r.size.LatencyMs[c.what].Min, r.size.LatencyMs[c.what].Max, r.size.CPUMs[c.what].Median)
	}
	return nil
}

// start measures an agent that starts into the network.
func (r *run) start(ctx context.Context) error {
	took, err := restartAgent(ctx, r.place)
	if err != nil {
		return err
	}
	pid, err := r.pid(ctx)
	if err != nil {
		return err
	}
	cpu, err := machine.ProcessorTime(pid)
	if err != nil {
		return err
	}
	if err := r.await(ctx, func(s api.Status) bool { return s.Peers > r.size.Nodes }); err != nil {
		return err
	}
	rss, err := machine.ResidentBytes(pid)
	r.size.StartS, r.size.StartCPUS, r.size.StartedMB = took.Seconds(), cpu.Seconds(), rss/1e6
	r.say("an agent starts in %.1f s (%.1f s of processor) and has %.0f MB", r.size.StartS, r.size.StartCPUS, r.size.StartedMB)
	return err
}

// quiesceTime is how long the agent gets to end what changes left it to do.
const quiesceTime = 200 * time.Millisecond

// idleSample is how long the agent's processor time is measured when nothing changes.
const idleSample = 10 * time.Second

// probes measures what the agent uses when nothing changes, after it has probed everybody if it
// does.
func (r *run) probes(ctx context.Context) error {
	if r.options.Probes {
		began := time.Now()
		err := r.await(ctx, func(s api.Status) bool { return s.Direct.Peers[model.PeerProven] > r.size.Nodes })
		if err != nil {
			return err
		}
		r.size.ProbedS = time.Since(began).Seconds()
		r.say("all direct paths proven after %.0f s", r.size.ProbedS)
	}
	pid, err := r.pid(ctx)
	if err != nil {
		return err
	}
	if err := proc.Pause(ctx, quiesceTime); err != nil {
		return err
	}
	before, err := machine.ProcessorTime(pid)
	if err != nil {
		return err
	}
	if err := proc.Pause(ctx, idleSample); err != nil {
		return err
	}
	after, err := machine.ProcessorTime(pid)
	r.size.IdleCPU = (after - before).Seconds() / idleSample.Seconds()
	r.say("idle: %.3f of a processor", r.size.IdleCPU)
	return err
}
