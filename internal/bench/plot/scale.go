package plot

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"heddle.dev/heddle/internal/bench"
)

// Lengths of the scale drawing, in pixels: a panel for each scope above, one for latency and one for processor time of
// changes beneath.
const (
	scaleHeight      = 840.0
	scalePanelHeight = 250.0
	scaleGap         = 90.0 // between two panels of a row, for the right one's axis
	scaleFirstRow    = 124.0
	scaleSecondRow   = 494.0
	scaleBelow       = 46.0 // from the axis to its title
)

const scaleHostColour = "#66707a"

// curve is one line of a panel: a value for each number of rules, with whiskers.
type curve struct {
	name   string
	colour string
	dashes string
	rules  []int
	values []bench.Spread
}

// curves is a panel: lines over the number of rules, which are placed at equal distances.
type curves struct {
	c           *canvas
	left, right float64
	top, bottom float64
	title, unit string
	under       string // what the numbers beneath the axis are
	rules       []int
	lines       []curve
	low, high   float64 // of the axis
	firstApart  bool    // what is among no rules is something else
}

// WriteScale draws what connects and changes cost among more and more rules.
func WriteScale(w io.Writer, result bench.ScaleResult, text Text) error {
	if len(result.Connects) == 0 {
		return errors.New("plot: no connects were measured")
	}
	c := &canvas{}
	c.printf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" width="%g" height="%g" `+
		`font-family="'DejaVu Sans', Verdana, Helvetica, Arial, sans-serif" role="img">`+"\n", width, scaleHeight, width, scaleHeight)
	c.printf("<title>%s</title>\n", escape(text.Title))
	c.rect(0, 0, width, scaleHeight, "#ffffff")
	c.text(marginLeft, 36, 22, inkColour, "start", "bold", text.Title)
	c.text(marginLeft, 60, 13, greyColour, "start", "normal", text.Subtitle)
	var rules []int
	for _, r := range result.Connects {
		if !slices.Contains(rules, r.Rules) {
			rules = append(rules, r.Rules)
		}
	}
	half := (plotWidth - scaleGap) / 2
	panel := func(column int, top float64, title, unit string) *curves {
		left := marginLeft + float64(column)*(half+scaleGap)
		return &curves{c: c, left: left, right: left + half, top: top, bottom: top + scalePanelHeight, title: title, unit: unit, under: "rules in force", rules: rules}
	}
	for i, scope := range bench.Scopes {
		p := panel(i, scaleFirstRow, "socket() + connect() "+scope.Title()+", p50 (dotted: p99)", "us")
		p.lines = connectCurves(result, scope)
		p.draw()
	}
	for i, what := range []string{"A change, until both nodes enforce it", "Processor time of agents for a change (n1: with the store)"} {
		p := panel(i, scaleSecondRow, what, "ms")
		p.lines, p.firstApart = changeCurves(result, i == 1), true
		p.draw()
	}
	c.text(marginLeft, scaleHeight-18, 12, greyColour, "start", "normal",
		"Points: medians. Whiskers: smallest and largest round (of changes: change). Every rule is about the measured containers, on both nodes. A rule among 0 is the first one.")
	c.printf("</svg>\n")
	if _, err := io.WriteString(w, c.String()); err != nil {
		return fmt.Errorf("write plot: %w", err)
	}
	return nil
}

// connectCurves gives p50 and p99 of every mode.
func connectCurves(result bench.ScaleResult, scope bench.Scope) (out []curve) {
	for _, mode := range bench.Modes {
		colour, known := colours[mode]
		if !known {
			colour = scaleHostColour
		}
		p50 := curve{name: string(mode), colour: colour}
		p99 := curve{colour: colour, dashes: "2 4"}
		for _, r := range result.Connects {
			if r.Scope != scope || r.Mode != mode {
				continue
			}
			p50.rules, p50.values = append(p50.rules, r.Rules), append(p50.values, r.P50Us)
			p99.rules, p99.values = append(p99.rules, r.Rules), append(p99.values, bench.Spread{Median: r.P99Us.Median, Min: r.P99Us.Median, Max: r.P99Us.Median})
		}
		if len(p50.rules) > 0 {
			out = append(out, p50, p99)
		}
	}
	return out
}

// changeCurves gives what each kind of change took, or its processor time.
func changeCurves(result bench.ScaleResult, cpu bool) (out []curve) {
	kinds := []string{colours[bench.Heddle], colours[bench.Overlay]}
	var names []string
	for _, r := range result.Changes {
		i := slices.Index(names, r.What)
		if i < 0 {
			i, names = len(names), append(names, r.What)
			if cpu {
				out = append(out, curve{name: r.What + ", n2", colour: kinds[i%2]},
					curve{name: r.What + ", n1", colour: kinds[i%2], dashes: "6 4"})
			} else {
				out = append(out, curve{name: r.What, colour: kinds[i%2]})
			}
		}
		if !cpu {
			out[i].rules, out[i].values = append(out[i].rules, r.Rules), append(out[i].values, r.InForceMs)
			continue
		}
		for j, v := range []bench.Spread{r.SecondCPUMs, r.FirstCPUMs} {
			l := &out[2*i+j]
			l.rules, l.values = append(l.rules, r.Rules), append(l.values, v)
		}
	}
	return out
}

// draw places the panel.
func (p *curves) draw() {
	if len(p.lines) == 0 {
		return
	}
	p.scale()
	p.c.text(p.left, p.top-30, 15, inkColour, "start", "bold", p.title)
	p.grid()
	x := p.left
	for _, l := range p.lines {
		if l.name != "" {
			p.c.line(x, p.top-14, x+22, p.top-14, l.colour, 2.4, l.dashes)
			p.c.text(x+27, p.top-10, 12, inkColour, "start", "normal", l.name)
			x += 48 + 6.6*float64(len(l.name))
		}
		p.line(l)
	}
	p.c.line(p.left, p.bottom, p.right, p.bottom, inkColour, 1.2, "")
}

// scale chooses the logarithmic axis: from and to one of 1, 2, 5, 10, 20, ...
func (p *curves) scale() {
	low, high := math.Inf(1), 0.0
	for _, l := range p.lines {
		for _, v := range l.values {
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

func (p *curves) y(v float64) float64 {
	part := math.Log10(max(v, p.low)/p.low) / math.Log10(p.high/p.low)
	return p.bottom - part*(p.bottom-p.top)
}

func (p *curves) x(rules int) float64 {
	return p.left + (0.5+float64(slices.Index(p.rules, rules)))*(p.right-p.left)/float64(len(p.rules))
}

func (p *curves) grid() {
	for v := p.low; v <= p.high*1.001; v = step(v) {
		p.c.line(p.left, p.y(v), p.right, p.y(v), gridColour, 1, "")
		number := fmt.Sprintf("%g", v)
		if v >= 1000 {
			number = bench.Thousands(int(math.Round(v)))
		}
		p.c.text(p.left-8, p.y(v)+4, 12, greyColour, "end", "normal", number)
	}
	for _, n := range p.rules {
		p.c.text(p.x(n), p.bottom+18, 12, greyColour, "middle", "normal", bench.Thousands(n))
	}
	p.c.text((p.left+p.right)/2, p.bottom+scaleBelow-8, 12, greyColour, "middle", "normal", p.under)
	p.c.printf(`<text x="%.1f" y="%.1f" font-size="13" fill="%s" text-anchor="middle" transform="rotate(-90 %.1f %.1f)">%s</text>`+"\n",
		p.left-50, (p.top+p.bottom)/2, greyColour, p.left-50, (p.top+p.bottom)/2, escape(p.unit))
}

func (p *curves) line(l curve) {
	for i, v := range l.values {
		x := p.x(l.rules[i])
		if i > 0 && (l.rules[i-1] > 0 || !p.firstApart) {
			p.c.line(p.x(l.rules[i-1]), p.y(l.values[i-1].Median), x, p.y(v.Median), l.colour, 2.2, l.dashes)
		}
		if v.Max > v.Min {
			p.c.line(x, p.y(v.Min), x, p.y(v.Max), l.colour, 1.2, "")
		}
		p.c.printf(`<circle cx="%.1f" cy="%.1f" r="3.4" fill="%s"/>`+"\n", x, p.y(v.Median), l.colour)
	}
}
