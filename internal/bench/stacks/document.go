package stacks

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/report"
)

// File is the name of the committed results.
const File = "stacks.json"

// notYet stands where results will, until a run is committed.
const notYet = "Not measured yet: no run of `make bench-stacks` is committed.\n"

// headlines are the metrics of the tables, by workload.
var headlines = []struct{ workload, metric string }{
	{"flows1", "throughput_bps"}, {"flows2", "throughput_bps"}, {"flows3", "throughput_bps"},
	{"writes512", "throughput_bps"}, {"writes4k", "throughput_bps"}, {"writes64k", "throughput_bps"}, {"writes64k", "cpu_s_per_gb"},
	{"crr", "socket_connect_p50_us"}, {"crr", "connections_per_s"}, {"redis", "requests_per_s"},
}

// measured gives the modes of a result, in their order.
func (r Result) measured() (all []bench.Mode) {
	for _, f := range r.Results {
		if !slices.Contains(all, f.Mode) {
			all = append(all, f.Mode)
		}
	}
	return all
}

// grids are the tables. whole has spreads, and without it ratios stand beside the host's medians.
func (r Result) grids(whole bool) []report.Grid {
	modes := r.measured()
	head := []string{"between nodes"}
	for _, m := range modes {
		head = append(head, string(m))
	}
	lab := report.Grid{Title: "Medians, and ratios to the host", Rows: [][]string{head}}
	for _, h := range headlines {
		metric, _ := bench.MetricNamed(h.workload, h.metric)
		unit, divisor := metric.Unit.Scale()
		row := []string{metric.Title + ", " + unit}
		for _, m := range modes {
			f, ok := report.Find(r.Results, bench.Inter, h.workload, h.metric, m)
			switch {
			case !ok:
				row = append(row, "")
			case whole && m != bench.Host:
				row = append(row, fmt.Sprintf("%s (%s..%s), %.2f", bench.Number(f.Median/divisor), bench.Number(f.Min/divisor), bench.Number(f.Max/divisor), f.RatioToHost))
			case whole:
				row = append(row, fmt.Sprintf("%s (%s..%s)", bench.Number(f.Median/divisor), bench.Number(f.Min/divisor), bench.Number(f.Max/divisor)))
			case m == bench.Host:
				row = append(row, bench.Number(f.Median/divisor))
			default:
				row = append(row, fmt.Sprintf("%.2f", f.RatioToHost))
			}
		}
		if strings.Join(row[1:], "") != "" {
			lab.Add(row...)
		}
	}
	far := report.Grid{Title: "Over the line", Rows: [][]string{{r.Line.String(), "arrived, Mb/s", "lost on the line, %"}}}
	for _, f := range r.Far {
		far.Add(string(f.Mode), scaled(f.BPS, 1e6), scaled(f.Lost, .01))
	}
	tenants := report.Grid{Title: "Containers of a node that share a module and send at the same time", Rows: [][]string{{"stack", "containers", "together, Gb/s", "Jain's index"}}}
	for _, f := range r.Tenants {
		tenants.Add(string(f.Mode), fmt.Sprint(f.Tenants), scaled(f.BPS, 1e9), scaled(f.Jain, 1))
	}
	copies := report.Grid{Title: "A copy between places that no cache holds", Rows: [][]string{{"bytes", "ns"}}}
	for _, c := range r.Copies {
		copies.Add(fmt.Sprint(c.Bytes), c.NS.Text())
	}
	all := []report.Grid{lab, far, tenants, copies, r.queueGrid(), r.goals()}
	return slices.DeleteFunc(all, func(g report.Grid) bool { return len(g.Rows) < 2 })
}

func scaled(s bench.Spread, divisor float64) string {
	return bench.Spread{Median: s.Median / divisor, Min: s.Min / divisor, Max: s.Max / divisor}.Text()
}

// String describes the line.
func (l FarLine) String() string {
	return fmt.Sprintf("%.0f Mb/s, %.0f ms, loss %g %%", l.RateBPS/1e6, l.TripMS, 100*l.Loss)
}

// goals judges what the plane was planned with. It is reported; nothing asserts it.
func (r Result) goals() report.Grid {
	g := report.Grid{Title: "Goals", Rows: [][]string{{"goal", "found", ""}}}
	add := func(wanted string, a, b, least float64) {
		switch {
		case a <= 0 || b <= 0:
			g.Add(wanted, "", "not measured in this run")
		case a/b >= least:
			g.Add(wanted, fmt.Sprintf("%.2f", a/b), "reached")
		default:
			g.Add(wanted, fmt.Sprintf("%.2f", a/b), "not reached")
		}
	}
	of := func(m bench.Mode, workload, metric string) float64 {
		f, _ := report.Find(r.Results, bench.Inter, workload, metric, m)
		return f.Median
	}
	far := func(m bench.Mode) float64 {
		for _, f := range r.Far {
			if f.Mode == m {
				return f.BPS.Median
			}
		}
		return 0
	}
	add("bbr by profile over the line: at least 4 x cubic", far("bbr"), far("cubic"), 4)
	add("the kernel's TCP with a profile, 64 KiB writes: at least 0.97 of it without", of(Profiled, "writes64k", "throughput_bps"),
		of(bench.Heddle, "writes64k", "throughput_bps"), .97)
	add("smoltcp on a link without loss, 64 KiB writes: at least 0.7 of the kernel's", of("smoltcp", "writes64k", "throughput_bps"),
		of(bench.Heddle, "writes64k", "throughput_bps"), .7)
	add("the same, of a plain container's, whose packets go the same way", of("smoltcp", "writes64k", "throughput_bps"),
		of(bench.Overlay, "writes64k", "throughput_bps"), .7)
	add("netstack, 64 KiB writes: at least 0.5 of the kernel's", of("netstack", "writes64k", "throughput_bps"),
		of(bench.Heddle, "writes64k", "throughput_bps"), .5)
	add("the same, of a plain container's", of("netstack", "writes64k", "throughput_bps"), of(bench.Overlay, "writes64k", "throughput_bps"), .5)
	for _, f := range r.Tenants {
		if f.Tenants > 1 {
			add(fmt.Sprintf("%d tenants of %s: Jain's index at least 0.95", f.Tenants, f.Mode), f.Jain.Median, 1, .95)
		}
	}
	const cost = "a profile costs a connection 0.5 us at most"
	switch us := r.ProfileUs; {
	case us == nil:
		g.Add(cost, "", "not measured in this run")
	case us.Median <= .5:
		g.Add(cost, us.Text()+" us", "reached")
	default:
		g.Add(cost, us.Text()+" us", "not reached")
	}
	return g
}

// about says where the figures are from.
func (r Result) about() string {
	text := fmt.Sprintf("%s; heddle+profile has %s; other programs kept %.1f processors busy before.", r.Machine, r.Profile, r.Background)
	if r.Background > machine.QuietMachine {
		text += " **That is a busy machine: not to judge by.**"
	}
	return text
}

func printResult(w io.Writer, r Result) error {
	return errors.Join(report.Print(w, r.grids(true)), report.WriteAll(w, r.about()+"\n"))
}

// text writes the tables as Markdown, or says that there are none.
func text(d *report.Document, whole bool) (string, error) {
	var r Result
	err := d.Read(File, &r)
	if errors.Is(err, os.ErrNotExist) {
		return notYet, nil
	}
	if err != nil {
		return "", err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", r.about())
	for _, g := range r.grids(whole) {
		fmt.Fprintf(&b, "\n%s:\n\n", g.Title)
		g.Markdown(&b)
	}
	return b.String(), nil
}

func writeReport(d *report.Document) error {
	t, err := text(d, true)
	if err != nil {
		return err
	}
	return d.Section("", "\n"+t+"\n")
}

func summarize(d *report.Document) (string, error) { return text(d, false) }
