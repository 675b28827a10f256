package bench

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

func (s Spread) Text() string {
	return fmt.Sprintf("%s (%s..%s)", Number(s.Median), Number(s.Min), Number(s.Max))
}

// Thousands writes 100000 as "100,000".
func Thousands(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%s,%03d", Thousands(n/1000), n%1000)
}

func InKilobytes(bytes float64) string { return fmt.Sprintf("%.1f", bytes/1e3) }

// Scale gives the unit people read a value in, and what to divide it by.
func (u Unit) Scale() (name string, divisor float64) {
	switch u {
	case BitsPerSecond:
		return "Gb/s", 1e9
	case Microseconds:
		return "us", 1
	case PerSecond:
		return "k/s", 1e3
	default:
		return string(u), 1
	}
}

// Number writes a value with three significant digits, or with all before the point.
func Number(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.2f", v)
	}
}

// Label names a metric with its unit and the direction that is better.
func (m Metric) Label() string {
	unit, _ := m.Unit.Scale()
	if m.Higher {
		return m.Title + ", " + unit + " ↑"
	}
	return m.Title + ", " + unit + " ↓"
}

// Parts gives the three pieces of a cell: median, spread, ratio.
func (r Result) Parts() [3]string {
	_, divisor := r.Unit.Scale()
	ratio := fmt.Sprintf("%.2fx", r.RatioToHost)
	if r.Mode == Host {
		ratio = ""
	}
	return [3]string{
		Number(r.Median / divisor),
		fmt.Sprintf("(%s..%s)", Number(r.Min/divisor), Number(r.Max/divisor)),
		ratio,
	}
}

// Pad fills s up with blanks on the right.
func Pad(s string, width int) string {
	return s + strings.Repeat(" ", max(0, width-utf8.RuneCountInString(s)))
}

// Spread is a median with what it was taken from.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

func SpreadOf(values []float64) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	sorted := slices.Sorted(slices.Values(values))
	return Spread{Median(sorted), sorted[0], sorted[len(sorted)-1]}
}

// String gives the median with what it was taken from.
func (s Spread) String() string {
	if s.Min == s.Max {
		return Number(s.Median)
	}
	return fmt.Sprintf("%s (%s..%s)", Number(s.Median), Number(s.Min), Number(s.Max))
}

func Better(ratio, than float64, higher bool) bool {
	if higher {
		return ratio > than
	}
	return ratio < than
}
