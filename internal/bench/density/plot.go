package density

import (
	"errors"
	"fmt"
	"io"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/plot"
)

// height is the drawing's: three rows of two panels.
const height = 1210.0

// colours are those of lines that are no modes.
var colours = []string{"#1f6f8b", "#d98a3d", "#8a7fb8", "#6a9a4f", "#b3261e"}

// WriteDensity draws what many containers and connections cost a node.
func WritePlot(w io.Writer, r Result, text plot.Text) error {
	if len(r.Containers) == 0 {
		return errors.New("plot: no containers were measured")
	}
	c := plot.NewCanvas(height, text)
	half := (plot.PlotWidth - plot.ScaleGap) / 2
	for i, p := range []*plot.Curves{memoryCurves(r), connectCurves(r), liveCurves(r, bench.Inter), liveCurves(r, bench.Intra), pacedCurves(r), kilobyteCurves(r)} {
		p.C = c
		p.Left = plot.MarginLeft + float64(i%2)*(half+plot.ScaleGap)
		p.Right = p.Left + half
		p.Top = plot.ScaleFirstRow + float64(i/2)*(plot.ScaleSecondRow-plot.ScaleFirstRow)
		p.Bottom = p.Top + plot.ScalePanelHeight
		p.Draw()
	}
	c.Text(plot.MarginLeft, height-18, 12, plot.GreyColour, "start", "normal",
		"Logarithmic axes. Points: medians of the rounds, or single measurements. Whiskers: smallest and largest round. A container: namespace, endpoint and an intercepted thread.")
	return c.Finish(w)
}

func single(v float64) bench.Spread { return bench.Spread{Median: v, Min: v, Max: v} }

func modeColour(mode bench.Mode) string {
	if colour, known := plot.Colours[mode]; known {
		return colour
	}
	return plot.ScaleHostColour
}

func withPoints(lines []plot.Curve) (out []plot.Curve) {
	for _, l := range lines {
		if len(l.Rules) > 0 {
			out = append(out, l)
		}
	}
	return out
}

func memoryCurves(r Result) *plot.Curves {
	p := &plot.Curves{Title: "Memory of a container", Unit: "kB", Under: "containers on the node"}
	lines := []plot.Curve{{Name: "namespace", Dashes: "6 4"}, {Name: "endpoint"}, {Name: "interception"}, {Name: "agent"}}
	for i := range lines {
		lines[i].Colour = colours[i]
	}
	for _, s := range r.Containers {
		p.Rules = append(p.Rules, s.Containers)
		for i, bytes := range []float64{s.NamespaceBytes, s.EndpointBytes, s.InterceptedBytes, s.AgentBytes} {
			lines[i].Add(s.Containers, single(bytes/1e3))
		}
	}
	p.Lines = withPoints(lines)
	return p
}

func connectCurves(r Result) *plot.Curves {
	p := &plot.Curves{Title: "socket() + connect() of one container, p50 (dotted: all in turn)", Unit: "us", Under: "containers on the node"}
	for _, mode := range bench.Modes {
		one, all := plot.Curve{Name: string(mode), Colour: modeColour(mode)}, plot.Curve{Colour: modeColour(mode), Dashes: "2 4"}
		for _, s := range r.Containers {
			for _, l := range s.Latency {
				if l.Mode == mode && l.Clients == "one" {
					one.Add(s.Containers, l.P50Us)
				} else if l.Mode == mode {
					all.Add(s.Containers, l.P50Us)
				}
			}
		}
		p.Lines = append(p.Lines, withPoints([]plot.Curve{one, all})...)
	}
	for _, s := range r.Containers {
		p.Rules = append(p.Rules, s.Containers)
	}
	return p
}

// liveSteps are the numbers of live connections.
func liveSteps(r Result) (steps []int) {
	for _, l := range r.Connections {
		if len(steps) == 0 || l.Connections > steps[len(steps)-1] {
			steps = append(steps, l.Connections)
		}
	}
	return steps
}

func liveCurves(r Result, scope bench.Scope) *plot.Curves {
	p := &plot.Curves{Title: "The same " + scope.Title() + " (dotted: p99)", Unit: "us", Under: "live connections", Rules: liveSteps(r)}
	for _, mode := range bench.Modes {
		p50, p99 := plot.Curve{Name: string(mode), Colour: modeColour(mode)}, plot.Curve{Colour: modeColour(mode), Dashes: "2 4"}
		for _, live := range r.Connections {
			if live.Scope != scope || live.Mode != mode {
				continue
			}
			for _, l := range live.Latency {
				if l.Clients == "one" {
					p50.Add(live.Connections, l.P50Us)
					p99.Add(live.Connections, single(l.P99Us.Median))
				}
			}
		}
		p.Lines = append(p.Lines, withPoints([]plot.Curve{p50, p99})...)
	}
	return p
}

func pacedCurves(r Result) *plot.Curves {
	p := &plot.Curves{Title: "The agent, by calls of socket() a second (dotted: of several containers)", Unit: "processors", Under: "calls of socket() a second"}
	for i, s := range r.Containers {
		colour := colours[i%len(colours)]
		one, many := plot.Curve{Name: fmt.Sprintf("%s cont.", bench.Thousands(s.Containers)), Colour: colour}, plot.Curve{Colour: colour, Dashes: "2 4"}
		for _, q := range s.Paced {
			at := int(q.Rate)
			if i == 0 && q.Callers == s.Paced[0].Callers {
				p.Rules = appendNew(p.Rules, at)
			}
			if q.Callers == 1 {
				one.Add(at, single(q.CPU))
			} else {
				many.Add(at, single(q.CPU))
			}
		}
		p.Lines = append(p.Lines, withPoints([]plot.Curve{one, many})...)
	}
	return p
}

func appendNew(list []int, v int) []int {
	for _, have := range list {
		if have == v {
			return list
		}
	}
	return append(list, v)
}

func kilobyteCurves(r Result) *plot.Curves {
	p := &plot.Curves{Title: "Kernel memory of a connection, both ends (dotted: on one node)", Unit: "kB", Under: "live connections"}
	for _, n := range liveSteps(r) {
		if n > 0 {
			p.Rules = append(p.Rules, n)
		}
	}
	for _, mode := range bench.Modes {
		for _, scope := range bench.Scopes {
			l := plot.Curve{Name: string(mode), Colour: modeColour(mode)}
			if scope == bench.Intra {
				l.Name, l.Dashes = "", "2 4"
			}
			for _, live := range r.Connections {
				if live.Scope == scope && live.Mode == mode && live.Connections > 0 {
					l.Add(live.Connections, single(live.KernelBytes/1e3))
				}
			}
			p.Lines = append(p.Lines, withPoints([]plot.Curve{l})...)
		}
	}
	return p
}
