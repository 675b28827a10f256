package cost

import (
	"fmt"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/bench/report"
)

// section writes the tables of the document.
func section(r Result) string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s; other programs kept %.1f processors busy before. An empty BPF program counts as %.0f ns, which is taken off each run.",
		r.Machine, r.Background, r.EmptyRunNs)
	if r.Background > report.TooBusy {
		b.WriteString(" **That is a busy machine: read counts and sizes, not times.**")
	}
	if r.NoCounters != "" {
		fmt.Fprintf(&b, " Instructions of the processor could not be counted: `%s`; so neither `perf stat` nor `bpftool prog profile` runs here.", r.NoCounters)
	}
	b.WriteString("\n\n")
	for _, g := range r.grids() {
		fmt.Fprintf(&b, "%s:\n\n", g.Title)
		g.Markdown(&b)
		b.WriteByte('\n')
	}
	return b.String()
}

func (r Result) grids() []report.Grid {
	all := []report.Grid{r.stepGrid()}
	for _, s := range bench.Scopes {
		if _, measured := r.step(s, bench.Heddle, loadgen.Steps[0]); measured {
			all = append(all, r.programGrid(s))
		}
	}
	return append(all, r.sizeGrid(), r.shareGrid(), r.filterGrid(), r.syscallGrid(), r.startGrid(), r.partsGrid())
}

func (r Result) step(scope bench.Scope, mode bench.Mode, name string) (Step, bool) {
	i := slices.IndexFunc(r.Steps, func(s Step) bool { return s.Scope == scope && s.Mode == mode && s.Step == name })
	if i < 0 {
		return Step{}, false
	}
	return r.Steps[i], true
}

// runs sums the runs of all programs.
func (s Step) runs() (n float64) {
	for _, p := range s.Programs {
		n += p.Runs
	}
	return n
}

// stepGrid says what a step costs in each mode.
func (r Result) stepGrid() report.Grid {
	g := report.Grid{Title: "What BPF programs of both nodes add to one operation: runs, and nanoseconds (median of rounds, smallest..largest)",
		Rows: [][]string{{"", "host", "overlay", "heddle", "TCP segments (heddle)", "takes, us (heddle)", "while counted"}}}
	for _, scope := range bench.Scopes {
		for _, name := range loadgen.Steps {
			if _, measured := r.step(scope, bench.Heddle, name); !measured {
				continue
			}
			row := []string{scope.Title() + ": " + name}
			for _, mode := range bench.Modes {
				s, ok := r.step(scope, mode, name)
				switch {
				case !ok:
					row = append(row, "-")
				case s.runs() == 0:
					row = append(row, "0")
				default:
					row = append(row, fmt.Sprintf("%s x, %s ns", bench.Number(s.runs()), s.Ns.Text()))
				}
			}
			s, _ := r.step(scope, bench.Heddle, name)
			g.Rows = append(g.Rows, append(row, bench.Number(s.Segments), bench.Number(s.UncountedUs), bench.Number(s.ElapsedUs)))
		}
	}
	return g
}

// programGrid says which programs those are, with Heddle.
func (r Result) programGrid(scope bench.Scope) report.Grid {
	g := report.Grid{Title: "The programs behind these numbers, with Heddle, " + scope.Title() + " (runs of an operation x nanoseconds of a run)", Rows: [][]string{{"step", "programs"}}}
	for _, name := range loadgen.Steps {
		s, _ := r.step(scope, bench.Heddle, name)
		var parts []string
		for _, p := range s.Programs {
			parts = append(parts, fmt.Sprintf("`%s` %s x %.0f", p.Name, bench.Number(p.Runs), p.Ns/p.Runs))
		}
		if len(parts) == 0 {
			parts = []string{"none"}
		}
		g.Add(name, strings.Join(parts, ", "))
	}
	return g
}

func (r Result) sizeGrid() report.Grid {
	g := report.Grid{Title: "Their sizes, as loaded", Rows: [][]string{{"program", "BPF instructions", "machine code, bytes", "instructions verified"}}}
	for _, p := range r.Programs {
		g.Add("`"+p.Name+"`", fmt.Sprint(p.Instructions), fmt.Sprint(p.MachineCode), fmt.Sprint(p.Verified))
	}
	return g
}

// shares are the steps whose programs run in an operation of a workload.
var shares = []struct {
	workload, metric string
	steps            []string
}{
	{"rr", "cpu_us_per_transaction", []string{"round trip"}},
	{"crr", "cpu_us_per_connection", []string{"socket", "connect", "first byte", "close"}},
}

// shareGrid compares with the processor time of the whole operation.
func (r Result) shareGrid() report.Grid {
	g := report.Grid{Title: "Beside the machine's processor time for the whole operation, nothing counted (`crr` resets its connections, the steps close them)",
		Rows: [][]string{{"", "host, us", "heddle, us", "ratio", "BPF programs, us", "their share"}}}
	for _, scope := range bench.Scopes {
		for _, c := range shares {
			var ns float64
			for _, name := range c.steps {
				s, _ := r.step(scope, bench.Heddle, name)
				ns += s.Ns.Median
			}
			row := []string{scope.Title() + ": " + c.workload}
			var median, ratio float64
			for _, mode := range []bench.Mode{bench.Host, bench.Heddle} {
				for _, w := range r.Workloads {
					if w.Workload == c.workload && w.Metric == c.metric && w.Scope == scope && w.Mode == mode {
						row = append(row, bench.Spread{Median: w.Median, Min: w.Min, Max: w.Max}.Text())
						median, ratio = w.Median, w.RatioToHost
					}
				}
			}
			if median == 0 {
				continue
			}
			g.Rows = append(g.Rows, append(row, fmt.Sprintf("%.2f", ratio), fmt.Sprintf("%.2f", ns/1e3), fmt.Sprintf("%.1f %%", ns/10/median)))
		}
	}
	return g
}

func (r Result) filterGrid() report.Grid {
	g := report.Grid{Title: "Seccomp filters as the kernel has them, and how many of their instructions a call runs (0: the kernel remembers that it is allowed)"}
	calls := []string{"getpid", "clock_gettime", "read", "ioctl FIONREAD", "socket AF_UNIX", "socket TCP"}
	g.Rows = append(g.Rows, append([]string{"filter", "instructions", "calls remembered"}, calls...))
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
			g.Rows = append(g.Rows, row)
		}
	}
	return g
}

func (r Result) syscallGrid() report.Grid {
	g := report.Grid{Title: "System calls in a container, nanoseconds each, and what is more than without a filter", Rows: [][]string{{"call"}}}
	find := func(filter, call string) (bench.Spread, bool) {
		for _, s := range r.Syscalls {
			if s.Filter == filter && s.Call == call {
				return s.Spread, true
			}
		}
		return bench.Spread{}, false
	}
	for i, call := range loadgen.SyscallNames {
		row := []string{call}
		none, _ := find("none", call)
		for _, k := range filterKinds {
			s, ok := find(k.name, call)
			if !ok {
				continue
			}
			if i == 0 {
				g.Rows[0] = append(g.Rows[0], k.name)
			}
			cell := s.Text()
			if k.name != "none" {
				cell += fmt.Sprintf(", %+.0f", s.Median-none.Median)
			}
			row = append(row, cell)
		}
		g.Rows = append(g.Rows, row)
	}
	return g
}

func (r Result) startGrid() report.Grid {
	g := report.Grid{Title: "Starts of containers, from `run` to the first instruction of their program, and what else is made, milliseconds", Rows: [][]string{{"", "median (smallest..largest)"}}}
	for _, s := range r.Starts {
		g.Add(s.Name, s.Text())
	}
	return g
}

// startOf gives the times of a kind, of all rounds.
func (r Result) startOf(name string) []float64 {
	for _, s := range r.Starts {
		if s.Name == name {
			return s.Values
		}
	}
	return nil
}

// difference gives the median of what a round's times of some kinds are more than its times of
// others. Kinds of one round are measured next to each other.
func (r Result) difference(plus, minus []string) (bench.Spread, bool) {
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
		return bench.Spread{}, false
	}
	return bench.SpreadOf(all), len(all) > 0
}

// partsGrid says what an intercepted start consists of.
func (r Result) partsGrid() report.Grid {
	g := report.Grid{Title: "What an intercepted start costs more, milliseconds, medians of differences within a round (Slim's SlimRouter takes 3 ms to start)",
		Rows: [][]string{{"part", "median (smallest..largest)"}}}
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
			g.Add(p.name, fmt.Sprintf("%.2f (%.2f..%.2f)", d.Median, d.Min, d.Max))
		}
	}
	return g
}

// summarize writes what the page of results has.
func summarize(d *report.Document) (string, error) {
	var r Result
	if err := d.Read(File, &r); err != nil {
		return "", err
	}
	var b strings.Builder
	rows := [][]string{{"BPF programs of both nodes add to", "between nodes: runs", "ns", "on one node: runs", "ns"}}
	for _, name := range loadgen.Steps {
		row := []string{name}
		for _, scope := range bench.Scopes {
			s, _ := r.step(scope, bench.Heddle, name)
			row = append(row, bench.Number(s.runs()), fmt.Sprintf("%.0f", s.Ns.Median))
		}
		rows = append(rows, row)
	}
	report.Grid{Rows: rows}.Markdown(&b)
	b.WriteByte('\n')
	share := r.shareGrid().Rows
	rows = [][]string{{"processor time of an operation", "to host", "of it BPF programs"}}
	for _, row := range share[1:] {
		rows = append(rows, []string{row[0], row[3], row[5]})
	}
	report.Grid{Rows: rows}.Markdown(&b)
	more, _ := r.difference([]string{StartHeddle}, []string{StartRunc})
	runc := bench.SpreadOf(r.startOf(StartRunc))
	fmt.Fprintf(&b, "\nAn intercepted container starts %.1f ms later than one that is not, in runc, which takes"+
		" %.1f. %s.\n", more.Median, runc.Median, r.Machine)
	return b.String(), nil
}
