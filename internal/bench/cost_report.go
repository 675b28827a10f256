package bench

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/bench/peer"
)

// The tables stand between these lines of the document.
const (
	CostDocBegin = "<!-- `heddle bench cost report` writes from here -->\n"
	CostDocEnd   = "<!-- to here: cost -->\n"
)

// grid is a table of a report: the first row is its head.
type grid struct {
	title string
	rows  [][]string
}

// WriteCost writes results as aligned text.
func WriteCost(w io.Writer, r CostResult) error {
	var b strings.Builder
	for _, g := range r.grids() {
		fmt.Fprintf(&b, "%s\n", strings.ReplaceAll(g.title, "`", ""))
		writeAligned(&b, g.rows)
		b.WriteByte('\n')
	}
	return writeAll(w, strings.ReplaceAll(b.String(), "`", ""))
}

// ReplaceCostDoc writes results into a document, between its two marks.
func ReplaceCostDoc(document []byte, r CostResult) ([]byte, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s; other programs kept %.1f processors busy before. An empty BPF program counts as %.0f ns, which is taken off each run.",
		r.Machine, r.Background, r.EmptyRunNs)
	if r.Background > tooBusy {
		b.WriteString(" **That is a busy machine: read counts and sizes, not times.**")
	}
	if r.NoCounters != "" {
		fmt.Fprintf(&b, " Instructions of the processor could not be counted: `%s`; so neither `perf stat` nor `bpftool prog profile` runs here.", r.NoCounters)
	}
	b.WriteString("\n\n")
	for _, g := range r.grids() {
		fmt.Fprintf(&b, "%s:\n\n", g.title)
		for i, row := range g.rows {
			fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
			if i == 0 {
				b.WriteString(strings.Repeat("|---", len(row)) + "|\n")
			}
		}
		b.WriteByte('\n')
	}
	return ReplaceBetween(document, []byte(b.String()), CostDocBegin, CostDocEnd)
}

func (r CostResult) grids() []grid {
	all := []grid{r.stepGrid()}
	for _, s := range Scopes {
		if _, measured := r.step(s, Heddle, peer.Steps[0]); measured {
			all = append(all, r.programGrid(s))
		}
	}
	return append(all, r.sizeGrid(), r.shareGrid(), r.filterGrid(), r.syscallGrid(), r.startGrid(), r.partsGrid())
}

func (s Spread) text() string {
	return fmt.Sprintf("%s (%s..%s)", Number(s.Median), Number(s.Min), Number(s.Max))
}

func (r CostResult) step(scope Scope, mode Mode, name string) (CostStep, bool) {
	i := slices.IndexFunc(r.Steps, func(s CostStep) bool { return s.Scope == scope && s.Mode == mode && s.Step == name })
	if i < 0 {
		return CostStep{}, false
	}
	return r.Steps[i], true
}

// runs sums the runs of all programs.
func (s CostStep) runs() (n float64) {
	for _, p := range s.Programs {
		n += p.Runs
	}
	return n
}

// stepGrid says what a step costs in each mode.
func (r CostResult) stepGrid() grid {
	g := grid{title: "What BPF programs of both nodes add to one operation: runs, and nanoseconds (median of rounds, smallest..largest)",
		rows: [][]string{{"", "host", "overlay", "heddle", "TCP segments (heddle)", "takes, us (heddle)", "while counted"}}}
	for _, scope := range Scopes {
		for _, name := range peer.Steps {
			if _, measured := r.step(scope, Heddle, name); !measured {
				continue
			}
			row := []string{scope.Title() + ": " + name}
			for _, mode := range Modes {
				s, ok := r.step(scope, mode, name)
				switch {
				case !ok:
					row = append(row, "-")
				case s.runs() == 0:
					row = append(row, "0")
				default:
					row = append(row, fmt.Sprintf("%s x, %s ns", Number(s.runs()), s.Ns.text()))
				}
			}
			s, _ := r.step(scope, Heddle, name)
			g.rows = append(g.rows, append(row, Number(s.Segments), Number(s.UncountedUs), Number(s.ElapsedUs)))
		}
	}
	return g
}

// programGrid says which programs those are, with Heddle.
func (r CostResult) programGrid(scope Scope) grid {
	g := grid{title: "The programs behind these numbers, with Heddle, " + scope.Title() + " (runs of an operation x nanoseconds of a run)", rows: [][]string{{"step", "programs"}}}
	for _, name := range peer.Steps {
		s, _ := r.step(scope, Heddle, name)
		var parts []string
		for _, p := range s.Programs {
			parts = append(parts, fmt.Sprintf("`%s` %s x %.0f", p.Name, Number(p.Runs), p.Ns/p.Runs))
		}
		if len(parts) == 0 {
			parts = []string{"none"}
		}
		g.rows = append(g.rows, []string{name, strings.Join(parts, ", ")})
	}
	return g
}

func (r CostResult) sizeGrid() grid {
	g := grid{title: "Their sizes, as loaded", rows: [][]string{{"program", "BPF instructions", "machine code, bytes", "instructions verified"}}}
	for _, p := range r.Programs {
		g.rows = append(g.rows, []string{"`" + p.Name + "`", fmt.Sprint(p.Instructions), fmt.Sprint(p.MachineCode), fmt.Sprint(p.Verified)})
	}
	return g
}

// costShares are the steps whose programs run in an operation of a workload.
var costShares = []struct {
	workload, metric string
	steps            []string
}{
	{"rr", "cpu_us_per_transaction", []string{"round trip"}},
	{"crr", "cpu_us_per_connection", []string{"socket", "connect", "first byte", "close"}},
}

// shareGrid compares with the processor time of the whole operation.
func (r CostResult) shareGrid() grid {
	g := grid{title: "Beside the machine's processor time for the whole operation, nothing counted (`crr` resets its connections, the steps close them)",
		rows: [][]string{{"", "host, us", "heddle, us", "ratio", "BPF programs, us", "their share"}}}
	for _, scope := range Scopes {
		for _, c := range costShares {
			var ns float64
			for _, name := range c.steps {
				s, _ := r.step(scope, Heddle, name)
				ns += s.Ns.Median
			}
			row := []string{scope.Title() + ": " + c.workload}
			var median, ratio float64
			for _, mode := range []Mode{Host, Heddle} {
				for _, w := range r.Workloads {
					if w.Workload == c.workload && w.Metric == c.metric && w.Scope == scope && w.Mode == mode {
						row = append(row, Spread{w.Median, w.Min, w.Max}.text())
						median, ratio = w.Median, w.RatioToHost
					}
				}
			}
			if median == 0 {
				continue
			}
			g.rows = append(g.rows, append(row, fmt.Sprintf("%.2f", ratio), fmt.Sprintf("%.2f", ns/1e3), fmt.Sprintf("%.1f %%", ns/10/median)))
		}
	}
	return g
}

func (r CostResult) filterGrid() grid {
	g := grid{title: "Seccomp filters as the kernel has them, and how many of their instructions a call runs (0: the kernel remembers that it is allowed)"}
	calls := []string{"getpid", "clock_gettime", "read", "ioctl FIONREAD", "socket AF_UNIX", "socket TCP"}
	g.rows = append(g.rows, append([]string{"filter", "instructions", "calls remembered"}, calls...))
	for _, k := range filterKinds {
		for _, f := range r.Filters {
			if f.Name != k.name {
				continue
			}
			row := []string{f.Name, fmt.Sprint(f.Instructions), fmt.Sprintf("%d of %d", f.Cached, f.Calls)}
			if f.Missing != "" {
				row = []string{f.Name, "not read: " + f.Missing, ""}
			}
			for _, c := range calls {
				n, ok := f.Executed[c]
				if row = append(row, fmt.Sprint(n)); !ok {
					row[len(row)-1] = "-"
				}
			}
			g.rows = append(g.rows, row)
		}
	}
	return g
}

func (r CostResult) syscallGrid() grid {
	g := grid{title: "System calls in a container, nanoseconds each, and what is more than without a filter", rows: [][]string{{"call"}}}
	find := func(filter, call string) (Spread, bool) {
		for _, s := range r.Syscalls {
			if s.Filter == filter && s.Call == call {
				return s.Spread, true
			}
		}
		return Spread{}, false
	}
	for i, call := range peer.SyscallNames {
		row := []string{call}
		none, _ := find("none", call)
		for _, k := range filterKinds {
			s, ok := find(k.name, call)
			if !ok {
				continue
			}
			if i == 0 {
				g.rows[0] = append(g.rows[0], k.name)
			}
			cell := s.text()
			if k.name != "none" {
				cell += fmt.Sprintf(", %+.0f", s.Median-none.Median)
			}
			row = append(row, cell)
		}
		g.rows = append(g.rows, row)
	}
	return g
}

func (r CostResult) startGrid() grid {
	g := grid{title: "Starts of containers, from `run` to the first instruction of their program, and what else is made, milliseconds", rows: [][]string{{"", "median (smallest..largest)"}}}
	for _, s := range r.Starts {
		g.rows = append(g.rows, []string{s.Name, s.text()})
	}
	return g
}

// startOf gives the times of a kind, of all rounds.
func (r CostResult) startOf(name string) []float64 {
	for _, s := range r.Starts {
		if s.Name == name {
			return s.Values
		}
	}
	return nil
}

// difference gives the median of what a round's times of some kinds are more than its times of others. Kinds of one round are
// measured next to each other.
func (r CostResult) difference(plus, minus []string) (Spread, bool) {
	all := make([]float64, len(r.startOf(plus[0])))
	add := func(sign float64, names []string) (ok bool) {
		for _, name := range names {
			values := r.startOf(name)
			if len(values) != len(all) {
				return false
			}
			for round, v := range values {
				all[round] += sign * v
			}
		}
		return true
	}
	if !add(1, plus) || !add(-1, minus) {
		return Spread{}, false
	}
	return spreadOf(all), len(all) > 0
}

// partsGrid says what an intercepted start consists of.
func (r CostResult) partsGrid() grid {
	g := grid{title: "What an intercepted start costs more, milliseconds, medians of differences within a round (Slim's SlimRouter takes 3 ms to start)",
		rows: [][]string{{"part", "median (smallest..largest)"}}}
	for _, p := range []struct {
		name        string
		plus, minus []string
	}{
		{"the wrapper: its start, the edit of the bundle, a question to a runtime that is quick to answer, becoming runc", []string{StartWrapper}, []string{StartProgram}},
		{"the filter: compiled by libseccomp in runc, loaded", []string{StartFiltered}, []string{StartRunc}},
		{"the rest: runc's own answer, if it is asked, and the listener handed to the agent", []string{StartHeddle, StartProgram}, []string{StartFiltered, StartWrapper}},
		{"together: an intercepted container to one that is not, by runc", []string{StartHeddle}, []string{StartRunc}},
		{"a container on the overlay, by heddle-runtime instead of runc", []string{StartOverlay}, []string{StartRunc}},
		{"an endpoint that is intercepted to one that is not", []string{EndpointMade}, []string{EndpointPlain}},
	} {
		if d, ok := r.difference(p.plus, p.minus); ok {
			g.rows = append(g.rows, []string{p.name, fmt.Sprintf("%.2f (%.2f..%.2f)", d.Median, d.Min, d.Max)})
		}
	}
	return g
}
