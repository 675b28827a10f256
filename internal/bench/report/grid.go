package report

import (
	"fmt"
	"io"
	"strings"

	"heddle.dev/heddle/internal/bench"
)

// Grid is a table of a report: the first row is its head.
type Grid struct {
	Title string
	Rows  [][]string
}

// Add appends a row.
func (g *Grid) Add(cells ...string) { g.Rows = append(g.Rows, cells) }

// Text writes the table with columns as wide as their widest cells.
func (g Grid) Text(b *strings.Builder) {
	if g.Title != "" {
		fmt.Fprintln(b, g.Title)
	}
	var widths []int
	for _, row := range g.Rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], len(cell))
		}
	}
	for _, row := range g.Rows {
		line := " "
		for i, cell := range row {
			line += " " + bench.Pad(cell, widths[i]+1)
		}
		fmt.Fprintln(b, strings.TrimRight(line, " "))
	}
}

// Markdown writes the rows as a table of a Markdown document, without the title.
func (g Grid) Markdown(b *strings.Builder) {
	for i, row := range g.Rows {
		fmt.Fprintf(b, "| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			b.WriteString(strings.Repeat("|---", len(row)) + "|\n")
		}
	}
}

// Print writes tables as text without Markdown's quotes, an empty line after each.
func Print(w io.Writer, grids []Grid) error {
	var b strings.Builder
	for _, g := range grids {
		g.Text(&b)
		b.WriteByte('\n')
	}
	return WriteAll(w, strings.ReplaceAll(b.String(), "`", ""))
}

// TooBusy is how many processors other programs may keep busy for results to be judged by.
const TooBusy = 0.2

// WriteAll writes text to a report.
func WriteAll(w io.Writer, s string) error {
	if _, err := io.WriteString(w, s); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}
