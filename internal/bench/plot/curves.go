package plot

import (
	"fmt"
	"math"
	"slices"

	"heddle.dev/heddle/internal/bench"
)

// Add appends a point to a line; what was not measured, or came out at or below zero, has no place
// on the axis.
func (l *Curve) Add(at int, v bench.Spread) {
	if v.Median > 0 {
		v.Min = max(v.Min, v.Median/100)
		l.Rules, l.Values = append(l.Rules, at), append(l.Values, v)
	}
}

// Lengths of the scale drawing, in pixels: a panel for each scope above, one for latency and one
// for processor time of changes beneath.
const (
	ScaleHeight      = 840.0
	ScalePanelHeight = 250.0
	ScaleGap         = 90.0 // between two panels of a row, for the right one's axis
	ScaleFirstRow    = 124.0
	ScaleSecondRow   = 494.0
	scaleBelow       = 46.0 // from the axis to its title
)

const ScaleHostColour = "#66707a"

// Curve is one line of a panel: a value for each number of rules, with whiskers.
type Curve struct {
	Name   string
	Colour string
	Dashes string
	Rules  []int
	Values []bench.Spread
}

// Curves is a panel: lines over the number of rules, which are placed at equal distances.
type Curves struct {
	C           *Canvas
	Left, Right float64
	Top, Bottom float64
	Title, Unit string
	Under       string // what the numbers beneath the axis are
	Rules       []int
	Lines       []Curve
	low, high   float64 // of the axis
}

// Draw places the panel.
func (p *Curves) Draw() {
	if len(p.Lines) == 0 {
		return
	}
	p.scale()
	p.C.Text(p.Left, p.Top-30, 15, InkColour, "start", "bold", p.Title)
	p.grid()
	x := p.Left
	for _, l := range p.Lines {
		if l.Name != "" {
			p.C.Line(x, p.Top-14, x+22, p.Top-14, l.Colour, 2.4, l.Dashes)
			p.C.Text(x+27, p.Top-10, 12, InkColour, "start", "normal", l.Name)
			x += 48 + 6.6*float64(len(l.Name))
		}
		p.line(l)
	}
	p.C.Line(p.Left, p.Bottom, p.Right, p.Bottom, InkColour, 1.2, "")
}

// scale chooses the logarithmic axis: from and to one of 1, 2, 5, 10, 20, ...
func (p *Curves) scale() {
	low, high := math.Inf(1), 0.0
	for _, l := range p.Lines {
		for _, v := range l.Values {
			high = max(high, v.Max)
			if v.Min > 0 {
				low = min(low, v.Min)
			}
		}
	}
	if math.IsInf(low, 1) {
		low, high = 1, 10 // nothing but zeros
	}
	p.low = math.Pow(10, math.Floor(math.Log10(low)))
	for step(p.low) <= low {
		p.low = step(p.low)
	}
	for p.high = p.low; p.high < high; {
		p.high = step(p.high)
	}
	p.high = max(p.high, step(p.low))
}

// step gives the next of 1, 2, 5, 10, 20, ... after one of them.
func step(v float64) float64 {
	decade := math.Pow(10, math.Floor(math.Log10(v)+1e-9))
	switch leading := math.Round(v / decade); leading {
	case 1:
		return 2 * decade
	case 2:
		return 5 * decade
	default:
		return 10 * decade
	}
}

func (p *Curves) y(v float64) float64 {
	part := math.Log10(max(v, p.low)/p.low) / math.Log10(p.high/p.low)
	return p.Bottom - part*(p.Bottom-p.Top)
}

func (p *Curves) x(rules int) float64 {
	return p.Left + (0.5+float64(slices.Index(p.Rules, rules)))*(p.Right-p.Left)/float64(len(p.Rules))
}

func (p *Curves) grid() {
	for v := p.low; v <= p.high*1.001; v = step(v) {
		p.C.Line(p.Left, p.y(v), p.Right, p.y(v), GridColour, 1, "")
		number := fmt.Sprintf("%g", v)
		if v >= 1000 {
			number = bench.Thousands(int(math.Round(v)))
		}
		p.C.Text(p.Left-8, p.y(v)+4, 12, GreyColour, "end", "normal", number)
	}
	for _, n := range p.Rules {
		p.C.Text(p.x(n), p.Bottom+18, 12, GreyColour, "middle", "normal", bench.Thousands(n))
	}
	p.C.Text((p.Left+p.Right)/2, p.Bottom+scaleBelow-8, 12, GreyColour, "middle", "normal", p.Under)
	p.C.Printf(`<text x="%.1f" y="%.1f" font-size="13" fill="%s" text-anchor="middle" transform="rotate(-90 %.1f %.1f)">%s</text>`+"\n",
		p.Left-50, (p.Top+p.Bottom)/2, GreyColour, p.Left-50, (p.Top+p.Bottom)/2, Escape(p.Unit))
}

func (p *Curves) line(l Curve) {
	for i, v := range l.Values {
		x := p.x(l.Rules[i])
		if i > 0 {
			p.C.Line(p.x(l.Rules[i-1]), p.y(l.Values[i-1].Median), x, p.y(v.Median), l.Colour, 2.2, l.Dashes)
		}
		if v.Max > v.Min {
			p.C.Line(x, p.y(v.Min), x, p.y(v.Max), l.Colour, 1.2, "")
		}
		p.C.Printf(`<circle cx="%.1f" cy="%.1f" r="3.4" fill="%s"/>`+"\n", x, p.y(v.Median), l.Colour)
	}
}
