package paper

import (
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/histogram"
	"heddle.dev/heddle/internal/bench/plot"
)

// Lengths of the drawings of the paper's figures, in pixels: panels side by side.
const (
	height = 440.0
	top    = 124.0 // the axes
	bottom = 360.0
	gap    = 84.0 // between two panels, for the right one's axis
	bar    = 46.0
)

// The parts of processor time, in the order of the paper's stacks.
var parts = []struct{ metric, name, colour string }{
	{MetricUser, "user", "#9ccb7f"},
	{MetricSystem, "system", "#8a7fb8"},
	{MetricSoftIRQ, "softirq", "#e3c54a"},
}

var colours = map[bench.Mode]string{bench.Host: plot.HostColour, bench.Overlay: plot.Colours[bench.Overlay], bench.Heddle: plot.Colours[bench.Heddle]}

// Figure is one of the paper's figures.
type Figure struct {
	Number string
	Title  string
	apps   []string // that have to be there
	panels func(Result) []panel
}

// panel draws itself between two lengths on a canvas.
type panel interface {
	draw(c *plot.Canvas, left, right float64)
}

// Figures lists the figures that have a drawing; figure 7 is package policy's.
var Figures = []Figure{
	{"6", "Processors for one TCP connection", []string{"iperf3-1g"}, iperfPanels},
	{"8", "memcached: throughput and latency", []string{"memcached"}, func(r Result) []panel {
		return []panel{
			bars{entry: find(r, "memcached"), metric: MetricRate, title: "a) operations, thousand a second", divisor: 1e3},
			bars{entry: find(r, "memcached"), metric: LatencyMetric("all", "mean"), title: "b) mean latency, us", divisor: 1},
		}
	}},
	{"9", "memcached: distribution of latency", []string{"memcached"}, func(r Result) []panel {
		return []panel{cdf{find(r, "memcached"), "set", "SET"}, cdf{find(r, "memcached"), "get", "GET"}}
	}},
	{"10", "memcached: processors", []string{"memcached", "memcached-rate"}, func(r Result) []panel {
		free, fixed := find(r, "memcached"), find(r, "memcached-rate")
		return []panel{
			bars{entry: free, metric: MetricCPUPerOp, title: "as fast as it goes: us an operation", divisor: 1},
			stack{[]Entry{fixed}, rateTitle("machine", fixed)},
			bars{entry: fixed, metric: MetricClientCPU, title: "the same: client's processes", divisor: 1},
			bars{entry: fixed, metric: MetricServerCPU, title: "the same: server's processes", divisor: 1},
		}
	}},
	{"11", "nginx: processors", []string{"nginx-1k", "nginx-1m"}, func(r Result) []panel {
		small, large := find(r, "nginx-1k"), find(r, "nginx-1m")
		return []panel{stack{[]Entry{small}, rateTitle("1 KB", small)}, stack{[]Entry{large}, rateTitle("1 MB", large)}}
	}},
	{"12", "PostgreSQL and Kafka: processors", []string{"pgbench"}, func(r Result) (panels []panel) {
		for _, name := range []string{"pgbench", "kafka"} {
			if e, ok := r.Find(name); ok {
				panels = append(panels, stack{[]Entry{e}, rateTitle(name, e)})
			}
		}
		return panels
	}},
}

func rateTitle(what string, e Entry) string { return fmt.Sprintf("%s, %g/s", what, e.Rate) }

// find gives an entry that is known to be there.
func find(r Result, name string) Entry {
	e, _ := r.Find(name)
	return e
}

// iperfPanels are figure 6a, a line for each mode over the throughput, and 6b, the split at the
// highest rate that the overlay keeps.
func iperfPanels(r Result) []panel {
	entries := IperfEntries(r)
	panels := []panel{lines{entries}}
	if e, ok := HighestKept(entries, bench.Overlay); ok {
		panels = append(panels, stack{[]Entry{e}, "b) split at " + e.Title[len("iperf3, one connection at "):]})
	}
	return panels
}

// Write draws the figure. ErrNotMeasured says that results lack what it shows.
func (f Figure) Write(w io.Writer, result Result) error {
	for _, name := range f.apps {
		if _, ok := result.Find(name); !ok {
			return fmt.Errorf("figure %s: %s: %w", f.Number, name, ErrNotMeasured)
		}
	}
	first := find(result, f.apps[0])
	c := plot.NewCanvas(height, plot.Text{
		Title: fmt.Sprintf("%s (figure %s of the Slim paper)", f.Title, f.Number),
		Subtitle: fmt.Sprintf("Two nodes of one machine; medians of %d rounds of %g s, whiskers: smallest and largest. %s",
			first.Rounds, first.DurationS, first.Machine),
	})
	panels := f.panels(result)
	each := (plot.PlotWidth - gap*float64(len(panels)-1)) / float64(len(panels))
	stacked := false
	for i, p := range panels {
		left := plot.MarginLeft + float64(i)*(each+gap)
		p.draw(c, left, left+each)
		if _, ok := p.(stack); ok {
			stacked = true
		}
	}
	legend(c, stacked)
	return c.Finish(w)
}

// ErrNotMeasured is what a figure that lacks its results gives.
var ErrNotMeasured = errors.New("not measured")

func legend(c *plot.Canvas, stacked bool) {
	x := plot.MarginLeft
	entry := func(name, colour string) {
		c.Rect(x, height-32, 14, 14, colour)
		c.Text(x+20, height-20, 13, plot.InkColour, "start", "normal", name)
		x += 100
	}
	for _, m := range bench.Modes {
		entry(string(m), colours[m])
	}
	if stacked {
		x += 30
		for _, p := range parts {
			entry(p.name, p.colour)
		}
	}
}

// axis is a panel's frame: values from 0 to high.
type axis struct {
	c                 *plot.Canvas
	left, right, high float64
}

func (a axis) y(v float64) float64 { return bottom - v/a.high*(bottom-top) }

// newAxis draws title, grid and numbers, with room above the highest value.
func newAxis(c *plot.Canvas, left, right, highest float64, title string) axis {
	a := axis{c, left, right, 1.12 * highest}
	if a.high <= 0 {
		a.high = 1
	}
	tick := math.Pow(10, math.Floor(math.Log10(a.high)))
	for a.high/tick < 4 {
		tick /= 2
	}
	c.Text(left, top-16, 13, plot.InkColour, "start", "bold", title)
	for v := 0.0; v <= a.high; v += tick {
		c.Line(left, a.y(v), right, a.y(v), plot.GridColour, 1, "")
		c.Text(left-8, a.y(v)+4, 12, plot.GreyColour, "end", "normal", fmt.Sprintf("%.4g", v))
	}
	c.Line(left, bottom, right, bottom, plot.InkColour, 1.2, "")
	return a
}

// bars are one metric in each mode.
type bars struct {
	entry         Entry
	metric, title string
	divisor       float64
}

func (b bars) draw(c *plot.Canvas, left, right float64) {
	highest := 0.0
	for _, m := range b.entry.Modes {
		highest = max(highest, m.Metrics[b.metric].Max/b.divisor)
	}
	a := newAxis(c, left, right, highest, b.title)
	for i, m := range b.entry.Modes {
		v := m.Metrics[b.metric]
		x := left + (right-left)*(float64(i)+0.5)/float64(len(b.entry.Modes))
		wide := min(bar, (right-left)/float64(len(b.entry.Modes))*0.7)
		c.Rect(x-wide/2, a.y(v.Median/b.divisor), wide, bottom-a.y(v.Median/b.divisor), colours[m.Mode])
		c.Whisker(x, a.y(v.Min/b.divisor), a.y(v.Max/b.divisor), false)
		c.Text(x, a.y(v.Max/b.divisor)-6, 12, plot.InkColour, "middle", "bold", bench.Number(v.Median/b.divisor))
		c.Text(x, bottom+18, 12, plot.InkColour, "middle", "normal", string(m.Mode))
	}
}

// stack is the machine's processors by what they did, in each mode of each entry.
type stack struct {
	entries []Entry
	title   string
}

func (s stack) draw(c *plot.Canvas, left, right float64) {
	highest, bars := 0.0, 0
	for _, e := range s.entries {
		for _, m := range e.Modes {
			highest = max(highest, m.Metrics[MetricCPU].Max)
			bars++
		}
	}
	a := newAxis(c, left, right, highest, s.title+": processors")
	i := 0
	for _, e := range s.entries {
		for _, m := range e.Modes {
			x := left + (right-left)*(float64(i)+0.5)/float64(bars)
			wide := min(bar, (right-left)/float64(bars)*0.7)
			sum := 0.0
			for _, p := range parts {
				v := m.Metrics[p.metric].Median
				c.Rect(x-wide/2, a.y(sum+v), wide, a.y(sum)-a.y(sum+v), p.colour)
				sum += v
			}
			v := m.Metrics[MetricCPU]
			c.Whisker(x, a.y(v.Min), a.y(v.Max), false)
			c.Text(x, a.y(max(v.Max, sum))-6, 12, plot.InkColour, "middle", "bold", bench.Number(v.Median))
			c.Rect(x-wide/2, bottom+24, wide, 4, colours[m.Mode])
			c.Text(x, bottom+18, 12, plot.InkColour, "middle", "normal", string(m.Mode))
			i++
		}
	}
}

// lines are processors over the throughput that was reached, a line for each mode.
type lines struct{ entries []Entry }

func (l lines) draw(c *plot.Canvas, left, right float64) {
	fastest, highest := 0.0, 0.0
	for _, e := range l.entries {
		for _, m := range e.Modes {
			fastest = max(fastest, m.Metrics[MetricThroughput].Median/1e9)
			highest = max(highest, m.Metrics[MetricCPU].Max)
		}
	}
	a := newAxis(c, left, right, highest, "a) processors by throughput, Gbit/s")
	x := func(gbit float64) float64 { return left + gbit/(1.05*max(fastest, 1))*(right-left) }
	for v := 0.0; v <= fastest; v += max(1, math.Ceil(fastest/10)) {
		c.Text(x(v), bottom+18, 12, plot.GreyColour, "middle", "normal", fmt.Sprintf("%g", v))
	}
	for _, mode := range bench.Modes {
		lastX, lastY := 0.0, 0.0
		for i, e := range l.entries {
			m, ok := e.In(mode)
			if !ok {
				continue
			}
			v := m.Metrics[MetricCPU]
			atX, atY := x(m.Metrics[MetricThroughput].Median/1e9), a.y(v.Median)
			if i > 0 && lastX > 0 {
				c.Line(lastX, lastY, atX, atY, colours[mode], 2, "")
			}
			c.Line(atX, a.y(v.Min), atX, a.y(v.Max), colours[mode], 1, "")
			c.Rect(atX-3, atY-3, 6, 6, colours[mode])
			lastX, lastY = atX, atY
		}
	}
}

// cdf is a distribution of latency in each mode: the share that is slower goes down by a factor of
// ten a step.
type cdf struct {
	entry       Entry
	kind, title string
}

// cdfNines is how many steps are shown: down to one in a hundred thousand.
const cdfNines = 5

func (d cdf) draw(c *plot.Canvas, left, right float64) {
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
	c.Text(left, top-16, 13, plot.InkColour, "start", "bold", d.title+": share of operations, by latency in us")
	y := func(share float64) float64 {
		nines := min(-math.Log10(max(1-share, 1e-9)), cdfNines)
		return bottom - nines/cdfNines*(bottom-top)
	}
	x := func(us float64) float64 {
		return left + max(0, math.Log10(us/low)/math.Log10(1.2*high/low))*(right-left)
	}
	for i := range cdfNines {
		share := 1 - math.Pow(10, -float64(i))
		c.Line(left, y(share), right, y(share), plot.GridColour, 1, "")
		c.Text(left-8, y(share)+4, 12, plot.GreyColour, "end", "normal", fmt.Sprintf("%.6g %%", 100*share))
	}
	for v := low; v <= high; v *= 10 {
		c.Line(x(v), top, x(v), bottom, plot.GridColour, 1, "")
		c.Text(x(v), bottom+18, 12, plot.GreyColour, "middle", "normal", fmt.Sprintf("%g", v))
	}
	for _, mode := range bench.Modes {
		if len(points[mode]) == 0 {
			continue
		}
		c.Printf(`<polyline fill="none" stroke="%s" stroke-width="2" points="`, colours[mode])
		for _, p := range points[mode] {
			c.Printf("%.1f,%.1f ", x(max(micros(p.At), low)), y(p.Share))
		}
		c.Printf("\"/>\n")
	}
	c.Line(left, bottom, right, bottom, plot.InkColour, 1.2, "")
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
