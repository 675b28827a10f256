// Package plot draws the results of package bench as an SVG: for each scope a panel of grouped
// bars, the ratio of each mode to host, with whiskers from the smallest to the largest run.
package plot

import (
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
)

// Lengths of the drawing, in pixels.
const (
	Width       = 1240.0
	MarginLeft  = 78.0
	MarginRight = 28.0
	headHeight  = 96.0
	panelHeight = 380.0 // with its title and labels
	panelTop    = 46.0  // from the panel's top to its axis' top
	panelBottom = 74.0  // labels under the axis
	footHeight  = 44.0
	widestBar   = 38.0
	barGap      = 8.0
	whiskerCap  = 9.0
	PlotWidth   = Width - MarginLeft - MarginRight
)

var Colours = map[bench.Mode]string{
	bench.Overlay: "#d98a3d", bench.Heddle: "#1f6f8b", bench.Native: "#b5563c", bench.Docker: "#8a7fb8", bench.BPF: "#7da453", bench.BPFVXLAN: "#c5a93a", bench.Netkit: "#66707a",
	bench.Bare: "#b9bfc4",
}

const (
	InkColour   = "#1d2329"
	GreyColour  = "#66707a"
	GridColour  = "#e3e7ea"
	HostColour  = "#b3261e"
	lowerColour = "#f6f8fa" // behind the metrics where lower is better
)

// Text stands around the bars.
type Text struct {
	Title    string
	Subtitle string // where, when, how many runs
}

// Subtitle says what a plot of a benchmark that has just run is made from.
func Subtitle(o bench.Options) string {
	return fmt.Sprintf("%d runs of %s each, interleaved; %s", o.Runs, o.Duration, machine.Describe())
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
	height := headHeight + panelHeight*float64(len(panels)) + footHeight
	c := NewCanvas(height, text)
	legend(c, modesOf(panels))
	for i, p := range panels {
		p.draw(c, headHeight+panelHeight*float64(i))
	}
	c.Text(MarginLeft, height-18, 12, GreyColour, "start", "normal",
		"Bars: median of the runs as a ratio to host's median. Whiskers: smallest and largest run; an arrow runs off the scale. "+
			"CPU is the whole machine's.")
	return c.Finish(w)
}

// groupsOf picks the metrics to plot of one scope: first those where higher is better.
func groupsOf(results []bench.Result, scope bench.Scope) []group {
	var groups []group
	for _, r := range results {
		metric, known := bench.MetricNamed(r.Workload, r.Metric)
		if r.Scope != scope || !known || !metric.Plot || r.Mode == bench.Floor { // which is no network
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
			return slices.Index(bench.AllModes, a.Mode) - slices.Index(bench.AllModes, b.Mode)
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
	return slices.DeleteFunc(slices.Clone(bench.AllModes), func(m bench.Mode) bool {
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

func legend(c *Canvas, modes []bench.Mode) {
	x := Width - MarginRight
	for _, m := range slices.Backward(modes) {
		x -= 92
		c.Rect(x, 26, 14, 14, Colours[m])
		c.Text(x+20, 38, 14, InkColour, "start", "normal", string(m))
	}
	x -= 112
	c.Line(x, 33, x+24, 33, HostColour, 2, "6 4")
	c.Text(x+30, 38, 14, InkColour, "start", "normal", "host = 1")
}

// panel is one scope's axis and groups.
type panel struct {
	scope  bench.Scope
	groups []group
}

// maxRatio is the highest ratio that gets its full height: beyond, a single bar would flatten the
// others.
const maxRatio = 4.0

// scale gives the top of the axis and the distance of its ticks. Medians up to maxRatio fit;
// whiskers and higher bars are cut where they would make the others small.
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

func (p panel) draw(c *Canvas, y float64) {
	axisTop, axisBottom := y+panelTop, y+panelHeight-panelBottom
	top, tick := p.scale()
	at := func(ratio float64) float64 { return axisBottom - ratio/top*(axisBottom-axisTop) }
	groupWidth := PlotWidth / float64(len(p.groups))

	c.Text(MarginLeft, y+16, 17, InkColour, "start", "bold", strings.ToUpper(p.scope.Title()[:1])+p.scope.Title()[1:])
	p.drawDirections(c, axisTop, axisBottom, groupWidth)
	for i := 0; float64(i)*tick <= top+tick/2; i++ {
		ratio := float64(i) * tick
		c.Line(MarginLeft, at(ratio), Width-MarginRight, at(ratio), GridColour, 1, "")
		c.Text(MarginLeft-10, at(ratio)+4, 12, GreyColour, "end", "normal", fmt.Sprintf("%.2f", ratio))
	}
	c.Printf(`<text x="22" y="%.1f" font-size="13" fill="%s" text-anchor="middle" transform="rotate(-90 22 %.1f)">ratio to host</text>`+"\n",
		(axisTop+axisBottom)/2, GreyColour, (axisTop+axisBottom)/2)
	for i, g := range p.groups {
		g.draw(c, MarginLeft+groupWidth*(float64(i)+0.5), groupWidth, axisBottom, at, top)
	}
	c.Line(MarginLeft, at(1), Width-MarginRight, at(1), HostColour, 1.6, "6 4")
	c.Line(MarginLeft, axisBottom, Width-MarginRight, axisBottom, InkColour, 1.2, "")
}

// drawDirections says over the groups which way is better.
func (p panel) drawDirections(c *Canvas, axisTop, axisBottom, groupWidth float64) {
	higher := 0
	for _, g := range p.groups {
		if g.metric.Higher {
			higher++
		}
	}
	split := MarginLeft + groupWidth*float64(higher)
	if higher < len(p.groups) {
		c.Rect(split, axisTop-24, Width-MarginRight-split, axisBottom-axisTop+24, lowerColour)
		c.Text((split+Width-MarginRight)/2, axisTop-8, 13, GreyColour, "middle", "normal", "lower is better ↓")
	}
	if higher > 0 {
		c.Text((MarginLeft+split)/2, axisTop-8, 13, GreyColour, "middle", "normal", "higher is better ↑")
	}
}

// draw places the bars of one metric around x, in a width.
func (g group) draw(c *Canvas, x, groupWidth, axisBottom float64, at func(float64) float64, top float64) {
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
		c.Rect(bar, height, barWidth, axisBottom-height, Colours[r.Mode])
		low, high := r.Min/g.host.Median, r.Max/g.host.Median
		c.Whisker(bar+barWidth/2, at(min(low, limit)), at(min(high, limit)), high > limit)
		c.Text(bar+barWidth/2, at(min(high, limit))-6, numbers, InkColour, "middle", "bold", fmt.Sprintf("%.2f", r.RatioToHost))
	}
	unit, divisor := g.metric.Unit.Scale()
	c.Text(x, axisBottom+22, 13, InkColour, "middle", "bold", g.metric.Title)
	c.Text(x, axisBottom+40, 12, GreyColour, "middle", "normal",
		fmt.Sprintf("host: %s %s", bench.Number(g.host.Median/divisor), unit))
}

// Canvas collects SVG elements.
type Canvas struct{ strings.Builder }

// NewCanvas begins a drawing of a height, with its title and subtitle.
func NewCanvas(height float64, text Text) *Canvas {
	c := &Canvas{}
	c.Printf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" width="%g" height="%g" `+
		`font-family="'DejaVu Sans', Verdana, Helvetica, Arial, sans-serif" role="img">`+"\n", Width, height, Width, height)
	c.Printf("<title>%s</title>\n", Escape(text.Title))
	c.Rect(0, 0, Width, height, "#ffffff")
	c.Text(MarginLeft, 36, 22, InkColour, "start", "bold", text.Title)
	c.Text(MarginLeft, 60, 13, GreyColour, "start", "normal", text.Subtitle)
	return c
}

// Finish ends the drawing and writes it.
func (c *Canvas) Finish(w io.Writer) error {
	c.Printf("</svg>\n")
	if _, err := io.WriteString(w, c.String()); err != nil {
		return fmt.Errorf("write plot: %w", err)
	}
	return nil
}

func (c *Canvas) Printf(format string, args ...any) { fmt.Fprintf(&c.Builder, format, args...) }

func (c *Canvas) Rect(x, y, w, h float64, fill string) {
	c.Printf(`<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"/>`+"\n", x, y, w, h, fill)
}

func (c *Canvas) Line(x1, y1, x2, y2 float64, stroke string, thick float64, dashes string) {
	c.Printf(`<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s" stroke-width="%g"`, x1, y1, x2, y2, stroke, thick)
	if dashes != "" {
		c.Printf(` stroke-dasharray="%s"`, dashes)
	}
	c.Printf("/>\n")
}

func (c *Canvas) Text(x, y, size float64, fill, anchor, weight, s string) {
	c.Printf(`<text x="%.1f" y="%.1f" font-size="%g" fill="%s" text-anchor="%s" font-weight="%s">%s</text>`+"\n",
		x, y, size, fill, anchor, weight, Escape(s))
}

// Whisker draws a line with caps; cut shows an arrow instead of the upper cap.
func (c *Canvas) Whisker(x, low, high float64, cut bool) {
	c.Line(x, low, x, high, InkColour, 1.4, "")
	c.Line(x-whiskerCap/2, low, x+whiskerCap/2, low, InkColour, 1.4, "")
	if cut {
		c.Printf(`<path d="M %.1f %.1f L %.1f %.1f L %.1f %.1f Z" fill="%s"/>`+"\n",
			x-whiskerCap/2, high+whiskerCap, x+whiskerCap/2, high+whiskerCap, x, high, InkColour)
		return
	}
	c.Line(x-whiskerCap/2, high, x+whiskerCap/2, high, InkColour, 1.4, "")
}

// Escape makes s safe as text of an XML element.
func Escape(s string) string {
	var b strings.Builder
	// A strings.Builder takes every write.
	_ = xml.EscapeText(&b, []byte(s))
	return b.String()
}
