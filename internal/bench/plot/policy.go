package plot

import (
	"errors"
	"fmt"
	"io"
	"math"

	"heddle.dev/heddle/internal/bench"
)

// Lengths of the policy drawing, in pixels.
const (
	policyHeight = 470.0
	policyTop    = 116.0 // the axis
	policyBottom = 400.0
)

// policyBin is the width of a bar in seconds: that of a sample.
const policyBin = 0.5

// WritePolicy draws a policy experiment: for each half second what both containers carried, one on the other, with the
// caps as lines.
func WritePolicy(w io.Writer, result bench.PolicyResult, text Text) error {
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
	c := &canvas{}
	c.printf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" width="%g" height="%g" `+
		`font-family="'DejaVu Sans', Verdana, Helvetica, Arial, sans-serif" role="img">`+"\n", width, policyHeight, width, policyHeight)
	c.printf("<title>%s</title>\n", escape(text.Title))
	c.rect(0, 0, width, policyHeight, "#ffffff")
	c.text(marginLeft, 36, 22, inkColour, "start", "bold", text.Title)
	c.text(marginLeft, 60, 13, greyColour, "start", "normal", text.Subtitle)
	p := policyAxes{c: c, end: end, top: 1.08 * top / 1e9}
	p.grid()
	for i := range bins {
		x0, x1 := p.x(float64(i)*policyBin), p.x(float64(i+1)*policyBin)
		low := p.y(limited[i] / 1e9)
		c.rect(x0+1, low, x1-x0-2, policyBottom-low, colours[bench.Heddle])
		high := p.y((limited[i] + other[i]) / 1e9)
		c.rect(x0+1, high, x1-x0-2, low-high, colours[bench.Overlay])
	}
	p.phases(result)
	c.line(marginLeft, policyBottom, width-marginRight, policyBottom, inkColour, 1.2, "")
	p.legend(result)
	c.printf("</svg>\n")
	if _, err := io.WriteString(w, c.String()); err != nil {
		return fmt.Errorf("write plot: %w", err)
	}
	return nil
}

// policyAxes places seconds and Gbit/s on a canvas.
type policyAxes struct {
	c        *canvas
	end, top float64
}

func (p policyAxes) x(seconds float64) float64 { return marginLeft + seconds/p.end*plotWidth }
func (p policyAxes) y(gbit float64) float64 {
	return policyBottom - gbit/p.top*(policyBottom-policyTop)
}

func (p policyAxes) grid() {
	tick := math.Pow(10, math.Floor(math.Log10(p.top)))
	for p.top/tick < 4 {
		tick /= 2
	}
	for v := 0.0; v <= p.top; v += tick {
		p.c.line(marginLeft, p.y(v), width-marginRight, p.y(v), gridColour, 1, "")
		p.c.text(marginLeft-10, p.y(v)+4, 12, greyColour, "end", "normal", fmt.Sprintf("%.4g", v))
	}
	p.c.printf(`<text x="22" y="%.1f" font-size="13" fill="%s" text-anchor="middle" transform="rotate(-90 22 %.1f)">Gbit/s</text>`+"\n",
		(policyTop+policyBottom)/2, greyColour, (policyTop+policyBottom)/2)
	for s := 0.0; s <= p.end; s += 5 {
		p.c.text(p.x(s), policyBottom+18, 12, greyColour, "middle", "normal", fmt.Sprintf("%.0f s", s))
	}
}

// phases marks where the operator changed something, and the caps.
func (p policyAxes) phases(result bench.PolicyResult) {
	for _, phase := range result.Phases {
		p.c.line(p.x(phase.StartS), policyTop-24, p.x(phase.StartS), policyBottom, greyColour, 1, "2 3")
		p.c.text(p.x(phase.StartS)+5, policyTop-12, 12, inkColour, "start", "bold", phase.What)
		if phase.CapBPS > 0 {
			y := p.y(phase.CapBPS / 1e9)
			p.c.line(p.x(phase.StartS), y, p.x(phase.EndS), y, hostColour, 2, "6 4")
		}
	}
}

func (p policyAxes) legend(result bench.PolicyResult) {
	y := policyHeight - 22
	p.c.rect(marginLeft, y-11, 14, 14, colours[bench.Heddle])
	p.c.text(marginLeft+20, y, 13, inkColour, "start", "normal", result.Limited+", limited")
	p.c.rect(marginLeft+170, y-11, 14, 14, colours[bench.Overlay])
	p.c.text(marginLeft+190, y, 13, inkColour, "start", "normal", result.Other)
	p.c.line(marginLeft+270, y-5, marginLeft+294, y-5, hostColour, 2, "6 4")
	p.c.text(marginLeft+300, y, 13, inkColour, "start", "normal",
		fmt.Sprintf("cap (a unit is %.3g Gbit/s)", result.UnitBPS/1e9))
}
