// Package policy measures caps and rules on live connections (figure 7 of the Slim paper), and what
// connects and changes cost among more and more rules.
package policy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/session"
)

// The scale experiment: what connects and changes of rules cost among more and more rules, in a
// network of many endpoints. Two nodes and their containers are a lab's; all other nodes and
// endpoints are in its store only. Every rule is about the measured containers, so that both nodes
// have to enforce every one of them.

// Sizes of the experiment.
const (
	ScaleEndpoints = 10000
	ScaleNodes     = 100
)

// ScaleRules are the numbers of rules that are compared, in the order in which they are put in
// force.
var ScaleRules = []int{0, 100, 1000, 10000, 100000}

// scaleModes are measured next to each other; host is what no rule is asked about.
var scaleModes = []bench.Mode{bench.Host, bench.Overlay, bench.Heddle}

// ScaleOptions say what to measure.
type ScaleOptions struct {
	Rules     []int // numbers of rules, ascending, multiples of 100; the first is 0
	Endpoints int   // in the network, beside the lab's
	Nodes     int   // that have them
	Rounds    int   // through all numbers of rules
	Duration  time.Duration
	Scopes    []bench.Scope
	Changes   int // of one rule, for latency and again for processor time, each round; of 1,000 rules, half of it
	Program   []string
	Progress  io.Writer
}

// Validate reports what is out of bounds.
func (o ScaleOptions) Validate() error {
	if err := (bench.Options{Runs: o.Rounds, Duration: o.Duration}).Validate(); err != nil {
		return err
	}
	if len(o.Rules) == 0 || o.Rules[0] != 0 || !slices.IsSorted(o.Rules) {
		return errors.New("--rules: want numbers in ascending order, the first 0")
	}
	for _, n := range o.Rules {
		if n%scalePolicyRules != 0 || n > maxScaleRules {
			return fmt.Errorf("--rules %d: want multiples of %d, at most %d", n, scalePolicyRules, maxScaleRules)
		}
	}
	if o.Changes < 1 || o.Changes > bench.MaxRuns {
		return fmt.Errorf("--changes %d: want 1..%d", o.Changes, bench.MaxRuns)
	}
	return nil
}

// ScaleConnect is what socket() and connect() took in one mode and scope among a number of rules.
// Spreads are over rounds; ratios are of figures of one round.
type ScaleConnect struct {
	Rules int          `json:"rules"`
	Scope bench.Scope  `json:"scope"`
	Mode  bench.Mode   `json:"mode"`
	P50Us bench.Spread `json:"socket_connect_p50_us"`
	P99Us bench.Spread `json:"socket_connect_p99_us"`
	// RatioToNone compares p50 with that of the same mode without rules, RatioToHost with that of
	// host at the same time, RatioToOverlay with overlay's.
	RatioToNone    bench.Spread `json:"ratio_to_no_rules"`
	RatioToHost    bench.Spread `json:"ratio_to_host"`
	RatioToOverlay bench.Spread `json:"ratio_to_overlay"`
}

// ScaleChange is what a change cost among a number of rules. Spreads are over all changes of all
// rounds; of processor time, over rounds.
type ScaleChange struct {
	Rules   int    `json:"rules"`
	What    string `json:"what"`
	Changed int    `json:"rules_changed"`
	// AppliedMs is from the request to the agent's answer, when its node enforces the change;
	// InForceMs from the request to the first connect between the nodes that only succeeds if both
	// enforce it.
	AppliedMs bench.Spread `json:"applied_ms"`
	InForceMs bench.Spread `json:"in_force_on_both_nodes_ms"`
	// CPU time of a whole agent for one change: n1's runs the store, too.
	FirstCPUMs  bench.Spread `json:"cpu_ms_n1_with_store"`
	SecondCPUMs bench.Spread `json:"cpu_ms_n2"`
}

// ScaleResult is the outcome of RunScale.
type ScaleResult struct {
	Endpoints int            `json:"endpoints"`
	Nodes     int            `json:"nodes"`
	Rounds    int            `json:"rounds"`
	Connects  []ScaleConnect `json:"connects"`
	Changes   []ScaleChange  `json:"changes"`
	// GrowS is how long it took to bring the rules from the number before to this one, in steps of
	// one request each.
	GrowS map[int]bench.Spread `json:"grow_s"`
	// MemoryMB is the resident memory of n2's agent among the rules, in 1e6 bytes.
	MemoryMB map[int]bench.Spread `json:"agent_rss_mb"`
}

// scaleRun is an experiment that goes on.
type scaleRun struct {
	place   session.Lab
	agents  []*api.Client // of n1 and n2
	options ScaleOptions
	runner  *bench.Runner
	n       int // measurements so far

	applied int  // rules in force, but for the toggle's
	toggled bool // the toggle's policy is there
	watch   *verdictWatch
	pids    [2]int // of the agents
	begun   time.Time

	p50, p99 map[scaleCell][]float64 // a value for each round
	latency  map[changeCell][2][]float64
	cpu      map[changeCell][2][]float64
	grow     map[int][]float64
	memory   map[int][]float64
}

type scaleCell struct {
	rules int
	scope bench.Scope
	mode  bench.Mode
}

type changeCell struct {
	rules int
	kind  int // index of scaleChanges
}

// RunScale runs the experiment in a lab that is up. Rules, labels, made-up nodes and endpoints are
// gone when it returns.
func RunScale(ctx context.Context, place session.Lab, o ScaleOptions) (_ ScaleResult, err error) {
	if err := o.Validate(); err != nil {
		return ScaleResult{}, err
	}
	agents, err := place.Agents()
	if err != nil {
		return ScaleResult{}, err
	}
	cpus, err := machine.ChoosePinning()
	if err != nil {
		return ScaleResult{}, err
	}
	r := &scaleRun{place: place, agents: agents, options: o, begun: time.Now(),
		runner: &bench.Runner{Place: place, Options: bench.Options{Duration: o.Duration, Program: o.Program}, CPUs: cpus, Addresses: make(map[string]netip.Addr)},
		p50:    make(map[scaleCell][]float64), p99: make(map[scaleCell][]float64),
		latency: make(map[changeCell][2][]float64), cpu: make(map[changeCell][2][]float64),
		grow: make(map[int][]float64), memory: make(map[int][]float64)}
	defer func() { err = errors.Join(err, r.lift()) }()
	if err := r.label(ctx); err != nil {
		return ScaleResult{}, err
	}
	stop, err := r.populate(ctx)
	if err != nil {
		return ScaleResult{}, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	for round := range o.Rounds {
		if err := r.round(ctx, round); err != nil {
			return ScaleResult{}, fmt.Errorf("round %d: %w", round+1, err)
		}
	}
	return r.result(), nil
}

// round goes once through all numbers of rules, and back to none.
func (r *scaleRun) round(ctx context.Context, round int) error {
	for _, rules := range r.options.Rules {
		began := time.Now()
		if err := r.bring(ctx, rules); err != nil {
			return fmt.Errorf("bring %d rules in force: %w", rules, err)
		}
		if rules > 0 {
			r.grow[rules] = append(r.grow[rules], time.Since(began).Seconds())
		}
		if err := r.connects(ctx, round, rules); err != nil {
			return fmt.Errorf("%d rules: %w", rules, err)
		}
		if err := r.changes(ctx, rules); err != nil {
			return fmt.Errorf("%d rules: %w", rules, err)
		}
		rss, err := r.resident(ctx)
		if err != nil {
			return err
		}
		r.memory[rules] = append(r.memory[rules], rss/1e6)
		r.say("round %d of %d, %d rules: connects %s; changes %s", round+1, r.options.Rounds, rules, r.lastConnects(rules), r.lastChanges(rules))
	}
	return r.clear(ctx)
}

// connects measures every scope and mode once.
func (r *scaleRun) connects(ctx context.Context, round, rules int) error {
	crr := bench.WorkloadNamed("crr")
	for _, scope := range r.options.Scopes {
		for i := range scaleModes {
			mode := scaleModes[(i+round)%len(scaleModes)]
			sample, err := r.runner.Measure(ctx, bench.Cell{Workload: crr, Scope: scope, Mode: mode}, r.n)
			if err != nil {
				return fmt.Errorf("%s %s: %w", scope, mode, err)
			}
			r.n++
			cell := scaleCell{rules, scope, mode}
			r.p50[cell] = append(r.p50[cell], sample["socket_connect_p50_us"])
			r.p99[cell] = append(r.p99[cell], sample["socket_connect_p99_us"])
		}
	}
	return nil
}

func (r *scaleRun) say(format string, args ...any) {
	// Progress is a courtesy; the measurement goes on without it.
	_, _ = fmt.Fprintf(r.options.Progress, "[%4.0f s] %s\n", time.Since(r.begun).Seconds(), fmt.Sprintf(format, args...))
}

// result puts together what the rounds gave.
func (r *scaleRun) result() ScaleResult {
	o := r.options
	out := ScaleResult{Endpoints: o.Endpoints, Nodes: o.Nodes, Rounds: o.Rounds, GrowS: make(map[int]bench.Spread), MemoryMB: make(map[int]bench.Spread)}
	for _, scope := range o.Scopes {
		for _, mode := range scaleModes {
			for _, rules := range o.Rules {
				p50 := r.p50[scaleCell{rules, scope, mode}]
				out.Connects = append(out.Connects, ScaleConnect{Rules: rules, Scope: scope, Mode: mode,
					P50Us: bench.SpreadOf(p50), P99Us: bench.SpreadOf(r.p99[scaleCell{rules, scope, mode}]),
					RatioToNone:    ratios(p50, r.p50[scaleCell{0, scope, mode}]),
					RatioToHost:    ratios(p50, r.p50[scaleCell{rules, scope, bench.Host}]),
					RatioToOverlay: ratios(p50, r.p50[scaleCell{rules, scope, bench.Overlay}])})
			}
		}
	}
	for kind, change := range scaleChanges {
		for _, rules := range o.Rules {
			cell := changeCell{rules, kind}
			if len(r.latency[cell][0]) == 0 {
				continue
			}
			out.Changes = append(out.Changes, ScaleChange{Rules: rules, What: change.what, Changed: change.rules,
				AppliedMs: bench.SpreadOf(r.latency[cell][0]), InForceMs: bench.SpreadOf(r.latency[cell][1]),
				FirstCPUMs: bench.SpreadOf(r.cpu[cell][0]), SecondCPUMs: bench.SpreadOf(r.cpu[cell][1])})
		}
	}
	for _, rules := range o.Rules {
		if rules > 0 {
			out.GrowS[rules] = bench.SpreadOf(r.grow[rules])
		}
		out.MemoryMB[rules] = bench.SpreadOf(r.memory[rules])
	}
	return out
}

// ratios compares round with round.
func ratios(values, to []float64) bench.Spread {
	var all []float64
	for i := range min(len(values), len(to)) {
		all = append(all, values[i]/to[i])
	}
	return bench.SpreadOf(all)
}

func (r *scaleRun) lastConnects(rules int) (out string) {
	for _, scope := range r.options.Scopes {
		for _, mode := range scaleModes {
			p50 := r.p50[scaleCell{rules, scope, mode}]
			out += fmt.Sprintf("%s %s %.0f us, ", scope, mode, p50[len(p50)-1])
		}
	}
	return out[:len(out)-2]
}

func (r *scaleRun) lastChanges(rules int) (out string) {
	for kind, change := range scaleChanges {
		if all := r.latency[changeCell{rules, kind}][1]; len(all) > 0 {
			out += fmt.Sprintf("%s in force after %.0f ms, ", change.what, all[len(all)-1])
		}
	}
	return out[:max(len(out)-2, 0)]
}
