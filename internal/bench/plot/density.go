package plot

import (
	"errors"
	"fmt"
	"io"

	"heddle.dev/heddle/internal/bench"
)

// densityHeight is the drawing's: three rows of two panels.
const densityHeight = 1210.0

// densityColours are those of lines that are no modes.
var densityColours = []string{"#1f6f8b", "#d98a3d", "#8a7fb8", "#6a9a4f", "#b3261e"}

// WriteDensity draws what many containers and connections cost a node.
func WriteDensity(w io.Writer, r bench.DensityResult, text Text) error {
	if len(r.Containers) == 0 {
		return errors.New("plot: no containers were measured")
	}
	c := &canvas{}
	c.printf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" width="%g" height="%g" `+
		`font-family="'DejaVu Sans', Verdana, Helvetica, Arial, sans-serif" role="img">`+"\n", width, densityHeight, width, densityHeight)
	c.printf("<title>%s</title>\n", escape(text.Title))
	c.rect(0, 0, width, densityHeight, "#ffffff")
	c.text(marginLeft, 36, 22, inkColour, "start", "bold", text.Title)
	c.text(marginLeft, 60, 13, greyColour, "start", "normal", text.Subtitle)
	half := (plotWidth - scaleGap) / 2
	for i, p := range []*curves{densityMemory(r), densityConnects(r), densityLive(r, bench.Inter), densityLive(r, bench.Intra), densityPaced(r), densityKilobytes(r)} {
		p.c = c
		p.left = marginLeft + float64(i%2)*(half+scaleGap)
		p.right = p.left + half
		p.top = scaleFirstRow + float64(i/2)*(scaleSecondRow-scaleFirstRow)
		p.bottom = p.top + scalePanelHeight
		p.draw()
	}
	c.text(marginLeft, densityHeight-18, 12, greyColour, "start", "normal",
		"Logarithmic axes. Points: medians of the rounds, or single measurements. Whiskers: smallest and largest round. A container: namespace, endpoint and an intercepted thread.")
	c.printf("</svg>\n")
	if _, err := io.WriteString(w, c.String()); err != nil {
		return fmt.Errorf("write plot: %w", err)
	}
	return nil
}

func single(v float64) bench.Spread { return bench.Spread{Median: v, Min: v, Max: v} }

func modeColour(mode bench.Mode) string {
	if colour, known := colours[mode]; known {
		return colour
	}
	return scaleHostColour
}

// add appends a point to a line; what was not measured, or came out at or below zero, has no place on the axis.
func (l *curve) add(at int, v bench.Spread) {
	if v.Median > 0 {
		v.Min = max(v.Min, v.Median/100)
		l.rules, l.values = append(l.rules, at), append(l.values, v)
	}
}

func withPoints(lines []curve) (out []curve) {
	for _, l := range lines {
		if len(l.rules) > 0 {
			out = append(out, l)
		}
	}
	return out
}

func densityMemory(r bench.DensityResult) *curves {
	p := &curves{title: "Memory of a container", unit: "kB", under: "containers on the node"}
	lines := []curve{{name: "namespace", dashes: "6 4"}, {name: "endpoint"}, {name: "interception"}, {name: "agent"}}
	for i := range lines {
		lines[i].colour = densityColours[i]
	}
	for _, s := range r.Containers {
		p.rules = append(p.rules, s.Containers)
		for i, bytes := range []float64{s.NamespaceBytes, s.EndpointBytes, s.InterceptedBytes, s.AgentBytes} {
			lines[i].add(s.Containers, single(bytes/1e3))
		}
	}
	p.lines = withPoints(lines)
	return p
}

func densityConnects(r bench.DensityResult) *curves {
	p := &curves{title: "socket() + connect() of one container, p50 (dotted: all in turn)", unit: "us", under: "containers on the node"}
	for _, mode := range bench.Modes {
		one, all := curve{name: string(mode), colour: modeColour(mode)}, curve{colour: modeColour(mode), dashes: "2 4"}
		for _, s := range r.Containers {
			for _, l := range s.Latency {
				if l.Mode == mode && l.Clients == "one" {
					one.add(s.Containers, l.P50Us)
				} else if l.Mode == mode {
					all.add(s.Containers, l.P50Us)
				}
			}
		}
		p.lines = append(p.lines, withPoints([]curve{one, all})...)
	}
	for _, s := range r.Containers {
		p.rules = append(p.rules, s.Containers)
	}
	return p
}

// liveSteps are the numbers of live connections.
func liveSteps(r bench.DensityResult) (steps []int) {
	for _, l := range r.Connections {
		if len(steps) == 0 || l.Connections > steps[len(steps)-1] {
			steps = append(steps, l.Connections)
		}
	}
	return steps
}

func densityLive(r bench.DensityResult, scope bench.Scope) *curves {
	p := &curves{title: "The same " + scope.Title() + " (dotted: p99)", unit: "us", under: "live connections", rules: liveSteps(r)}
	for _, mode := range bench.Modes {
		p50, p99 := curve{name: string(mode), colour: modeColour(mode)}, curve{colour: modeColour(mode), dashes: "2 4"}
		for _, live := range r.Connections {
			if live.Scope != scope || live.Mode != mode {
				continue
			}
			for _, l := range live.Latency {
				if l.Clients == "one" {
					p50.add(live.Connections, l.P50Us)
					p99.add(live.Connections, single(l.P99Us.Median))
				}
			}
		}
		p.lines = append(p.lines, withPoints([]curve{p50, p99})...)
	}
	return p
}

func densityPaced(r bench.DensityResult) *curves {
	p := &curves{title: "The agent, by calls of socket() a second (dotted: of several containers)", unit: "processors", under: "calls of socket() a second"}
	for i, s := range r.Containers {
		colour := densityColours[i%len(densityColours)]
		one, many := curve{name: fmt.Sprintf("%s cont.", bench.Thousands(s.Containers)), colour: colour}, curve{colour: colour, dashes: "2 4"}
		for _, q := range s.Paced {
			at := int(q.Rate)
			if i == 0 && q.Callers == s.Paced[0].Callers {
				p.rules = appendNew(p.rules, at)
			}
			if q.Callers == 1 {
				one.add(at, single(q.CPU))
			} else {
				many.add(at, single(q.CPU))
			}
		}
		p.lines = append(p.lines, withPoints([]curve{one, many})...)
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

func densityKilobytes(r bench.DensityResult) *curves {
	p := &curves{title: "Kernel memory of a connection, both ends (dotted: on one node)", unit: "kB", under: "live connections"}
	for _, n := range liveSteps(r) {
		if n > 0 {
			p.rules = append(p.rules, n)
		}
	}
	for _, mode := range bench.Modes {
		for _, scope := range bench.Scopes {
			l := curve{name: string(mode), colour: modeColour(mode)}
			if scope == bench.Intra {
				l.name, l.dashes = "", "2 4"
			}
			for _, live := range r.Connections {
				if live.Scope == scope && live.Mode == mode && live.Connections > 0 {
					l.add(live.Connections, single(live.KernelBytes/1e3))
				}
			}
			p.lines = append(p.lines, withPoints([]curve{l})...)
		}
	}
	return p
}
