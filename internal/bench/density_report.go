package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// The generated part of the document stands between these lines.
const (
	DensityDocBegin = "<!-- `heddle bench density report` writes from here -->\n"
	DensityDocEnd   = "<!-- to here: density -->\n"
)

// ReadDensity reads what `heddle bench density --json` wrote.
func ReadDensity(r io.Reader) (result DensityResult, err error) {
	if err := json.NewDecoder(r).Decode(&result); err != nil {
		return result, fmt.Errorf("read results: %w", err)
	}
	if len(result.Containers) == 0 {
		return result, fmt.Errorf("read results: no containers were measured")
	}
	return result, nil
}

// ReplaceDensityDoc puts text between the two marks of a document.
func ReplaceDensityDoc(document, text []byte) ([]byte, error) {
	return ReplaceBetween(document, text, DensityDocBegin, DensityDocEnd)
}

// densityTable is one table: its first row is the head.
type densityTable struct {
	title string
	rows  [][]string
}

func (t *densityTable) add(cells ...string) { t.rows = append(t.rows, cells) }

// WriteDensityTable writes results as aligned text.
func WriteDensityTable(w io.Writer, r DensityResult) error {
	var b strings.Builder
	for _, t := range r.tables() {
		fmt.Fprintln(&b, t.title)
		writeAligned(&b, t.rows)
		b.WriteByte('\n')
	}
	return writeAll(w, b.String())
}

// WriteDensityDoc writes results as the generated part of the document.
func WriteDensityDoc(w io.Writer, r DensityResult) error {
	var b strings.Builder
	for _, t := range r.tables() {
		fmt.Fprintf(&b, "\n%s:\n\n", t.title)
		for i, row := range t.rows {
			fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
			if i == 0 {
				b.WriteString(strings.Repeat("|---", len(row)) + "|\n")
			}
		}
	}
	quiet := "the machine otherwise idle"
	if r.Background > QuietMachine {
		quiet = fmt.Sprintf("**%.1f processors busy with other work before it began**: read the shape, not the figures", r.Background)
	}
	fmt.Fprintf(&b, "\nMeasured: %d rounds of %d connects at each step, other measurements of %g s, in all %.0f s; %s; %s.\n\n",
		r.Rounds, latencyConnects, r.DurationS, r.TookS, r.Machine, quiet)
	return writeAll(w, b.String())
}

func (r DensityResult) tables() []densityTable {
	out := []densityTable{r.memoryTable(), r.containersTable(), r.pacedTable()}
	for _, scope := range Scopes {
		if t := r.liveTable(scope); len(t.rows) > 1 {
			out = append(out, t)
		}
	}
	return out
}

// rowOf is a row with a cell for each number of containers.
func (r DensityResult) rowOf(what string, cell func(DensityStep) string) []string {
	row := []string{what}
	for _, s := range r.Containers {
		row = append(row, cell(s))
	}
	return row
}

func (r DensityResult) headOf(what string) []string {
	return r.rowOf(what, func(s DensityStep) string { return Thousands(s.Containers) })
}

// Thousands writes 100000 as "100,000".
func Thousands(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%s,%03d", Thousands(n/1000), n%1000)
}

func inKilobytes(bytes float64) string { return fmt.Sprintf("%.1f", bytes/1e3) }

func (r DensityResult) memoryTable() densityTable {
	t := densityTable{title: "Memory by the number of containers on the node"}
	t.add(r.headOf("containers")...)
	for _, row := range []struct {
		what  string
		bytes func(DensityStep) float64
	}{
		{"kernel, a network namespace (any container network's), kB", func(s DensityStep) float64 { return s.NamespaceBytes }},
		{"kernel, a thread with its descriptors (the program's), kB", func(s DensityStep) float64 { return s.ThreadBytes }},
		{"kernel, **an endpoint** (overlay and Heddle), kB", func(s DensityStep) float64 { return s.EndpointBytes }},
		{"kernel, **interception** (listener, threads, sockets made ahead), kB", func(s DensityStep) float64 { return s.InterceptedBytes }},
		{"agent, resident, a container, kB", func(s DensityStep) float64 { return s.AgentBytes }},
		{"holder, resident, a container, kB", func(s DensityStep) float64 { return s.HolderBytes }},
	} {
		t.add(r.rowOf(row.what, func(s DensityStep) string { return inKilobytes(row.bytes(s)) })...)
	}
	t.add(r.rowOf("agent in all, MB", func(s DensityStep) string { return Number(s.AgentMB) })...)
	t.add(r.rowOf("its BPF maps, MB", func(s DensityStep) string { return Number(s.MapsMB) })...)
	t.add(r.rowOf("its threads", func(s DensityStep) string { return Thousands(s.AgentThreads) })...)
	t.add(r.rowOf("its files; the holder's", func(s DensityStep) string {
		return fmt.Sprintf("%s; %s", Thousands(s.AgentFiles), Thousands(s.HolderFiles))
	})...)
	return t
}

func (r DensityResult) containersTable() densityTable {
	t := densityTable{title: "Work by the number of containers, connects and accepts between nodes"}
	t.add(r.headOf("containers")...)
	t.add(r.rowOf("an endpoint is made in, ms", func(s DensityStep) string { return s.MakeMs.String() })...)
	t.add(r.rowOf("the agent's processor time for it, ms", func(s DensityStep) string { return Number(s.MakeCPUMs) })...)
	t.add(r.rowOf("its listener serves after, ms", func(s DensityStep) string { return Number(s.JoinMs) })...)
	t.add(r.rowOf("agent at rest, processors", func(s DensityStep) string { return fmt.Sprintf("%.4f", s.Rest.CPU) })...)
	t.add(r.rowOf("agent at rest, switches/s", func(s DensityStep) string { return Number(s.Rest.SwitchesPerS) })...)
	for _, clients := range []string{"one", "all"} {
		who := "one container"
		if clients == "all" {
			who = "all containers in turn"
		}
		for _, mode := range Modes {
			t.add(r.rowOf(fmt.Sprintf("`socket()`+`connect()` of %s, %s, p50, us", who, mode), func(s DensityStep) string {
				return latencyOf(s.Latency, mode, clients).P50Us.String()
			})...)
		}
		t.add(r.rowOf("heddle, ratio to host", func(s DensityStep) string { return latencyRatio(s.Latency, clients, Host) })...)
		t.add(r.rowOf("heddle, ratio to overlay", func(s DensityStep) string { return latencyRatio(s.Latency, clients, Overlay) })...)
		t.add(r.rowOf("p99, host / overlay / heddle, us", func(s DensityStep) string {
			return fmt.Sprintf("%s / %s / %s", Number(latencyOf(s.Latency, Host, clients).P99Us.Median), Number(latencyOf(s.Latency, Overlay, clients).P99Us.Median),
				Number(latencyOf(s.Latency, Heddle, clients).P99Us.Median))
		})...)
	}
	t.add(r.rowOf("one listener accepts/s, host / overlay / heddle", func(s DensityStep) string {
		cells := make([]string, len(s.Accept))
		for i, a := range s.Accept {
			cells[i] = Thousands(int(a.PerS))
		}
		return strings.Join(cells, " / ")
	})...)
	return t
}

func latencyOf(all []DensityLatency, mode Mode, clients string) DensityLatency {
	for _, l := range all {
		if l.Mode == mode && l.Clients == clients {
			return l
		}
	}
	return DensityLatency{}
}

// latencyRatio compares medians of p50.
func latencyRatio(all []DensityLatency, clients string, to Mode) string {
	a, b := latencyOf(all, Heddle, clients).P50Us.Median, latencyOf(all, to, clients).P50Us.Median
	if b <= 0 {
		return ""
	}
	return fmt.Sprintf("%.2f", a/b)
}

func (r DensityResult) pacedTable() densityTable {
	t := densityTable{title: "The agent while containers call `socket()` and `close()` at a rate: its processors (us a call); p50 of `socket()`, us"}
	t.add(r.headOf("containers")...)
	for i, p := range r.Containers[len(r.Containers)-1].Paced {
		who := "one container"
		if p.Callers > 1 {
			who = fmt.Sprintf("%d containers", p.Callers)
		}
		t.add(r.rowOf(fmt.Sprintf("%s/s by %s", Thousands(int(p.Rate)), who), func(s DensityStep) string {
			if i >= len(s.Paced) {
				return ""
			}
			q := s.Paced[i]
			text := fmt.Sprintf("%.3f (%.1f); %.1f", q.CPU, q.CPUUs, q.P50Us)
			if q.Callers != p.Callers {
				text += fmt.Sprintf(", by %d", q.Callers)
			}
			if q.PerS < 0.98*q.Rate {
				text += fmt.Sprintf(", reached %s/s", Thousands(int(q.PerS)))
			}
			return text
		})...)
	}
	return t
}

func (r DensityResult) liveTable(scope Scope) densityTable {
	containers := 0
	steps := map[int]map[Mode]DensityLive{}
	var order []int
	for _, l := range r.Connections {
		if l.Scope != scope {
			continue
		}
		containers = l.Containers
		if steps[l.Connections] == nil {
			steps[l.Connections] = map[Mode]DensityLive{}
			order = append(order, l.Connections)
		}
		steps[l.Connections][l.Mode] = l
	}
	t := densityTable{title: fmt.Sprintf("Live connections %s, of %s containers; host / overlay / heddle", scope.Title(), Thousands(containers))}
	t.add("live", "kernel, a connection with both ends, kB", "the last were opened at, /s", "one container's connects: p50, us", "p99, us", "all containers' p50, us", "one listener accepts/s", "n2's agent at rest")
	for _, n := range order {
		cell := func(f func(DensityLive) string) string {
			var cells []string
			for _, mode := range Modes {
				cells = append(cells, f(steps[n][mode]))
			}
			return strings.Join(cells, " / ")
		}
		kilobytes, opened := "", ""
		if n > 0 {
			kilobytes = cell(func(l DensityLive) string { return inKilobytes(l.KernelBytes) })
			opened = cell(func(l DensityLive) string { return Thousands(int(l.OpenedPerS)) })
		}
		latency := func(clients string, f func(DensityLatency) Spread) string {
			return cell(func(l DensityLive) string { return Number(f(latencyOf(l.Latency, l.Mode, clients)).Median) })
		}
		p50 := func(l DensityLatency) Spread { return l.P50Us }
		t.add(Thousands(n), kilobytes, opened, latency("one", p50), latency("one", func(l DensityLatency) Spread { return l.P99Us }), latency("all", p50),
			cell(func(l DensityLive) string { return Thousands(int(l.Accept.PerS)) }), fmt.Sprintf("%.4f", steps[n][Heddle].Rest.CPU))
	}
	return t
}
