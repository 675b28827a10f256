package bench

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// String gives the median with what it was taken from.
func (s Spread) String() string {
	if s.Min == s.Max {
		return Number(s.Median)
	}
	return fmt.Sprintf("%s (%s..%s)", Number(s.Median), Number(s.Min), Number(s.Max))
}

// rows gives the tables: each a header and lines.
func (r ScaleResult) rows() (connects, changes, growth [][]string) {
	connects = [][]string{{"scope", "mode", "rules", "p50, us", "p99, us", "p50: ratio to no rules", "to host", "to overlay"}}
	for _, c := range r.Connects {
		connects = append(connects, []string{string(c.Scope), string(c.Mode), fmt.Sprint(c.Rules), c.P50Us.String(), c.P99Us.String(),
			c.RatioToNone.String(), c.RatioToHost.String(), c.RatioToOverlay.String()})
	}
	changes = [][]string{{"change", "among rules", "applied, ms", "in force on both nodes, ms", "CPU of n1's agent with the store, ms", "CPU of n2's agent, ms"}}
	for _, c := range r.Changes {
		changes = append(changes, []string{c.What, fmt.Sprint(c.Rules), c.AppliedMs.String(), c.InForceMs.String(), c.FirstCPUMs.String(), c.SecondCPUMs.String()})
	}
	growth = [][]string{{"rules", "time to bring them in force, s", "memory of n2's agent, MB"}}
	rules := -1
	for _, c := range r.Connects {
		if c.Rules <= rules {
			break // the next mode's
		}
		rules = c.Rules
		grow := ""
		if rules > 0 {
			grow = r.GrowS[rules].String()
		}
		growth = append(growth, []string{fmt.Sprint(rules), grow, r.MemoryMB[rules].String()})
	}
	return connects, changes, growth
}

// WriteScale writes the outcome of a scale experiment as aligned text.
func WriteScale(w io.Writer, r ScaleResult) error {
	var b strings.Builder
	connects, changes, growth := r.rows()
	for i, table := range [][][]string{connects, changes, growth} {
		if i > 0 {
			b.WriteByte('\n')
		}
		t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
		for _, row := range table {
			fmt.Fprintln(t, strings.Join(row, "\t"))
		}
		if err := t.Flush(); err != nil {
			return fmt.Errorf("write table: %w", err)
		}
	}
	return writeAll(w, b.String())
}

// WriteScaleMarkdown writes the same as Markdown tables.
func WriteScaleMarkdown(w io.Writer, r ScaleResult) error {
	var b strings.Builder
	connects, changes, growth := r.rows()
	for i, table := range [][][]string{connects, changes, growth} {
		if i > 0 {
			b.WriteByte('\n')
		}
		for j, row := range table {
			fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
			if j == 0 {
				b.WriteString(strings.Repeat("|---", len(row)) + "|\n")
			}
		}
	}
	return writeAll(w, b.String())
}
