package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

// LocalResult is what `heddle bench local` found: connections on one node, beside what programs could use there instead.
type LocalResult struct {
	Machine    string  `json:"machine"`    // and the date
	Background float64 `json:"background"` // processors that other programs kept busy before
	// Congestion is the congestion control that the node gives every socket, and so what host and overlay have.
	Congestion string   `json:"congestion"`
	Runs       int      `json:"runs"`
	DurationS  float64  `json:"duration_s"`
	Results    []Result `json:"results"`
}

// LocalWorkloads names what `heddle bench local` measures.
var LocalWorkloads = []string{"stream", "stream-1k", "rr", "rr-16k"}

// The generated part of the document stands between these lines.
const (
	LocalDocBegin = "<!-- `heddle bench local report` writes from here -->\n"
	LocalDocEnd   = "<!-- `heddle bench local report` writes to here -->\n"
)

// WriteLocal writes the results as JSON.
func WriteLocal(w io.Writer, r LocalResult) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(r); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	return nil
}

// ReadLocal reads what WriteLocal wrote.
func ReadLocal(r io.Reader) (result LocalResult, err error) {
	if err := json.NewDecoder(r).Decode(&result); err != nil {
		return LocalResult{}, fmt.Errorf("read results: %w", err)
	}
	return result, nil
}

// WriteLocalDoc writes the tables of the document's section.
func WriteLocalDoc(w io.Writer, r LocalResult) error {
	all := tables(r.Results)
	if len(all) == 0 {
		return fmt.Errorf("write tables: no results")
	}
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s. %d runs of %g s, interleaved; median (smallest..largest) and ratio to host; last, the ratios of the runs. The node gives its sockets %s.",
		r.Machine, r.Runs, r.DurationS, r.Congestion)
	if r.Background > tooBusy {
		fmt.Fprintf(&b, " **Other programs kept %.1f processors busy before it: not to be judged by.**", r.Background)
	}
	b.WriteString("\n\n| |")
	for _, m := range all[0].modes {
		fmt.Fprintf(&b, " %s |", m)
	}
	b.WriteString(" Heddle to host |\n|---|" + strings.Repeat("---|", len(all[0].modes)+1) + "\n")
	for _, t := range all {
		for _, m := range t.workload.Metrics {
			unit, _ := m.Unit.Scale()
			fmt.Fprintf(&b, "| %s, %s |", m.Title, unit)
			for _, mode := range all[0].modes {
				p := t.cells[m.Name][mode].parts()
				fmt.Fprintf(&b, " %s |", strings.TrimSpace(p[0]+" "+p[1]+" "+p[2]))
			}
			fmt.Fprintf(&b, " %s |\n", t.standing(m))
		}
	}
	b.WriteByte('\n')
	return writeAll(w, b.String())
}

// standing says how Heddle's runs of a metric stand to the host's, each to the host's of the same run.
func (t *table) standing(m Metric) string {
	host, heddle := t.cells[m.Name][Host].Values, t.cells[m.Name][Heddle].Values
	if len(host) == 0 || len(host) != len(heddle) {
		return ""
	}
	ratios, ahead := make([]float64, 0, len(host)), 0
	for i, v := range heddle {
		ratios = append(ratios, v/host[i])
		if better(v, host[i], m.Higher) {
			ahead++
		}
	}
	return fmt.Sprintf("%.2f (%.2f..%.2f), better in %d of %d", median(ratios), slices.Min(ratios), slices.Max(ratios), ahead, len(ratios))
}
