// Package peers compares Heddle with the networks of others, which package baseline brings up.
package peers

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/report"
)

// Result is what `heddle bench peers` writes: the bench's results, and what the modes were.
type Result struct {
	Machine    string         `json:"machine"`               // kernel, processors, date
	Background float64        `json:"background_processors"` // busy with other things before
	DurationS  float64        `json:"duration_s"`            // of a measurement
	Networks   []Network      `json:"networks"`              // a mode each, in the order of reports
	Results    []bench.Result `json:"results"`
}

// Network says what a mode was made of, or why it was not measured.
type Network struct {
	Mode     bench.Mode `json:"mode"`
	Settings []string   `json:"settings,omitempty"`
	Skipped  string     `json:"skipped,omitempty"`
}

// whatModes says what each mode is.
var whatModes = map[bench.Mode]string{
	bench.Host:     "the node's own namespace",
	bench.Overlay:  "a veth pair, a bridge and VXLAN, as flannel's default",
	bench.Heddle:   "the container's sockets in the node's namespace",
	bench.Native:   "the overlay of nodes that send without a tunnel to each other, as flannel's host-gw",
	bench.Bare:     "the namespace of a host without Heddle: no agent, no rules",
	bench.Docker:   "Docker's networks: overlay (swarm, VXLAN) between nodes, the default bridge on one",
	bench.BPF:      "BPF redirection, native routing between nodes: our reduction of Cilium's data path",
	bench.BPFVXLAN: "the same with VXLAN between nodes",
	bench.Netkit:   "BPF redirection on netkit devices",
	bench.Floor:    "the node's own namespace, each `socket()` trapped and answered by a program that does nothing else",
}

// section writes the generated part of the document: tables of ratios to host, and what was
// measured.
func section(r Result) (string, error) {
	if len(r.Results) == 0 {
		return "", errors.New("no results")
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s; %d runs of %g s each, interleaved; %.1f processors busy with other things before.", r.Machine, r.Results[0].Runs, r.DurationS, r.Background)
	if r.Background > report.TooBusy {
		b.WriteString(" **Measured while other programs kept the machine busy**: the shape, not to judge by.")
	}
	b.WriteString("\n")
	for _, scope := range bench.Scopes {
		writeTable(&b, r, scope)
	}
	if verdicts := goals(r); len(verdicts) > 0 {
		b.WriteByte('\n')
		report.ConnectGoalsGrid(bench.Heddle, verdicts).Markdown(&b)
	}
	b.WriteString("\n| mode | what | settings |\n|---|---|---|\n")
	for _, n := range r.Networks {
		text := strings.Join(n.Settings, "<br>")
		if n.Skipped != "" {
			text = "**not measured:** " + n.Skipped
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", n.Mode, whatModes[n.Mode], strings.ReplaceAll(text, "|", "\\|"))
	}
	b.WriteString("\n")
	return b.String(), nil
}

// writeTable writes one scope's table: a row for each metric, a column for each mode.
func writeTable(b *strings.Builder, r Result, scope bench.Scope) {
	var modes []bench.Mode
	var rows []report.Table
	for _, t := range report.Tables(r.Results) {
		if t.Scope != scope {
			continue
		}
		rows = append(rows, *t)
		for _, m := range t.Modes {
			if !slices.Contains(modes, m) {
				modes = append(modes, m)
			}
		}
	}
	if len(rows) == 0 {
		return
	}
	title := scope.Title()
	fmt.Fprintf(b, "\n| %s |", title)
	for _, m := range modes {
		fmt.Fprintf(b, " %s |", m)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(modes)) + "\n")
	for _, t := range rows {
		for _, metric := range t.Workload.Metrics {
			fmt.Fprintf(b, "| `%s` %s |", t.Workload.Name, metric.Label())
			for _, m := range modes {
				result, measured := t.Cells[metric.Name][m]
				p := result.Parts()
				switch {
				case !measured:
					b.WriteString(" |")
				case m == bench.Host:
					fmt.Fprintf(b, " %s %s |", p[0], p[1])
				default:
					fmt.Fprintf(b, " **%s** %s %s |", strings.TrimSuffix(p[2], "x"), p[0], p[1])
				}
			}
			b.WriteByte('\n')
		}
	}
}

// goals judges Heddle's new connections; UDP has none.
func goals(r Result) []report.ConnectVerdict {
	return report.JudgeConnects(r.Results, bench.Heddle, report.WithoutPool)
}

// summarize writes what the page of results has.
func (c comparison) summarize(d *report.Document) (string, error) {
	var r Result
	if err := d.Read(c.file, &r); err != nil {
		return "", err
	}
	var b strings.Builder
	for _, scope := range bench.Scopes {
		modes := slices.DeleteFunc(slices.Clone(bench.AllModes), func(m bench.Mode) bool {
			return !slices.ContainsFunc(r.Results, func(f bench.Result) bool { return f.Mode == m && f.Scope == scope })
		})
		report.RatioTable(&b, r.Results, []bench.Scope{scope}, modes, c.rows)
		b.WriteByte('\n')
	}
	if verdicts := goals(r); len(verdicts) > 0 {
		fmt.Fprintf(&b, "Heddle's goals without a pool: %s. ", report.SummarizeConnects(verdicts))
	}
	fmt.Fprintf(&b, "%s.\n", r.Machine)
	return b.String(), nil
}
