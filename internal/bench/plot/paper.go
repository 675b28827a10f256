package plot

import (
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/histogram"
)

// Lengths of the drawings of the paper's figures, in pixels: panels side by side.
const (
	paperHeight = 440.0
	paperTop    = 124.0 // the axes
	paperBottom = 360.0
	paperGap    = 84.0 // between two panels, for the right one's axis
	paperBar    = 46.0
)

// The parts of processor time, in the order of the paper's stacks.
var paperParts = []struct{ metric, name, colour string }{
	{bench.MetricUser, "user", "#9ccb7f"},
	{bench.MetricSystem, "system", "#8a7fb8"},
	{bench.MetricSoftIRQ, "softirq", "#e3c54a"},
}

var paperColours = map[bench.Mode]string{bench.Host: hostColour, bench.Overlay: colours[bench.Overlay], bench.Heddle: colours[bench.Heddle]}

// PaperFigure is one of the paper's figures.
type PaperFigure struct {
	Number string
	Title  string
	apps   []string // that have to be there
	panels func(bench.PaperResult) []paperPanel
}

// paperPanel draws itself between two lengths on a canvas.
type paperPanel interface {
	draw(c *canvas, left, right float64)
}

// PaperFigures lists the figures that have a drawing; figure 7 is WritePolicy's.
var PaperFigures = []PaperFigure{
	{"6", "Processors for one TCP connection", []string{"iperf3-1g"}, iperfPanels},
	{"8", "memcached: throughput and latency", []string{"memcached"}, func(r bench.PaperResult) []paperPanel {
		return []paperPanel{
			bars{entry: find(r, "memcached"), metric: bench.MetricRate, title: "a) operations, thousand a second", divisor: 1e3},
			bars{entry: find(r, "memcached"), metric: bench.LatencyMetric("all", "mean"), title: "b) mean latency, us", divisor: 1},
		}
	}},
	{"9", "memcached: distribution of latency", []string{"memcached"}, func(r bench.PaperResult) []paperPanel {
		return []paperPanel{cdf{find(r, "memcached"), "set", "SET"}, cdf{find(r, "memcached"), "get", "GET"}}
	}},
	{"10", "memcached: processors", []string{"memcached", "memcached-rate"}, func(r bench.PaperResult) []paperPanel {
		free, fixed := find(r, "memcached"), find(r, "memcached-rate")
		return []paperPanel{
			bars{entry: free, metric: bench.MetricCPUPerOp, title: "as fast as it goes: us an operation", divisor: 1},
			stack{[]bench.PaperEntry{fixed}, rateTitle("machine", fixed)},
			bars{entry: fixed, metric: bench.MetricClientCPU, title: "the same: client's processes", divisor: 1},
			bars{entry: fixed, metric: bench.MetricServerCPU, title: "the same: server's processes", divisor: 1},
		}
	}},
	{"11", "nginx: processors", []string{"nginx-1k", "nginx-1m"}, func(r bench.PaperResult) []paperPanel {
		small, large := find(r, "nginx-1k"), find(r, "nginx-1m")
		return []paperPanel{stack{[]bench.PaperEntry{small}, rateTitle("1 KB", small)}, stack{[]bench.PaperEntry{large}, rateTitle("1 MB", large)}}
	}},
	{"12", "PostgreSQL and Kafka: processors", []string{"pgbench"}, func(r bench.PaperResult) (panels []paperPanel) {
		for _, name := range []string{"pgbench", "kafka"} {
			if e, ok := r.Find(name); ok {
				panels = append(panels, stack{[]bench.PaperEntry{e}, rateTitle(name, e)})
			}
		}
		return panels
	}},
}

func rateTitle(what string, e bench.PaperEntry) string { return fmt.Sprintf("%s, %g/s", what, e.Rate) }

// find gives an entry that is known to be there.
func find(r bench.PaperResult, name string) bench.PaperEntry {
	e, _ := r.Find(name)
	return e
}

// iperfPanels are figure 6a, a line for each mode over the throughput, and 6b, the split at the highest rate that the overlay
// keeps.
func iperfPanels(r bench.PaperResult) []paperPanel {
	entries := bench.IperfEntries(r)
	panels := []paperPanel{lines{entries}}
	if e, ok := bench.HighestKept(entries, bench.Overlay); ok {
		panels = append(panels, stack{[]bench.PaperEntry{e}, "b) split at " + e.Title[len("iperf3, one connection at "):]})
	}
	return panels
}

// Write draws the figure. ErrNotMeasured says that results lack what it shows.
func (f PaperFigure) Write(w io.Writer, result bench.PaperResult) error {
	for _, name := range f.apps {
		if _, ok := result.Find(name); !ok {
			return fmt.Errorf("figure %s: %s: %w", f.Number, name, ErrNotMeasured)
		}
	}
	first := find(result, f.apps[0])
	c := &canvas{}
	c.printf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" width="%g" height="%g" `+
		`font-family="'DejaVu Sans', Verdana, Helvetica, Arial, sans-serif" role="img">`+"\n", width, paperHeight, width, paperHeight)
	title := fmt.Sprintf("%s (figure %s of the Slim paper)", f.Title, f.Number)
	c.printf("<title>%s</title>\n", escape(title))
	c.rect(0, 0, width, paperHeight, "#ffffff")
	c.text(marginLeft, 36, 22, inkColour, "start", "bold", title)
	c.text(marginLeft, 60, 13, greyColour, "start", "normal",
		fmt.Sprintf("Two nodes of one machine; medians of %d rounds of %g s, whiskers: smallest and largest. %s", first.Rounds, first.DurationS, first.Machine))
	panels := f.panels(result)
	each := (plotWidth - paperGap*float64(len(panels)-1)) / float64(len(panels))
	stacked := false
	for i, p := range panels {
		left := marginLeft + float64(i)*(each+paperGap)
		p.draw(c, left, left+each)
		if _, ok := p.(stack); ok {
			stacked = true
		}
	}
	paperLegend(c, stacked)
	c.printf("</svg>\n")
	if _, err := io.WriteString(w, c.String()); err != nil {
		return fmt.Errorf("write plot: %w", err)
	}
	return nil
}

// ErrNotMeasured is what a figure that lacks its results gives.
var ErrNotMeasured = errors.New("not measured")

func paperLegend(c *canvas, stacked bool) {
	x := marginLeft
	entry := func(name, colour string) {
		c.rect(x, paperHeight-32, 14, 14, colour)
		c.text(x+20, paperHeight-20, 13, inkColour, "start", "normal", name)
		x += 100
	}
	for _, m := range bench.Modes {
		entry(string(m), paperColours[m])
	}
	if stacked {
		x += 30
		for _, p := range paperParts {
			entry(p.name, p.colour)
		}
	}
}

// axis is a panel's frame: values from 0 to high.
type axis struct {
	c                 *canvas
	left, right, high float64
}

func (a axis) y(v float64) float64 { return paperBottom - v/a.high*(paperBottom-paperTop) }

// newAxis draws title, grid and numbers, with room above the highest value.
func newAxis(c *canvas, left, right, highest float64, title string) axis {
	a := axis{c, left, right, 1.12 * highest}
	if a.high <= 0 {
		a.high = 1
	}
	tick := math.Pow(10, math.Floor(math.Log10(a.high)))
	for a.high/tick < 4 {
		tick /= 2
	}
	c.text(left, paperTop-16, 13, inkColour, "start", "bold", title)
	for v := 0.0; v <= a.high; v += tick {
		c.line(left, a.y(v), right, a.y(v), gridColour, 1, "")
		c.text(left-8, a.y(v)+4, 12, greyColour, "end", "normal", fmt.Sprintf("%.4g", v))
	}
	c.line(left, paperBottom, right, paperBottom, inkColour, 1.2, "")
	return a
}

// bars are one metric in each mode.
type bars struct {
	entry         bench.PaperEntry
	metric, title string
	divisor       float64
}

func (b bars) draw(c *canvas, left, right float64) {
	highest := 0.0
	for _, m := range b.entry.Modes {
		highest = max(highest, m.Metrics[b.metric].Max/b.divisor)
	}
	a := newAxis(c, left, right, highest, b.title)
	for i, m := range b.entry.Modes {
		v := m.Metrics[b.metric]
		x := left + (right-left)*(float64(i)+0.5)/float64(len(b.entry.Modes))
		wide := min(paperBar, (right-left)/float64(len(b.entry.Modes))*0.7)
		c.rect(x-wide/2, a.y(v.Median/b.divisor), wide, paperBottom-a.y(v.Median/b.divisor), paperColours[m.Mode])
		c.whisker(x, a.y(v.Min/b.divisor), a.y(v.Max/b.divisor), false)
		c.text(x, a.y(v.Max/b.divisor)-6, 12, inkColour, "middle", "bold", bench.Number(v.Median/b.divisor))
		c.text(x, paperBottom+18, 12, inkColour, "middle", "normal", string(m.Mode))
	}
}

// stack is the machine's processors by what they did, in each mode of each entry.
type stack struct {
	entries []bench.PaperEntry
	title   string
}

func (s stack) draw(c *canvas, left, right float64) {
	highest, bars := 0.0, 0
	for _, e := range s.entries {
		for _, m := range e.Modes {
			highest = max(highest, m.Metrics[bench.MetricCPU].Max)
			bars++
		}
	}
	a := newAxis(c, left, right, highest, s.title+": processors")
	i := 0
	for _, e := range s.entries {
		for _, m := range e.Modes {
			x := left + (right-left)*(float64(i)+0.5)/float64(bars)
			wide := min(paperBar, (right-left)/float64(bars)*0.7)
			sum := 0.0
			for _, p := range paperParts {
				v := m.Metrics[p.metric].Median
				c.rect(x-wide/2, a.y(sum+v), wide, a.y(sum)-a.y(sum+v), p.colour)
				sum += v
			}
			v := m.Metrics[bench.MetricCPU]
			c.whisker(x, a.y(v.Min), a.y(v.Max), false)
			c.text(x, a.y(max(v.Max, sum))-6, 12, inkColour, "middle", "bold", bench.Number(v.Median))
			c.rect(x-wide/2, paperBottom+24, wide, 4, paperColours[m.Mode])
			c.text(x, paperBottom+18, 12, inkColour, "middle", "normal", string(m.Mode))
			i++
		}
	}
}

// lines are processors over the throughput that was reached, a line for each mode.
type lines struct{ entries []bench.PaperEntry }

func (l lines) draw(c *canvas, left, right float64) {
	fastest, highest := 0.0, 0.0
	for _, e := range l.entries {
		for _, m := range e.Modes {
			fastest = max(fastest, m.Metrics[bench.MetricThroughput].Median/1e9)
			highest = max(highest, m.Metrics[bench.MetricCPU].Max)
		}
	}
	a := newAxis(c, left, right, highest, "a) processors by throughput, Gbit/s")
	x := func(gbit float64) float64 { return left + gbit/(1.05*max(fastest, 1))*(right-left) }
	for v := 0.0; v <= fastest; v += max(1, math.Ceil(fastest/10)) {
		c.text(x(v), paperBottom+18, 12, greyColour, "middle", "normal", fmt.Sprintf("%g", v))
	}
	for _, mode := range bench.Modes {
		lastX, lastY := 0.0, 0.0
		for i, e := range l.entries {
			m, ok := e.In(mode)
			if !ok {
				continue
			}
			v := m.Metrics[bench.MetricCPU]
			atX, atY := x(m.Metrics[bench.MetricThroughput].Median/1e9), a.y(v.Median)
			if i > 0 && lastX > 0 {
				c.line(lastX, lastY, atX, atY, paperColours[mode], 2, "")
			}
			c.line(atX, a.y(v.Min), atX, a.y(v.Max), paperColours[mode], 1, "")
			c.rect(atX-3, atY-3, 6, 6, paperColours[mode])
			lastX, lastY = atX, atY
		}
	}
}

// cdf is a distribution of latency in each mode: the share that is slower goes down by a factor of ten a step.
type cdf struct {
	entry       bench.PaperEntry
	kind, title string
}

// cdfNines is how many steps are shown: down to one in a hundred thousand.
const cdfNines = 5

func (d cdf) draw(c *canvas, left, right float64) {
	low, high := math.Inf(1), 0.0
	points := map[bench.Mode][]histogram.Point{}
	for _, m := range d.entry.Modes {
		h := m.Latency[d.kind]
		if h == nil || h.Count() == 0 {
			continue
		}
		points[m.Mode] = h.Distribution()
		low, high = min(low, micros(h.Quantile(0.001))), max(high, micros(h.Quantile(1)))
	}
	if len(points) == 0 {
		return
	}
	low = math.Pow(10, math.Floor(math.Log10(max(low, 1))))
	c.text(left, paperTop-16, 13, inkColour, "start", "bold", d.title+": share of operations, by latency in us")
	y := func(share float64) float64 {
		nines := min(-math.Log10(max(1-share, 1e-9)), cdfNines)
		return paperBottom - nines/cdfNines*(paperBottom-paperTop)
	}
	x := func(us float64) float64 {
		return left + max(0, math.Log10(us/low)/math.Log10(1.2*high/low))*(right-left)
	}
	for i := range cdfNines {
		share := 1 - math.Pow(10, -float64(i))
		c.line(left, y(share), right, y(share), gridColour, 1, "")
		c.text(left-8, y(share)+4, 12, greyColour, "end", "normal", fmt.Sprintf("%.6g %%", 100*share))
	}
	for v := low; v <= high; v *= 10 {
		c.line(x(v), paperTop, x(v), paperBottom, gridColour, 1, "")
		c.text(x(v), paperBottom+18, 12, greyColour, "middle", "normal", fmt.Sprintf("%g", v))
	}
	for _, mode := range bench.Modes {
		if len(points[mode]) == 0 {
			continue
		}
		c.printf(`<polyline fill="none" stroke="%s" stroke-width="2" points="`, paperColours[mode])
		for _, p := range points[mode] {
			c.printf("%.1f,%.1f ", x(max(micros(p.At), low)), y(p.Share))
		}
		c.printf("\"/>\n")
	}
	c.line(left, paperBottom, right, paperBottom, inkColour, 1.2, "")
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
