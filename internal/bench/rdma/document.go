package rdma

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/report"
)

// File is the name of the committed results.
const File = "rdma.json"

// notYet stands where results will, until a run is committed.
const notYet = "Not measured yet: no run of `make bench-rdma` is committed.\n"

// size writes bytes as perftest's pages do.
func size(bytes int) string {
	switch {
	case bytes >= 1<<20:
		return fmt.Sprintf("%d MiB", bytes>>20)
	case bytes >= 1<<10:
		return fmt.Sprintf("%d KiB", bytes>>10)
	}
	return fmt.Sprintf("%d B", bytes)
}

// cell writes a metric of a row in another unit; nothing if it was not measured.
func (row Row) cell(metric string, divisor float64) string {
	s, ok := row.Metrics[metric]
	if !ok {
		return ""
	}
	if row.brief {
		return bench.Number(s.Median / divisor)
	}
	return bench.Spread{Median: s.Median / divisor, Min: s.Min / divisor, Max: s.Max / divisor}.Text()
}

// grids are the tables in full, for terminal and document.
func (r Result) grids() []report.Grid {
	speed := report.Grid{Title: "Throughput, and processor time of all of the machine, the routers and both programs",
		Rows: [][]string{{"what", "MB/s", "thousand messages/s", "machine, us a message", "routers", "programs", "machine, s/GB", "routers, s/GB"}}}
	latency := report.Grid{Title: "Latency of one way, microseconds",
		Rows: [][]string{{"what", "typical", "p99", "machine, us a message", "routers", "programs"}}}
	for _, row := range r.Rows {
		name := fmt.Sprintf("`%s`", row.Case)
		if row.isApp() || row.CapBPS > 0 {
			continue
		}
		if _, ok := row.Metrics[latencyUs]; ok {
			latency.Add(name, row.cell(latencyUs, 1), row.cell(latencyP99Us, 1), row.cell(machineUs, 1), row.cell(routerUs, 1), row.cell(programsUs, 1))
			continue
		}
		perGB := float64(row.Bytes) / 1e3 // microseconds a message to seconds for 1e9 bytes
		speed.Add(name, row.cell(bytesPerS, 1e6), row.cell(messagesPerS, 1e3), row.cell(machineUs, 1), row.cell(routerUs, 1), row.cell(programsUs, 1),
			row.cell(machineUs, perGB), row.cell(routerUs, perGB))
	}
	return append([]report.Grid{speed, latency}, r.figures()...)
}

// figures are the tables by subject, of what was measured, and the goals.
func (r Result) figures() []report.Grid {
	grids := []report.Grid{r.pairs(), r.caps(), r.sockets(), r.jobs()}
	return append(slices.DeleteFunc(grids, func(g report.Grid) bool {
		return !slices.ContainsFunc(g.Rows[1:], func(cells []string) bool { return strings.Join(cells[1:], "") != "" })
	}), r.goals())
}

// isApp says that a case is a program for sockets or for MPI, which say other things.
func (c Case) isApp() bool {
	name, _, _ := strings.Cut(c.Program, "-")
	return name == "netpipe" || name == "train" || name == "shuffle"
}

// row gives what was found in a case; nothing if it was not measured.
func (r Result) row(c Case) Row {
	for _, row := range r.Rows {
		if row.Case == c {
			row.brief = r.brief
			return row
		}
	}
	return Row{}
}

var bothScopes = []bench.Scope{bench.Intra, bench.Inter}

// pairs is figure 11: what many queue pairs move together, and how evenly.
func (r Result) pairs() report.Grid {
	g := report.Grid{Title: fmt.Sprintf("Queue pairs: WRITE of %s by all of them together, and Jain's index of what each did", size(pairBytes)),
		Rows: [][]string{{"queue pairs", "MB/s on one node", "Jain's index", "MB/s between nodes", "Jain's index"}}}
	for _, n := range Pairs {
		cells := []string{fmt.Sprint(n)}
		for _, scope := range bothScopes {
			row := r.row(Case{Program: "ib_write_bw", Scope: scope, Bytes: pairBytes, QPs: n})
			cells = append(cells, row.cell(bytesPerS, 1e6), row.cell(jain, 1))
		}
		g.Add(cells...)
	}
	return g
}

// caps is figure 13: what caps let pass, and the processors that are busy meanwhile.
func (r Result) caps() report.Grid {
	g := report.Grid{Title: "Caps of the sender: what passes, as a part of the cap, and processor time of the machine and the routers, s/GB",
		Rows: [][]string{{"cap", "on one node", "machine", "routers", "between nodes", "machine", "routers"}}}
	for i, bps := range Caps {
		cells := []string{capText(bps)}
		for _, scope := range bothScopes {
			row := r.row(capped(scope)[i])
			perGB := float64(row.Bytes) / 1e3
			cells = append(cells, row.cell(bytesPerS, float64(bps)/8), row.cell(machineUs, perGB), row.cell(routerUs, perGB))
		}
		g.Add(cells...)
	}
	return g
}

// sockets is figure 14, by NetPIPE.
func (r Result) sockets() report.Grid {
	g := report.Grid{Title: "NetPIPE to and fro: one way of 64 B in microseconds, and MB/s by messages of 64 KiB",
		Rows: [][]string{{"sockets", "us on one node", "MB/s", "us between nodes", "MB/s"}}}
	for _, s := range sockets {
		cells := []string{s[1]}
		for _, scope := range bothScopes {
			c := Case{Program: s[0], Scope: scope, Bytes: 64}
			cells = append(cells, r.row(c).cell(latencyUs, 1))
			c.Bytes = 64 << 10
			cells = append(cells, r.row(c).cell(bytesPerS, 1e6))
		}
		g.Add(cells...)
	}
	return g
}

var sockets = [][2]string{{"netpipe", "rsocket (librspreload)"}, {"netpipe-overlay", "TCP of the overlay"}, {"netpipe-host", "TCP of the host"}}

// jobs are figures 15 and 16: steps of MPI jobs.
func (r Result) jobs() report.Grid {
	g := report.Grid{Title: "A step of two MPI processes, milliseconds",
		Rows: [][]string{{"job", "verbs on one node", "TCP of the overlay", "verbs between nodes", "TCP of the overlay"}}}
	for _, job := range [][2]string{{"train", "training: 8 MiB of gradients added up"}, {"shuffle", "shuffle: half of 8 MiB each way"}} {
		cells, inMPI := []string{job[1]}, []string{"of it in MPI's calls"}
		for _, scope := range bothScopes {
			for _, end := range []string{"", "-overlay"} {
				row := r.row(Case{Program: job[0] + end, Scope: scope, Bytes: 8 << 20})
				cells, inMPI = append(cells, row.cell(stepMs, 1)), append(inMPI, row.cell(mpiMs, 1))
			}
		}
		g.Add(cells...)
		// Runs of before 29 November 2026 do not say it.
		if strings.Join(inMPI[1:], "") != "" {
			g.Add(inMPI...)
		}
	}
	return g
}

func (r Result) goals() report.Grid {
	g := report.Grid{Title: "Goals", Rows: [][]string{{"goal", "found", ""}}}
	for _, goal := range r.Goals() {
		g.Add(goal.Wanted, goal.Found, goal.Verdict)
	}
	return g
}

// about says where the figures are from.
func (r Result) about() string {
	text := fmt.Sprintf("%s; %d runs of %g s each, interleaved; other programs kept %.1f processors busy before.", r.Machine, r.Runs, r.DurationS, r.Background)
	if r.Background > machine.QuietMachine {
		text += " **That is a busy machine: not to judge by.**"
	}
	return text
}

func printResult(w io.Writer, r Result) error {
	return errors.Join(report.Print(w, r.grids()), report.WriteAll(w, r.about()+"\n"))
}

// committed reads the results, if there are some.
func committed(d *report.Document) (r Result, ok bool, err error) {
	err = d.Read(File, &r)
	if errors.Is(err, os.ErrNotExist) {
		return r, false, nil
	}
	return r, err == nil, err
}

func writeReport(d *report.Document) error {
	r, ok, err := committed(d)
	if err != nil {
		return err
	}
	if !ok {
		return d.Section("", "\n"+notYet+"\n")
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s\n", r.about())
	for _, g := range r.grids() {
		fmt.Fprintf(&b, "\n%s:\n\n", g.Title)
		g.Markdown(&b)
	}
	return d.Section("", b.String()+"\n")
}

// summarize writes throughput by size and latency, of medians, and the goals.
func summarize(d *report.Document) (string, error) {
	r, ok, err := committed(d)
	if err != nil {
		return "", err
	}
	if !ok {
		return notYet, nil
	}
	r.brief = true
	number := func(c Case, metric string, divisor float64) string {
		if v := r.of(c, metric); v > 0 {
			return bench.Number(v / divisor)
		}
		return ""
	}
	speed := report.Grid{Rows: [][]string{{"GB/s of messages of", "2 KiB", "8 KiB", "64 KiB", "1 MiB"}}}
	add := func(title string, c Case) {
		cells := []string{title}
		for _, c.Bytes = range []int{2 << 10, 8 << 10, 64 << 10, 1 << 20} {
			cells = append(cells, number(c, bytesPerS, 1e9))
		}
		if strings.Join(cells[1:], "") != "" {
			speed.Add(cells...)
		}
	}
	add("a copy by one thread, between two buffers", Case{Program: "copy"})
	add("by one thread that another process asks for each", Case{Program: "copy-asked"})
	add("between two times 64", Case{Program: "copy", QPs: 64})
	add("all over two times 64 MiB", Case{Program: "copy-far"})
	latency := report.Grid{Rows: [][]string{{"one way, us", "2 B", "4 KiB"}}}
	for _, scope := range []bench.Scope{bench.Intra, bench.Inter} {
		add("TCP of the host "+scope.Title(), Case{Program: "tcp", Scope: scope})
		for _, verb := range []string{"write", "send"} {
			title := strings.ToUpper(verb) + " " + scope.Title()
			for _, qps := range []int{1, 64} {
				if verb == "send" && qps > 1 {
					continue
				}
				add(fmt.Sprintf("%s, QPs: %d", title, qps), Case{Program: "ib_" + verb + "_bw", Scope: scope, QPs: qps})
			}
			c := Case{Program: "ib_" + verb + "_lat", Scope: scope, QPs: 1}
			small, page := c, c
			small.Bytes, page.Bytes = 2, 4<<10
			latency.Add(title, number(small, latencyUs, 1), number(page, latencyUs, 1))
		}
	}
	latency.Add("two processes that spin", number(Case{Program: "spin", Bytes: 4}, latencyUs, 1), "")
	var b strings.Builder
	for _, g := range append([]report.Grid{speed, latency}, r.figures()...) {
		if g.Title != "" {
			fmt.Fprintf(&b, "%s:\n\n", g.Title)
		}
		g.Markdown(&b)
		b.WriteByte('\n')
	}
	return b.String() + r.about() + "\n", nil
}
