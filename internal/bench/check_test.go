package bench

import (
	"math/rand/v2"
	"strings"
	"testing"
)

// series5 gives the results of five runs of a workload's metric in host and in heddle mode.
func series5(workload, metric string, scope Scope, host, heddle [5]float64) []Result {
	one := func(mode Mode, v [5]float64) Result {
		r := Result{Workload: workload, Scope: scope, Mode: mode, Metric: metric, Median: median(v[:]), Min: v[0], Max: v[0], Runs: 5}
		for _, x := range v {
			r.Min, r.Max = min(r.Min, x), max(r.Max, x)
		}
		r.RatioToHost = r.Median / median(host[:])
		return r
	}
	return []Result{one(Host, host), one(Heddle, heddle)}
}

var (
	steadyHost   = [5]float64{50, 51, 49, 50, 52}
	steadyHeddle = [5]float64{51, 52, 50, 51, 53}
)

func TestCompare(t *testing.T) {
	steady := func(factor float64) (r [5]float64) {
		for i, v := range steadyHeddle {
			r[i] = v * factor
		}
		return r
	}
	for name, c := range map[string]struct {
		workload, metric string
		host, heddle     [5]float64
		want             Moved
	}{
		"as it was":                        {"rr", "rtt_p50_us", steadyHost, steadyHeddle, Same},
		"a regression of a quarter":        {"rr", "rtt_p50_us", steadyHost, steady(1.25), Worse},
		"a gain of a quarter":              {"rr", "rtt_p50_us", steadyHost, steady(0.75), Better},
		"a twentieth, which days differ":   {"rr", "rtt_p50_us", steadyHost, steady(1.05), Same},
		"less, where more is better":       {"rr", "transactions_per_s", steadyHost, steady(0.75), Worse},
		"more, where more is better":       {"rr", "transactions_per_s", steadyHost, steady(1.3), Better},
		"the whole machine is slower":      {"rr", "rtt_p50_us", [5]float64{100, 102, 98, 100, 104}, steady(2), Same},
		"a quarter in runs that differ so": {"rr", "rtt_p50_us", [5]float64{40, 50, 65, 45, 60}, [5]float64{50, 64, 80, 55, 75}, Same},
		"twice, even in such runs":         {"rr", "rtt_p50_us", [5]float64{42, 50, 58, 46, 54}, [5]float64{84, 110, 118, 95, 105}, Worse},
	} {
		committed := series5(c.workload, c.metric, Inter, steadyHost, steadyHeddle)
		got := Compare(committed, series5(c.workload, c.metric, Inter, c.host, c.heddle))
		if len(got) != 1 || got[0].Moved != c.want {
			t.Errorf("%s: %+v, want one that is %s", name, got, c.want)
		}
	}
}

// TestCompareNoise has the same program measured twice, many times over, on a machine whose runs differ by a tenth: hardly
// ever it may seem worse, and never in two measurements one after the other.
func TestCompareNoise(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	draw := func() (host, heddle [5]float64) {
		for i := range host {
			host[i], heddle[i] = 50*(1+0.1*random.NormFloat64()), 60*(1+0.1*random.NormFloat64())
		}
		return host, heddle
	}
	worse, twice := 0, 0
	const trials = 2000
	for range trials {
		h, e := draw()
		committed := series5("crr", "socket_connect_p50_us", Intra, h, e)
		again := func() []Comparison {
			h, e := draw()
			return Compare(committed, series5("crr", "socket_connect_p50_us", Intra, h, e))
		}
		first := again()
		if first[0].Moved == Worse {
			worse++
			if Confirm(first, again())[0].Moved == Worse {
				twice++
			}
		}
	}
	if worse > trials/50 || twice > trials/200 {
		t.Errorf("of %d measurements of the same, %d seem worse, %d of them twice", trials, worse, twice)
	}
}

func TestCompareMissing(t *testing.T) {
	rr, crr := series5("rr", "rtt_p50_us", Inter, steadyHost, steadyHeddle), series5("crr", "socket_p50_us", Inter, steadyHost, steadyHeddle)
	for _, c := range []struct {
		committed, now []Result
		want           string
	}{
		{rr, crr, "rr not measured, crr not measured"},
		{append(rr, crr...), rr, "rr same, crr not measured"},
		{rr[:1], rr, "rr not measured"}, // no Heddle in it
		{rr, rr[1:], "rr not measured"}, // no host in it
		{nil, nil, ""},
		{series5("rr", "rtt_p50_us", Inter, [5]float64{}, steadyHeddle), rr, "rr not measured"},
		{series5("rr", "rtt_p99_us", Inter, steadyHost, steadyHeddle), nil, ""}, // tails are not compared
	} {
		var got []string
		for _, m := range Compare(c.committed, c.now) {
			got = append(got, m.Workload+" "+string(m.Moved))
		}
		if strings.Join(got, ", ") != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
}

func TestConfirm(t *testing.T) {
	worse := Comparison{Workload: "rr", Scope: Inter, Moved: Worse, Now: 1.5}
	other := Comparison{Workload: "rr", Scope: Intra, Moved: Worse, Now: 1.5}
	for _, c := range []struct {
		second Comparison
		want   Moved
	}{
		{Comparison{Workload: "rr", Scope: Inter, Moved: Worse}, Worse},
		{Comparison{Workload: "rr", Scope: Inter, Moved: Same, Now: 1}, Same},
		{Comparison{Workload: "rr", Scope: Inter, Moved: NotMeasured}, Worse},
		{Comparison{Workload: "rr", Scope: Inter, Moved: Better}, Same},
		{Comparison{Workload: "crr", Scope: Inter, Moved: Same}, Worse},
	} {
		first := []Comparison{worse, other}
		got := Confirm(first, []Comparison{c.second})
		if got[0].Moved != c.want || got[1].Moved != Worse || first[0].Moved != Worse {
			t.Errorf("%+v: %s and %s, want %s and worse", c.second, got[0].Moved, got[1].Moved, c.want)
		}
	}
	if w, s := Suspects([]Comparison{worse, other, {Workload: "crr", Scope: Inter, Moved: Same}}); strings.Join(w, ",")+" "+strings.Join(s, ",") != "rr inter,intra" {
		t.Errorf("suspects %v %v", w, s)
	}
}

func TestWriteComparisons(t *testing.T) {
	var b strings.Builder
	all := Compare(series5("rr", "rtt_p50_us", Inter, steadyHost, steadyHeddle), series5("rr", "rtt_p50_us", Inter, steadyHost, [5]float64{102, 104, 100, 102, 106}))
	if err := WriteComparisons(&b, append(all, Comparison{Workload: "crr", Moved: NotMeasured})); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"rr between nodes, round trip p50 (lower is better)", "1.02", "2.04", "+100 %", "10 %", "worse", "not measured"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, &b)
		}
	}
}
