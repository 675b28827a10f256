package bench

import (
	"fmt"
	"io"
	"strings"
)

// densityHead is the header of each table, and rows what is beneath.
type densityTable struct {
	title string
	rows  [][]string
}

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

func (r DensityResult) tables() []densityTable { return nil }
