package policy

import (
	"errors"
	"fmt"
	"io"
	"math"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/plot"
)

// Lengths of the policy drawing, in pixels.
const (
	policyHeight = 470.0
	policyTop    = 116.0 // the axis
	policyBottom = 400.0
)

// policyBin is the width of a bar in seconds: that of a sample.
const policyBin = 0.5

// WriteCapsPlot draws a policy experiment: for each half second what both containers carried, one
// on the other, with the caps as lines.
func WriteCapsPlot(w io.Writer, result CapsResult, text plot.Text) error {
	if len(result.Phases) == 0 || len(result.Samples) == 0 {
		return errors.New("plot: no phases or no samples")
	}
	end := result.Phases[len(result.Phases)-1].EndS
	bins := int(math.Ceil(end / policyBin))
	limited, other := make([]float64, bins), make([]float64, bins)
	top := 0.0
	for _, s := range result.Samples {
		i := int(math.Round(s.AtS/policyBin)) - 1 // a sample is about the half second before
		if i < 0 || i >= bins {
			continue
		}
		if s.Container == result.Limited {
			limited[i] = s.BPS
		} else {
			other[i] = s.BPS
		}
		top = max(top, limited[i]+other[i])
	}
	c := plot.NewCanvas(policyHeight, text)
	p := policyAxes{c: c, end: end, top: 1.08 * top / 1e9}
	p.grid()
	for i := range bins {
		x0, x1 := p.x(float64(i)*policyBin), p.x(float64(i+1)*policyBin)
		low := p.y(limited[i] / 1e9)
		c.Rect(x0+1, low, x1-x0-2, policyBottom-low, plot.Colours[bench.Heddle])
		high := p.y((limited[i] + other[i]) / 1e9)
		c.Rect(x0+1, high, x1-x0-2, low-high, plot.Colours[bench.Overlay])
	}
	p.phases(result)
	c.Line(plot.MarginLeft, policyBottom, plot.Width-plot.MarginRight, policyBottom, plot.InkColour, 1.2, "")
	p.legend(result)
	return c.Finish(w)
}

// policyAxes places seconds and Gbit/s on a canvas.
type policyAxes struct {
	c        *plot.Canvas
	end, top float64
}

func (p policyAxes) x(seconds float64) float64 { return plot.MarginLeft + seconds/p.end*plot.PlotWidth }

func (p policyAxes) y(gbit float64) float64 {
	return policyBottom - gbit/p.top*(policyBottom-policyTop)
}

func (p policyAxes) grid() {
	tick := math.Pow(10, math.Floor(math.Log10(p.top)))
	for p.top/tick < 4 {
		tick /= 2
	}
	for v := 0.0; v <= p.top; v += tick {
		p.c.Line(plot.MarginLeft, p.y(v), plot.Width-plot.MarginRight, p.y(v), plot.GridColour, 1, "")
		p.c.Text(plot.MarginLeft-10, p.y(v)+4, 12, plot.GreyColour, "end", "normal", fmt.Sprintf("%.4g", v))
	}
	p.c.Printf(`<text x="22" y="%.1f" font-size="13" fill="%s" text-anchor="middle" transform="rotate(-90 22 %.1f)">Gbit/s</text>`+"\n",
		(policyTop+policyBottom)/2, plot.GreyColour, (policyTop+policyBottom)/2)
	for s := 0.0; s <= p.end; s += 5 {
		p.c.Text(p.x(s), policyBottom+18, 12, plot.GreyColour, "middle", "normal", fmt.Sprintf("%.0f s", s))
	}
}

// phases marks where the operator changed something, and the caps.
func (p policyAxes) phases(result CapsResult) {
	for _, phase := range result.Phases {
		p.c.Line(p.x(phase.StartS), policyTop-24, p.x(phase.StartS), policyBottom, plot.GreyColour, 1, "2 3")
		p.c.Text(p.x(phase.StartS)+5, policyTop-12, 12, plot.InkColour, "start", "bold", phase.What)
		if phase.CapBPS > 0 {
			y := p.y(phase.CapBPS / 1e9)
			p.c.Line(p.x(phase.StartS), y, p.x(phase.EndS), y, plot.HostColour, 2, "6 4")
		}
	}
}

func (p policyAxes) legend(result CapsResult) {
	y := policyHeight - 22
	p.c.Rect(plot.MarginLeft, y-11, 14, 14, plot.Colours[bench.Heddle])
	p.c.Text(plot.MarginLeft+20, y, 13, plot.InkColour, "start", "normal", result.Limited+", limited")
	p.c.Rect(plot.MarginLeft+170, y-11, 14, 14, plot.Colours[bench.Overlay])
	p.c.Text(plot.MarginLeft+190, y, 13, plot.InkColour, "start", "normal", result.Other)
	p.c.Line(plot.MarginLeft+270, y-5, plot.MarginLeft+294, y-5, plot.HostColour, 2, "6 4")
	p.c.Text(plot.MarginLeft+300, y, 13, plot.InkColour, "start", "normal",
		fmt.Sprintf("cap (a unit is %.3g Gbit/s)", result.UnitBPS/1e9))
}
