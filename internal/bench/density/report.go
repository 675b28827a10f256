package density

import (
	"fmt"
	"strings"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/report"
)

// section writes the tables of the document.
func section(r Result) string {
	var b strings.Builder
	for _, t := range r.tables() {
		fmt.Fprintf(&b, "\n%s:\n\n", t.Title)
		t.Markdown(&b)
	}
	quiet := "the machine otherwise idle"
	if r.Background > machine.QuietMachine {
		quiet = fmt.Sprintf("**%.1f processors busy with other work before it began**: read the shape, not the figures", r.Background)
	}
	fmt.Fprintf(&b, "\nMeasured: %d rounds of %d connects at each step, other measurements of %g s, in all %.0f s; %s; %s.\n\n",
		r.Rounds, latencyConnects, r.DurationS, r.TookS, r.Machine, quiet)
	return b.String()
}

func (r Result) tables() []report.Grid {
	out := []report.Grid{r.memoryTable(), r.containersTable(), r.pacedTable()}
	for _, scope := range bench.Scopes {
		if t := r.liveTable(scope); len(t.Rows) > 1 {
			out = append(out, t)
		}
	}
	return out
}

// rowOf is a row with a cell for each number of containers.
func (r Result) rowOf(what string, cell func(Step) string) []string {
	row := []string{what}
	for _, s := range r.Containers {
		row = append(row, cell(s))
	}
	return row
}

func (r Result) headOf(what string) []string {
	return r.rowOf(what, func(s Step) string { return bench.Thousands(s.Containers) })
}

func (r Result) memoryTable() report.Grid {
	t := report.Grid{Title: "Memory by the number of containers on the node"}
	t.Add(r.headOf("containers")...)
	for _, row := range []struct {
		what  string
		bytes func(Step) float64
	}{
		{"kernel, a network namespace (any container network's), kB", func(s Step) float64 { return s.NamespaceBytes }},
		{"kernel, a thread with its descriptors (the program's), kB", func(s Step) float64 { return s.ThreadBytes }},
		{"kernel, **an endpoint** (overlay and Heddle), kB", func(s Step) float64 { return s.EndpointBytes }},
		{"kernel, **interception** (listener, threads, sockets made ahead), kB", func(s Step) float64 { return s.InterceptedBytes }},
		{"agent, resident, a container, kB", func(s Step) float64 { return s.AgentBytes }},
		{"fd keeper, resident, a container, kB", func(s Step) float64 { return s.KeeperBytes }},
	} {
		t.Add(r.rowOf(row.what, func(s Step) string { return bench.InKilobytes(row.bytes(s)) })...)
	}
	t.Add(r.rowOf("agent in all, MB", func(s Step) string { return bench.Number(s.AgentMB) })...)
	t.Add(r.rowOf("its BPF maps, MB", func(s Step) string { return bench.Number(s.MapsMB) })...)
	t.Add(r.rowOf("its threads", func(s Step) string { return bench.Thousands(s.AgentThreads) })...)
	t.Add(r.rowOf("its files; the fd keeper's", func(s Step) string {
		return fmt.Sprintf("%s; %s", bench.Thousands(s.AgentFiles), bench.Thousands(s.KeeperFiles))
	})...)
	return t
}

func (r Result) containersTable() report.Grid {
	t := report.Grid{Title: "Work by the number of containers, connects and accepts between nodes"}
	t.Add(r.headOf("containers")...)
	t.Add(r.rowOf("an endpoint is made in, ms", func(s Step) string { return s.MakeMs.String() })...)
	t.Add(r.rowOf("the agent's processor time for it, ms", func(s Step) string { return bench.Number(s.MakeCPUMs) })...)
	t.Add(r.rowOf("its listener serves after, ms", func(s Step) string { return bench.Number(s.JoinMs) })...)
	if r.Restart.Containers > 0 {
		t.Add(r.rowOf("the agent restarted serves after, s; of its processor time", func(s Step) string {
			if s.Containers != r.Restart.Containers {
				return ""
			}
			return fmt.Sprintf("%s; %s", bench.Number(r.Restart.Seconds), bench.Number(r.Restart.CPUSeconds))
		})...)
	}
	t.Add(r.rowOf("agent at rest, processors", func(s Step) string { return fmt.Sprintf("%.4f", s.Rest.CPU) })...)
	t.Add(r.rowOf("agent at rest, switches/s", func(s Step) string { return bench.Number(s.Rest.SwitchesPerS) })...)
	for _, clients := range []string{"one", "all"} {
		who := "one container"
		if clients == "all" {
			who = "all containers in turn"
		}
		for _, mode := range bench.Modes {
			t.Add(r.rowOf(fmt.Sprintf("`socket()`+`connect()` of %s, %s, p50, us", who, mode), func(s Step) string {
				return latencyOf(s.Latency, mode, clients).P50Us.String()
			})...)
		}
		t.Add(r.rowOf("heddle, ratio to host", func(s Step) string { return latencyRatio(s.Latency, clients, bench.Host) })...)
		t.Add(r.rowOf("heddle, ratio to overlay", func(s Step) string { return latencyRatio(s.Latency, clients, bench.Overlay) })...)
		t.Add(r.rowOf("p99, host / overlay / heddle, us", func(s Step) string {
			return fmt.Sprintf("%s / %s / %s", bench.Number(latencyOf(s.Latency, bench.Host, clients).P99Us.Median), bench.Number(latencyOf(s.Latency, bench.Overlay, clients).P99Us.Median),
				bench.Number(latencyOf(s.Latency, bench.Heddle, clients).P99Us.Median))
		})...)
	}
	t.Add(r.rowOf("one listener accepts/s, host / overlay / heddle", func(s Step) string {
		cells := make([]string, len(s.Accept))
		for i, a := range s.Accept {
			cells[i] = bench.Thousands(int(a.PerS))
		}
		return strings.Join(cells, " / ")
	})...)
	return t
}

func latencyOf(all []Latency, mode bench.Mode, clients string) Latency {
	for _, l := range all {
		if l.Mode == mode && l.Clients == clients {
			return l
		}
	}
	return Latency{}
}

// latencyRatio compares medians of p50.
func latencyRatio(all []Latency, clients string, to bench.Mode) string {
	a, b := latencyOf(all, bench.Heddle, clients).P50Us.Median, latencyOf(all, to, clients).P50Us.Median
	if b <= 0 {
		return ""
	}
	return fmt.Sprintf("%.2f", a/b)
}

func (r Result) pacedTable() report.Grid {
	t := report.Grid{Title: "The agent while containers call `socket()` and `close()` at a rate: its processors (us a call); p50 of `socket()`, us"}
	t.Add(r.headOf("containers")...)
	for i, p := range r.Containers[len(r.Containers)-1].Paced {
		who := "one container"
		if p.Callers > 1 {
			who = fmt.Sprintf("%d containers", p.Callers)
		}
		t.Add(r.rowOf(fmt.Sprintf("%s/s by %s", bench.Thousands(int(p.Rate)), who), func(s Step) string {
			if i >= len(s.Paced) {
				return ""
			}
			q := s.Paced[i]
			text := fmt.Sprintf("%.3f (%.1f); %.1f", q.CPU, q.CPUUs, q.P50Us)
			if q.Callers != p.Callers {
				text += fmt.Sprintf(", by %d", q.Callers)
			}
			if q.PerS < 0.98*q.Rate {
				text += fmt.Sprintf(", reached %s/s", bench.Thousands(int(q.PerS)))
			}
			return text
		})...)
	}
	return t
}

func (r Result) liveTable(scope bench.Scope) report.Grid {
	containers := 0
	steps := map[int]map[bench.Mode]Live{}
	var order []int
	for _, l := range r.Connections {
		if l.Scope != scope {
			continue
		}
		containers = l.Containers
		if steps[l.Connections] == nil {
			steps[l.Connections] = map[bench.Mode]Live{}
			order = append(order, l.Connections)
		}
		steps[l.Connections][l.Mode] = l
	}
	t := report.Grid{Title: fmt.Sprintf("Live connections %s, of %s containers; host / overlay / heddle", scope.Title(), bench.Thousands(containers))}
	t.Add("live", "kernel, a connection with both ends, kB", "the last were opened at, /s", "one container's connects: p50, us", "p99, us", "all containers' p50, us", "one listener accepts/s", "n2's agent at rest")
	for _, n := range order {
		cell := func(f func(Live) string) string {
			var cells []string
			for _, mode := range bench.Modes {
				cells = append(cells, f(steps[n][mode]))
			}
			return strings.Join(cells, " / ")
		}
		kilobytes, opened := "", ""
		if n > 0 {
			kilobytes = cell(func(l Live) string { return bench.InKilobytes(l.KernelBytes) })
			opened = cell(func(l Live) string { return bench.Thousands(int(l.OpenedPerS)) })
		}
		latency := func(clients string, f func(Latency) bench.Spread) string {
			return cell(func(l Live) string { return bench.Number(f(latencyOf(l.Latency, l.Mode, clients)).Median) })
		}
		p50 := func(l Latency) bench.Spread { return l.P50Us }
		t.Add(bench.Thousands(n), kilobytes, opened, latency("one", p50), latency("one", func(l Latency) bench.Spread { return l.P99Us }), latency("all", p50),
			cell(func(l Live) string { return bench.Thousands(int(l.Accept.PerS)) }), fmt.Sprintf("%.4f", steps[n][bench.Heddle].Rest.CPU))
	}
	return t
}

// summarize writes what the page of results has.
func summarize(d *report.Document) (string, error) {
	var r Result
	if err := d.Read(File, &r); err != nil {
		return "", err
	}
	var b strings.Builder
	rows := [][]string{
		r.headOf("containers on the node"),
		r.rowOf("kernel memory of an endpoint, kB",
			func(s Step) string { return bench.InKilobytes(s.EndpointBytes) }),
		r.rowOf("of its interception, kB",
			func(s Step) string { return bench.InKilobytes(s.InterceptedBytes) }),
		r.rowOf("agent's memory for a container, kB",
			func(s Step) string { return bench.InKilobytes(s.AgentBytes) }),
		r.rowOf("an endpoint is made in, ms",
			func(s Step) string { return bench.Number(s.MakeMs.Median) }),
		r.rowOf("agent at rest, processors",
			func(s Step) string { return fmt.Sprintf("%.4f", s.Rest.CPU) }),
		r.rowOf("`socket()`+`connect()` p50 of one container, to host",
			func(s Step) string { return latencyRatio(s.Latency, "one", bench.Host) }),
		r.rowOf("of all containers in turn, to host",
			func(s Step) string { return latencyRatio(s.Latency, "all", bench.Host) }),
		r.rowOf("of all containers in turn, to overlay",
			func(s Step) string { return latencyRatio(s.Latency, "all", bench.Overlay) }),
	}
	report.Grid{Rows: rows}.Markdown(&b)
	most, kilobytes := 0, map[bench.Mode]string{}
	for _, l := range r.Connections {
		if l.Scope == bench.Inter && l.Connections >= most {
			most, kilobytes[l.Mode] = l.Connections, bench.InKilobytes(l.KernelBytes)
		}
	}
	fmt.Fprintf(&b, "\nOf %s live connections between nodes each takes %s kB of kernel memory with both its ends"+
		" (host %s, overlay %s). %s.\n",
		bench.Thousands(most), kilobytes[bench.Heddle], kilobytes[bench.Host], kilobytes[bench.Overlay], r.Machine)
	return b.String(), nil
}
