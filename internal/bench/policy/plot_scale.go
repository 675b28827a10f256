package policy

import (
	"errors"
	"io"
	"slices"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/plot"
)

// WriteScale draws what connects and changes cost among more and more rules.
func WriteScalePlot(w io.Writer, result ScaleResult, text plot.Text) error {
	if len(result.Connects) == 0 {
		return errors.New("plot: no connects were measured")
	}
	c := plot.NewCanvas(plot.ScaleHeight, text)
	var rules []int
	for _, r := range result.Connects {
		if !slices.Contains(rules, r.Rules) {
			rules = append(rules, r.Rules)
		}
	}
	half := (plot.PlotWidth - plot.ScaleGap) / 2
	panel := func(column int, top float64, title, unit string) *plot.Curves {
		left := plot.MarginLeft + float64(column)*(half+plot.ScaleGap)
		return &plot.Curves{C: c, Left: left, Right: left + half, Top: top, Bottom: top + plot.ScalePanelHeight, Title: title, Unit: unit, Under: "rules in force", Rules: rules}
	}
	for i, scope := range bench.Scopes {
		p := panel(i, plot.ScaleFirstRow, "socket() + connect() "+scope.Title()+", p50 (dotted: p99)", "us")
		p.Lines = connectCurves(result, scope)
		p.Draw()
	}
	for i, what := range []string{"A change, until both nodes enforce it", "Processor time of agents for a change (n1: with the store)"} {
		p := panel(i, plot.ScaleSecondRow, what, "ms")
		p.Lines, p.FirstApart = changeCurves(result, i == 1), true
		p.Draw()
	}
	c.Text(plot.MarginLeft, plot.ScaleHeight-18, 12, plot.GreyColour, "start", "normal",
		"Points: medians. Whiskers: smallest and largest round (of changes: change). Every rule is about the measured containers, on both nodes. A rule among 0 is the first one.")
	return c.Finish(w)
}

// connectCurves gives p50 and p99 of every mode.
func connectCurves(result ScaleResult, scope bench.Scope) (out []plot.Curve) {
	for _, mode := range bench.Modes {
		colour, known := plot.Colours[mode]
		if !known {
			colour = plot.ScaleHostColour
		}
		p50 := plot.Curve{Name: string(mode), Colour: colour}
		p99 := plot.Curve{Colour: colour, Dashes: "2 4"}
		for _, r := range result.Connects {
			if r.Scope != scope || r.Mode != mode {
				continue
			}
			p50.Rules, p50.Values = append(p50.Rules, r.Rules), append(p50.Values, r.P50Us)
			p99.Rules, p99.Values = append(p99.Rules, r.Rules), append(p99.Values, bench.Spread{Median: r.P99Us.Median, Min: r.P99Us.Median, Max: r.P99Us.Median})
		}
		if len(p50.Rules) > 0 {
			out = append(out, p50, p99)
		}
	}
	return out
}

// changeCurves gives what each kind of change took, or its processor time.
func changeCurves(result ScaleResult, cpu bool) (out []plot.Curve) {
	kinds := []string{plot.Colours[bench.Heddle], plot.Colours[bench.Overlay]}
	var names []string
	for _, r := range result.Changes {
		i := slices.Index(names, r.What)
		if i < 0 {
			i, names = len(names), append(names, r.What)
			if cpu {
				out = append(out, plot.Curve{Name: r.What + ", n2", Colour: kinds[i%2]},
					plot.Curve{Name: r.What + ", n1", Colour: kinds[i%2], Dashes: "6 4"})
			} else {
				out = append(out, plot.Curve{Name: r.What, Colour: kinds[i%2]})
			}
		}
		if !cpu {
			out[i].Rules, out[i].Values = append(out[i].Rules, r.Rules), append(out[i].Values, r.InForceMs)
			continue
		}
		for j, v := range []bench.Spread{r.SecondCPUMs, r.FirstCPUMs} {
			l := &out[2*i+j]
			l.Rules, l.Values = append(l.Rules, r.Rules), append(l.Values, v)
		}
	}
	return out
}
