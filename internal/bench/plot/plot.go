// Package plot draws the results of package bench as an SVG: for each scope a panel of grouped bars, the
// ratio of each mode to host, with whiskers from the smallest to the largest run.
package plot

import (
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/bench"
)

// Lengths of the drawing, in pixels.
const (
	width       = 1240.0
	marginLeft  = 78.0
	marginRight = 28.0
	headHeight  = 96.0
	panelHeight = 380.0 // with its title and labels
	panelTop    = 46.0  // from the panel's top to its axis' top
	panelBottom = 74.0  // labels under the axis
	footHeight  = 44.0
	widestBar   = 38.0
	barGap      = 8.0
	whiskerCap  = 9.0
	plotWidth   = width - marginLeft - marginRight
)

var colours = map[bench.Mode]string{
	bench.Overlay: "#d98a3d", bench.Heddle: "#1f6f8b", bench.Docker: "#8a7fb8", bench.BPF: "#7da453", bench.BPFVXLAN: "#c5a93a", bench.Netkit: "#66707a",
	bench.Bare: "#b9bfc4", bench.Reno: "#8a9a5b", bench.Unix: "#8d7aa8",
}

const (
	inkColour   = "#1d2329"
	greyColour  = "#66707a"
	gridColour  = "#e3e7ea"
	hostColour  = "#b3261e"
	lowerColour = "#f6f8fa" // behind the metrics where lower is better
)

// Text stands around the bars.
type Text struct {
	Title    string
	Subtitle string // where, when, how many runs
}

// group is one metric of a panel.
type group struct {
	metric bench.Metric
	host   bench.Result
	bars   []bench.Result // modes other than host
}

// Write draws results. It is an error if there is nothing to compare with host in them.
func Write(w io.Writer, results []bench.Result, text Text) error {
	var panels []panel
	for _, s := range bench.Scopes {
		if groups := groupsOf(results, s); len(groups) > 0 {
			panels = append(panels, panel{scope: s, groups: groups})
		}
	}
	if len(panels) == 0 {
		return fmt.Errorf("plot: no mode beside host, or no workload that is plotted")
	}
	c := &canvas{}
	height := headHeight + panelHeight*float64(len(panels)) + footHeight
	c.printf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" width="%g" height="%g" `+
		`font-family="'DejaVu Sans', Verdana, Helvetica, Arial, sans-serif" role="img">`+"\n", width, height, width, height)
	c.printf("<title>%s</title>\n", escape(text.Title))
	c.rect(0, 0, width, height, "#ffffff")
	c.text(marginLeft, 36, 22, inkColour, "start", "bold", text.Title)
	c.text(marginLeft, 60, 13, greyColour, "start", "normal", text.Subtitle)
	legend(c, modesOf(panels))
	for i, p := range panels {
		p.draw(c, headHeight+panelHeight*float64(i))
	}
	c.text(marginLeft, height-18, 12, greyColour, "start", "normal",
		"Bars: median of the runs as a ratio to host's median. Whiskers: smallest and largest run; an arrow runs off the scale. "+
			"CPU is the whole machine's.")
	c.printf("</svg>\n")
	if _, err := io.WriteString(w, c.String()); err != nil {
		return fmt.Errorf("write plot: %w", err)
	}
	return nil
}

// groupsOf picks the metrics to plot of one scope: first those where higher is better.
func groupsOf(results []bench.Result, scope bench.Scope) []group {
	var groups []group
	for _, r := range results {
		metric, known := bench.MetricNamed(r.Workload, r.Metric)
		if r.Scope != scope || !known || !metric.Plot {
			continue
		}
		i := slices.IndexFunc(groups, func(g group) bool { return g.metric == metric })
		if i < 0 {
			groups = append(groups, group{metric: metric})
			i = len(groups) - 1
		}
		if r.Mode == bench.Host {
			groups[i].host = r
		} else {
			groups[i].bars = append(groups[i].bars, r)
		}
	}
	groups = slices.DeleteFunc(groups, func(g group) bool { return len(g.bars) == 0 || g.host.Median <= 0 })
	for _, g := range groups {
		slices.SortFunc(g.bars, func(a, b bench.Result) int {
			return slices.Index(bench.EveryMode, a.Mode) - slices.Index(bench.EveryMode, b.Mode)
		})
	}
	slices.SortStableFunc(groups, func(a, b group) int {
		if a.metric.Higher == b.metric.Higher {
			return 0
		}
		if a.metric.Higher {
			return -1
		}
		return 1
	})
	return groups
}

// modesOf lists the modes that have bars, in the order of reports.
func modesOf(panels []panel) []bench.Mode {
	return slices.DeleteFunc(slices.Clone(bench.EveryMode), func(m bench.Mode) bool {
		for _, p := range panels {
			for _, g := range p.groups {
				if slices.ContainsFunc(g.bars, func(r bench.Result) bool { return r.Mode == m }) {
					return false
				}
			}
		}
		return true
	})
}

func legend(c *canvas, modes []bench.Mode) {
	x := width - marginRight
	for _, m := range slices.Backward(modes) {
		x -= 92
		c.rect(x, 26, 14, 14, colours[m])
		c.text(x+20, 38, 14, inkColour, "start", "normal", string(m))
	}
	x -= 112
	c.line(x, 33, x+24, 33, hostColour, 2, "6 4")
	c.text(x+30, 38, 14, inkColour, "start", "normal", "host = 1")
}

// panel is one scope's axis and groups.
type panel struct {
	scope  bench.Scope
	groups []group
}

// maxRatio is the highest ratio that gets its full height: beyond, a single bar would flatten the others.
const maxRatio = 4.0

// scale gives the top of the axis and the distance of its ticks. Medians up to maxRatio fit; whiskers
// and higher bars are cut where they would make the others small.
func (p panel) scale() (top, tick float64) {
	medians, whiskers := 1.0, 1.0
	for _, g := range p.groups {
		for _, r := range g.bars {
			medians = max(medians, r.RatioToHost)
			whiskers = max(whiskers, r.Max/g.host.Median)
		}
	}
	// Room for the number above a bar is a tenth of the axis.
	medians = min(medians, maxRatio)
	top = 1.1 * min(max(1.12*medians, whiskers), 1.4*medians)
	tick = 0.25
	for top/tick > 8 {
		tick *= 2
	}
	return math.Ceil(top/tick) * tick, tick
}

func (p panel) draw(c *canvas, y float64) {
	axisTop, axisBottom := y+panelTop, y+panelHeight-panelBottom
	top, tick := p.scale()
	at := func(ratio float64) float64 { return axisBottom - ratio/top*(axisBottom-axisTop) }
	groupWidth := plotWidth / float64(len(p.groups))

	c.text(marginLeft, y+16, 17, inkColour, "start", "bold", strings.ToUpper(p.scope.Title()[:1])+p.scope.Title()[1:])
	p.drawDirections(c, axisTop, axisBottom, groupWidth)
	for i := 0; float64(i)*tick <= top+tick/2; i++ {
		ratio := float64(i) * tick
		c.line(marginLeft, at(ratio), width-marginRight, at(ratio), gridColour, 1, "")
		c.text(marginLeft-10, at(ratio)+4, 12, greyColour, "end", "normal", fmt.Sprintf("%.2f", ratio))
	}
	c.printf(`<text x="22" y="%.1f" font-size="13" fill="%s" text-anchor="middle" transform="rotate(-90 22 %.1f)">ratio to host</text>`+"\n",
		(axisTop+axisBottom)/2, greyColour, (axisTop+axisBottom)/2)
	for i, g := range p.groups {
		g.draw(c, marginLeft+groupWidth*(float64(i)+0.5), groupWidth, axisBottom, at, top)
	}
	c.line(marginLeft, at(1), width-marginRight, at(1), hostColour, 1.6, "6 4")
	c.line(marginLeft, axisBottom, width-marginRight, axisBottom, inkColour, 1.2, "")
}

// drawDirections says over the groups which way is better.
func (p panel) drawDirections(c *canvas, axisTop, axisBottom, groupWidth float64) {
	higher := 0
	for _, g := range p.groups {
		if g.metric.Higher {
			higher++
		}
	}
	split := marginLeft + groupWidth*float64(higher)
	if higher < len(p.groups) {
		c.rect(split, axisTop-24, width-marginRight-split, axisBottom-axisTop+24, lowerColour)
		c.text((split+width-marginRight)/2, axisTop-8, 13, greyColour, "middle", "normal", "lower is better ↓")
	}
	if higher > 0 {
		c.text((marginLeft+split)/2, axisTop-8, 13, greyColour, "middle", "normal", "higher is better ↑")
	}
}

// draw places the bars of one metric around x, in a width.
func (g group) draw(c *canvas, x, groupWidth, axisBottom float64, at func(float64) float64, top float64) {
	n, gap := float64(len(g.bars)), barGap
	barWidth := min(widestBar, (0.9*groupWidth-(n-1)*gap)/n)
	numbers := 12.0
	if barWidth < widestBar {
		gap, numbers = 2, 10
		barWidth = min(widestBar, (0.94*groupWidth-(n-1)*gap)/n)
	}
	left := x - (n*barWidth+(n-1)*gap)/2
	for i, r := range g.bars {
		bar := left + float64(i)*(barWidth+gap)
		limit := top * 0.93 // leaves room for the number
		height := at(min(r.RatioToHost, limit))
		c.rect(bar, height, barWidth, axisBottom-height, colours[r.Mode])
		low, high := r.Min/g.host.Median, r.Max/g.host.Median
		c.whisker(bar+barWidth/2, at(min(low, limit)), at(min(high, limit)), high > limit)
		c.text(bar+barWidth/2, at(min(high, limit))-6, numbers, inkColour, "middle", "bold", fmt.Sprintf("%.2f", r.RatioToHost))
	}
	unit, divisor := g.metric.Unit.Scale()
	c.text(x, axisBottom+22, 13, inkColour, "middle", "bold", g.metric.Title)
	c.text(x, axisBottom+40, 12, greyColour, "middle", "normal",
		fmt.Sprintf("host: %s %s", bench.Number(g.host.Median/divisor), unit))
}

// canvas collects SVG elements.
type canvas struct{ strings.Builder }

func (c *canvas) printf(format string, args ...any) { fmt.Fprintf(&c.Builder, format, args...) }

func (c *canvas) rect(x, y, w, h float64, fill string) {
	c.printf(`<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"/>`+"\n", x, y, w, h, fill)
}

func (c *canvas) line(x1, y1, x2, y2 float64, stroke string, thick float64, dashes string) {
	c.printf(`<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s" stroke-width="%g"`, x1, y1, x2, y2, stroke, thick)
	if dashes != "" {
		c.printf(` stroke-dasharray="%s"`, dashes)
	}
	c.printf("/>\n")
}

func (c *canvas) text(x, y, size float64, fill, anchor, weight, s string) {
	c.printf(`<text x="%.1f" y="%.1f" font-size="%g" fill="%s" text-anchor="%s" font-weight="%s">%s</text>`+"\n",
		x, y, size, fill, anchor, weight, escape(s))
}

// whisker draws a line with caps; cut shows an arrow instead of the upper cap.
func (c *canvas) whisker(x, low, high float64, cut bool) {
	c.line(x, low, x, high, inkColour, 1.4, "")
	c.line(x-whiskerCap/2, low, x+whiskerCap/2, low, inkColour, 1.4, "")
	if cut {
		c.printf(`<path d="M %.1f %.1f L %.1f %.1f L %.1f %.1f Z" fill="%s"/>`+"\n",
			x-whiskerCap/2, high+whiskerCap, x+whiskerCap/2, high+whiskerCap, x, high, inkColour)
		return
	}
	c.line(x-whiskerCap/2, high, x+whiskerCap/2, high, inkColour, 1.4, "")
}

// escape makes s safe as text of an XML element.
func escape(s string) string {
	var b strings.Builder
	// A strings.Builder takes every write.
	_ = xml.EscapeText(&b, []byte(s))
	return b.String()
}
