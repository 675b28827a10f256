package report

import (
	"fmt"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/bench"
)

// ConnectGoals are the most that socket() and connect() may take, as multiples of the host's. There
// are to be as many connections a second as the overlay has.
type ConnectGoals struct{ P50, P99 float64 }

// The goals of new connections: docs/decisions/0042.
var (
	WithoutPool = ConnectGoals{P50: 1.35, P99: 1.5}
	WithPool    = ConnectGoals{P50: 1.15, P99: 1.35}
)

// Outcome is what became of a goal.
type Outcome string

// The outcomes.
const (
	Reached Outcome = "reached"
	Beyond  Outcome = "beyond the floor of this run" // no trapped call could reach it
	Missed  Outcome = "missed"
)

// ConnectVerdict is a goal of new connections in one case.
type ConnectVerdict struct {
	Case   string // "between nodes, 8 callers"
	Goal   string // "p99 at most 1.50 of host"
	Ratio  float64
	Floor  float64 // the ratio of bench.Floor; 0: it was not measured
	Result Outcome
}

// goal is one of ConnectGoals.
type goal struct {
	metric string
	title  string
	of     bench.Mode
	limit  float64
	higher bool
}

func (g ConnectGoals) list() []goal {
	return []goal{
		{"socket_connect_p50_us", fmt.Sprintf("p50 at most %.2f of host", g.P50), bench.Host, g.P50, false},
		{"socket_connect_p99_us", fmt.Sprintf("p99 at most %.2f of host", g.P99), bench.Host, g.P99, false},
		{"connections_per_s", "connections a second at least the overlay's", bench.Overlay, 1, true},
	}
}

// judge gives the outcome of a ratio; floor 0 is none.
func (g goal) judge(ratio, floor float64) Outcome {
	reaches := func(r float64) bool { return r == g.limit || bench.Better(r, g.limit, g.higher) }
	switch {
	case reaches(ratio):
		return Reached
	case floor > 0 && !reaches(floor):
		return Beyond
	default:
		return Missed
	}
}

// JudgeConnects compares new connections of a mode with goals, in each measured case.
func JudgeConnects(results []bench.Result, mode bench.Mode, goals ConnectGoals) (verdicts []ConnectVerdict) {
	for _, scope := range bench.Scopes {
		for _, w := range ConnectWorkloads {
			for _, g := range goals.list() {
				mine, measured := Find(results, scope, w, g.metric, mode)
				to, compared := Find(results, scope, w, g.metric, g.of)
				if !measured || !compared {
					continue
				}
				floor, _ := Find(results, scope, w, g.metric, bench.Floor)
				v := ConnectVerdict{
					Case: scope.Title() + ", " + callersOf(w), Goal: g.title,
					Ratio: mine.Median / to.Median, Floor: floor.Median / to.Median,
				}
				v.Result = g.judge(v.Ratio, v.Floor)
				verdicts = append(verdicts, v)
			}
		}
	}
	return verdicts
}

// SummarizeConnects says of each goal in how many cases it had which outcome.
func SummarizeConnects(verdicts []ConnectVerdict) string {
	var goals, parts []string
	count := map[string]int{}
	for _, v := range verdicts {
		if !slices.Contains(goals, v.Goal) {
			goals = append(goals, v.Goal)
		}
		count[v.Goal]++
		count[v.Goal+string(v.Result)]++
	}
	for _, g := range goals {
		part := fmt.Sprintf("%s: %s in %d of %d cases", g, Reached, count[g+string(Reached)], count[g])
		for _, o := range []Outcome{Beyond, Missed} {
			if n := count[g+string(o)]; n > 0 {
				part += fmt.Sprintf(", %s in %d", o, n)
			}
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, "; ")
}

// ConnectGoalsGrid has a row for each verdict.
func ConnectGoalsGrid(mode bench.Mode, verdicts []ConnectVerdict) Grid {
	g := Grid{Rows: [][]string{{"", "goal", string(mode), string(bench.Floor), ""}}}
	for _, v := range verdicts {
		floor := "-"
		if v.Floor > 0 {
			floor = fmt.Sprintf("%.2f", v.Floor)
		}
		g.Add(v.Case, v.Goal, fmt.Sprintf("%.2f", v.Ratio), floor, string(v.Result))
	}
	return g
}

// callersOf says how many callers a workload of ConnectWorkloads has.
func callersOf(workload string) string {
	if n := strings.TrimPrefix(workload, "crr"); n != "" {
		return n + " callers"
	}
	return "1 caller"
}
