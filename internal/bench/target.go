package bench

import (
	"fmt"
)

// Target is a speed the project has set itself.
type Target struct {
	Workload, Metric string
	// Limit is the ratio to host that heddle must keep: at least it where higher is better, else at
	// most. 0 means that heddle must be better than the overlay instead.
	Limit float64
}

// Targets lists every target; each holds in both scopes.
var Targets = []Target{
	{"iperf3", "throughput_bps", 0.97},
	{"iperf3", "cpu_s_per_gb", 1.05},
	{"rr", "rtt_p50_us", 1.05},
	{"crr", "socket_connect_p50_us", 0},
}

// Verdict says whether a target was met in a scope.
type Verdict struct {
	Met    bool
	Title  string  // of the metric
	Scope  Scope   // where
	Ratio  float64 // of heddle to what Wanted compares it with
	Wanted string  // "at least 0.97 of host"
}

// String gives one line for a report.
func (v Verdict) String() string {
	word := "MISSED"
	if v.Met {
		word = "met"
	}
	return fmt.Sprintf("%-6s  %s %s: %.2f (wanted %s)", word, v.Title, v.Scope.Title(), v.Ratio, v.Wanted)
}

// Judge compares results with the targets. Targets whose modes or workloads were not measured are
// left out.
func Judge(results []Result) []Verdict {
	find := func(t Target, s Scope, m Mode) (Result, bool) {
		for _, r := range results {
			if r.Workload == t.Workload && r.Metric == t.Metric && r.Scope == s && r.Mode == m {
				return r, true
			}
		}
		return Result{}, false
	}
	var verdicts []Verdict
	for _, t := range Targets {
		metric, _ := MetricNamed(t.Workload, t.Metric)
		for _, s := range Scopes {
			heddle, measured := find(t, s, Heddle)
			overlay, compared := find(t, s, Overlay)
			v := Verdict{Title: metric.Title, Scope: s, Ratio: heddle.RatioToHost}
			switch {
			case !measured || t.Limit == 0 && !compared:
				continue
			case t.Limit == 0:
				v.Ratio = heddle.Median / overlay.Median
				v.Met, v.Wanted = Better(v.Ratio, 1, metric.Higher), "better than 1.00 of overlay"
			case metric.Higher:
				v.Met, v.Wanted = v.Ratio >= t.Limit, fmt.Sprintf("at least %.2f of host", t.Limit)
			default:
				v.Met, v.Wanted = v.Ratio <= t.Limit, fmt.Sprintf("at most %.2f of host", t.Limit)
			}
			verdicts = append(verdicts, v)
		}
	}
	return verdicts
}
