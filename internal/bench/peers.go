package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// PeersResult is what `heddle bench peers` writes: the bench's results, and what the modes were.
type PeersResult struct {
	Machine    string    `json:"machine"`               // kernel, processors, date
	Background float64   `json:"background_processors"` // busy with other things before
	DurationS  float64   `json:"duration_s"`            // of a measurement
	Networks   []Network `json:"networks"`              // a mode each, in the order of reports
	Results    []Result  `json:"results"`
}

// Network says what a mode was made of, or why it was not measured.
type Network struct {
	Mode     Mode     `json:"mode"`
	Settings []string `json:"settings,omitempty"`
	Skipped  string   `json:"skipped,omitempty"`
}

// ReadPeers reads a PeersResult's JSON.
func ReadPeers(r io.Reader) (result PeersResult, err error) {
	if err := json.NewDecoder(r).Decode(&result); err != nil {
		return result, fmt.Errorf("read results: %w", err)
	}
	return result, nil
}

// The generated part of the document about peers stands between these lines.
const (
	PeersDocBegin = "<!-- `heddle bench peers report` writes from here -->\n"
	PeersDocEnd   = "<!-- to here: peers -->\n"
)

// whatModes says what each mode is.
var whatModes = map[Mode]string{
	Host:     "the node's own namespace",
	Overlay:  "a veth pair, a bridge and VXLAN, as flannel's default",
	Heddle:   "the container's sockets in the node's namespace",
	Bare:     "the namespace of a host without Heddle: no agent, no rules",
	Docker:   "Docker's networks: overlay (swarm, VXLAN) between nodes, the default bridge on one",
	BPF:      "BPF redirection, native routing between nodes: our reduction of Cilium's data path",
	BPFVXLAN: "the same with VXLAN between nodes",
	Netkit:   "BPF redirection on netkit devices",
}

// WritePeersDoc writes the generated part of the document: tables of ratios to host, and what was measured.
func WritePeersDoc(w io.Writer, r PeersResult) error {
	if len(r.Results) == 0 {
		return errors.New("no results")
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s; %d runs of %g s each, interleaved; %.1f processors busy with other things before.", r.Machine, r.Results[0].Runs, r.DurationS, r.Background)
	if r.Background > tooBusy {
		b.WriteString(" **Measured while other programs kept the machine busy**: the shape, not to judge by.")
	}
	b.WriteString("\n")
	for _, scope := range Scopes {
		writePeersTable(&b, r, scope)
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
	return writeAll(w, b.String())
}

// writePeersTable writes one scope's table: a row for each metric, a column for each mode.
func writePeersTable(b *strings.Builder, r PeersResult, scope Scope) {
	var modes []Mode
	var rows []table
	for _, t := range tables(r.Results) {
		if t.scope != scope {
			continue
		}
		rows = append(rows, *t)
		for _, m := range t.modes {
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
		for _, metric := range t.workload.Metrics {
			fmt.Fprintf(b, "| `%s` %s |", t.workload.Name, metric.label())
			for _, m := range modes {
				p := t.cells[metric.Name][m].parts()
				if m == Host {
					fmt.Fprintf(b, " %s %s |", p[0], p[1])
				} else {
					fmt.Fprintf(b, " **%s** %s %s |", strings.TrimSuffix(p[2], "x"), p[0], p[1])
				}
			}
			b.WriteByte('\n')
		}
	}
}
