package cost

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/proc"
	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
)

// Program is a BPF program that ran in one of the steps.
type Program struct {
	Name         string `json:"name"`
	Instructions int    `json:"instructions"` // BPF's, as loaded
	MachineCode  int    `json:"machine_code_bytes"`
	Verified     int    `json:"verified_instructions"` // all paths together
}

// Step is what the BPF programs of both nodes did for one operation of a step, in one mode. Figures
// are medians of rounds.
type Step struct {
	Scope      bench.Scope `json:"scope"`
	Mode       bench.Mode  `json:"mode"`
	Step       string      `json:"step"` // of loadgen.Steps
	Operations int         `json:"operations"`
	// Segments are the TCP segments received on all ends.
	Segments float64 `json:"segments"`
	// Ns is the run time of all programs, without what counting adds.
	Ns bench.Spread `json:"ns"`
	// ElapsedUs is how long an operation took while runs were counted, UncountedUs while not (0:
	// not measured).
	ElapsedUs   float64       `json:"elapsed_us"`
	UncountedUs float64       `json:"uncounted_us,omitempty"`
	Programs    []StepProgram `json:"programs"`
}

// StepProgram is what one program did for an operation.
type StepProgram struct {
	Name string  `json:"name"`
	Runs float64 `json:"runs"`
	Ns   float64 `json:"ns"` // all these runs together
}

// leastRuns is how many runs an operation a program must have to be reported: below are the agents'
// own doings.
const leastRuns = 0.02

// programCounts are the counts of all nodes' programs, by name.
type programCounts map[string]struct{ runs, ns float64 }

// watched are the programs of both nodes.
type watched [2]*datapath.Programs

func openWatched(nodes [2]Node) (w watched, err error) {
	for i, n := range nodes {
		if w[i], err = datapath.OpenPrograms(n.PinDir); err != nil {
			return w, errors.Join(fmt.Errorf("node %d: %w", i+1, err), w.close())
		}
	}
	return w, nil
}

func (w watched) close() error {
	var errs []error
	for _, p := range w {
		if p != nil {
			errs = append(errs, p.Close())
		}
	}
	return errors.Join(errs...)
}

func (w watched) read() (programCounts, error) {
	counts := make(programCounts)
	for _, p := range w {
		all, err := p.Read()
		if err != nil {
			return nil, err
		}
		for _, s := range all {
			c := counts[s.Name]
			c.runs, c.ns = c.runs+float64(s.Runs), c.ns+float64(s.RunTime)
			counts[s.Name] = c
		}
	}
	return counts, nil
}

// stepRound is a step of one round.
type stepRound struct {
	loadgen.Step
	segments float64
	programs programCounts // what they ran meanwhile
}

// variant is a mode, with or without counting.
type variant struct {
	mode    bench.Mode
	counted bool
}

var variants = []variant{{bench.Host, true}, {bench.Overlay, true}, {bench.Heddle, true}, {bench.Heddle, false}}

// measurePrograms takes connections through their life in each mode, and counts.
func (r *Result) measurePrograms(ctx context.Context, place bench.Place, o Options) (err error) {
	w, err := openWatched(o.Nodes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	if err := counting(func() (err error) { r.EmptyRunNs, err = datapath.EmptyRun(); return err }); err != nil {
		return err
	}
	cpus, err := machine.ChoosePinning()
	if err != nil {
		return err
	}
	for _, scope := range o.Scopes {
		rounds := make(map[variant][][]stepRound)
		for round := range o.Rounds {
			for i := range variants {
				v := variants[(i+round)%len(variants)]
				s := &stepping{place: place, options: o, watched: w, cpus: cpus, scope: scope, mode: v.mode, port: bench.Port(round*len(variants) + i)}
				var steps []stepRound
				measure := func() (err error) { steps, err = s.run(ctx); return err }
				if v.counted {
					err = counting(measure)
				} else {
					err = measure()
				}
				if err != nil {
					return fmt.Errorf("%s %s: %w", scope, v.mode, err)
				}
				rounds[v] = append(rounds[v], steps)
			}
		}
		for _, v := range variants {
			if v.counted {
				r.Steps = append(r.Steps, summarizeSteps(scope, v.mode, rounds[v], rounds[variant{v.mode, false}], r.EmptyRunNs)...)
			}
		}
	}
	return r.describe(w)
}

// describe says what the programs are that ran.
func (r *Result) describe(w watched) error {
	all, err := w[0].Read()
	if err != nil {
		return err
	}
	for _, s := range all {
		ran := slices.ContainsFunc(r.Steps, func(step Step) bool {
			return slices.ContainsFunc(step.Programs, func(p StepProgram) bool { return p.Name == s.Name })
		})
		if ran {
			r.Programs = append(r.Programs, Program{s.Name, s.Instructions, s.MachineCode, s.Verified})
		}
	}
	return nil
}

// summarizeSteps makes one Step of all rounds of a step. uncounted are rounds while runs were not
// counted; there may be none. empty is what counting adds to a run.
func summarizeSteps(scope bench.Scope, mode bench.Mode, rounds, uncounted [][]stepRound, empty float64) (all []Step) {
	for i, name := range loadgen.Steps {
		step := Step{Scope: scope, Mode: mode, Step: name}
		var segments, elapsed, without, total []float64
		byProgram := make(map[string][][2]float64) // runs and nanoseconds, of each round in which it ran
		for _, round := range rounds {
			s := round[i]
			n := float64(s.Operations)
			step.Operations = s.Operations
			segments, elapsed = append(segments, s.segments/n), append(elapsed, s.ElapsedS*1e6/n)
			sum := 0.0
			for program, c := range s.programs {
				if c.runs/n < leastRuns {
					continue
				}
				ns := max(0, c.ns-c.runs*empty) / n
				byProgram[program] = append(byProgram[program], [2]float64{c.runs / n, ns})
				sum += ns
			}
			total = append(total, sum)
		}
		for _, round := range uncounted {
			without = append(without, round[i].ElapsedS*1e6/float64(round[i].Operations))
		}
		step.Segments, step.ElapsedUs, step.Ns = bench.SpreadOf(segments).Median, bench.SpreadOf(elapsed).Median, bench.SpreadOf(total)
		step.UncountedUs = bench.SpreadOf(without).Median
		for _, program := range slices.Sorted(maps.Keys(byProgram)) {
			var runs, ns []float64
			for _, v := range byProgram[program] {
				runs, ns = append(runs, v[0]), append(ns, v[1])
			}
			step.Programs = append(step.Programs, StepProgram{program, bench.Median(runs), bench.Median(ns)})
		}
		slices.SortStableFunc(step.Programs, func(a, b StepProgram) int { return int(b.Ns*1e3) - int(a.Ns*1e3) })
		all = append(all, step)
	}
	return all
}

// stepping is one round in one mode.
type stepping struct {
	place   bench.Place
	options Options
	watched watched
	cpus    machine.Pinning
	scope   bench.Scope
	mode    bench.Mode
	port    uint16
}

// stepsLifetime bounds a round.
const stepsLifetime = 2 * time.Minute

// stepDrain is how long a step's last packets may take: the server accepts and closes a little
// later than the client.
const stepDrain = 30 * time.Millisecond

func (s *stepping) run(ctx context.Context) (all []stepRound, err error) {
	ctx, cancel := context.WithTimeout(ctx, stepsLifetime)
	defer cancel()
	client, server := s.scope.Ends()
	address, err := s.place.IP(ctx, s.mode, server)
	if err != nil {
		return nil, fmt.Errorf("address of %s: %w", server, err)
	}
	l := bench.Launch{Program: s.options.Program, Lifetime: stepsLifetime, CPUs: s.cpus, Address: netip.AddrPortFrom(bench.Unspecified(address), s.port)}
	process, err := proc.Start(ctx, s.place.Exec(ctx, s.mode, server, bench.ServerWords(l)...), loadgen.Ready)
	if err != nil {
		return nil, fmt.Errorf("in %s: %w", server, err)
	}
	defer func() { err = errors.Join(err, process.Stop()) }()
	cmd := s.place.Exec(ctx, s.mode, client, bench.Command(s.options.Program, "steps", "-to", netip.AddrPortFrom(address, s.port).String(),
		"-connections", strconv.Itoa(s.options.Connections), "-trips", strconv.Itoa(s.options.Trips), "-lifetime", stepsLifetime.String(), "-cpu", strconv.Itoa(s.cpus.Client))...)
	proc.Prepare(cmd)
	dialog, err := proc.Talk(cmd, nil, loadgen.Ready)
	if err != nil {
		return nil, fmt.Errorf("client in %s: %w", client, err)
	}
	all, err = s.steps(dialog)
	if closeErr := dialog.Close(); closeErr != nil {
		err = errors.Join(err, fmt.Errorf("client in %s: %w", client, closeErr))
	}
	return all, err
}

// steps has the client make one step after the other, and counts what ran meanwhile.
func (s *stepping) steps(dialog *proc.Dialog) (all []stepRound, err error) {
	before, segments, err := s.counts()
	if err != nil {
		return nil, err
	}
	for range loadgen.Steps {
		line, err := dialog.Ask("go")
		if err != nil {
			return nil, fmt.Errorf("client: %w", err)
		}
		round := stepRound{programs: make(programCounts)}
		if err := json.Unmarshal(line, &round.Step); err != nil || round.Operations < 1 {
			return nil, fmt.Errorf("client said %q: %w", line, proc.ErrOrEnd(err))
		}
		time.Sleep(stepDrain)
		after, now, err := s.counts()
		if err != nil {
			return nil, err
		}
		for name, c := range after {
			c.runs, c.ns = c.runs-before[name].runs, c.ns-before[name].ns
			round.programs[name] = c
		}
		round.segments = now - segments
		before, segments = after, now
		all = append(all, round)
	}
	return all, nil
}

func (s *stepping) counts() (programCounts, float64, error) {
	programs, err := s.watched.read()
	if err != nil {
		return nil, 0, err
	}
	segments, err := segmentsIn(s.options.Spaces)
	return programs, segments, err
}

// segmentsIn gives the TCP segments that all these network namespaces have received.
func segmentsIn(spaces []string) (segments float64, err error) {
	for _, space := range spaces {
		err := netns.Do(space, func() error {
			raw, err := os.ReadFile("/proc/thread-self/net/snmp")
			if err != nil {
				return err
			}
			n, err := parseInSegs(raw)
			segments += n
			return err
		})
		if err != nil {
			return 0, fmt.Errorf("count segments in %s: %w", space, err)
		}
	}
	return segments, nil
}

// parseInSegs reads Tcp: InSegs from the text of /proc/net/snmp: a line of names, and a line of
// values.
func parseInSegs(raw []byte) (float64, error) {
	var names [][]byte
	for line := range bytes.Lines(raw) {
		fields := bytes.Fields(line)
		if len(fields) == 0 || string(fields[0]) != "Tcp:" {
			continue
		}
		if names == nil {
			names = fields
			continue
		}
		for i, name := range names {
			if string(name) == "InSegs" && i < len(fields) {
				return strconv.ParseFloat(string(fields[i]), 64)
			}
		}
	}
	return 0, errors.New("no InSegs of Tcp")
}
