package policy

import (
	"fmt"

	"heddle.dev/heddle/internal/bench/report"
)

// tables gives the outcome of a scale experiment.
func (r ScaleResult) tables() []report.Grid {
	connects := report.Grid{Rows: [][]string{{"scope", "mode", "rules", "p50, us", "p99, us", "p50: ratio to no rules", "to host", "to overlay"}}}
	for _, c := range r.Connects {
		connects.Add(string(c.Scope), string(c.Mode), fmt.Sprint(c.Rules), c.P50Us.String(), c.P99Us.String(),
			c.RatioToNone.String(), c.RatioToHost.String(), c.RatioToOverlay.String())
	}
	changes := report.Grid{Rows: [][]string{{"change", "among rules", "applied, ms", "in force on both nodes, ms", "CPU of n1's agent with the store, ms", "CPU of n2's agent, ms"}}}
	for _, c := range r.Changes {
		changes.Add(c.What, fmt.Sprint(c.Rules), c.AppliedMs.String(), c.InForceMs.String(), c.FirstCPUMs.String(), c.SecondCPUMs.String())
	}
	growth := report.Grid{Rows: [][]string{{"rules", "time to bring them in force, s", "memory of n2's agent, MB"}}}
	rules := -1
	for _, c := range r.Connects {
		if c.Rules <= rules {
			break // the next mode's
		}
		rules = c.Rules
		grow := ""
		if rules > 0 {
			grow = r.GrowS[rules].String()
		}
		growth.Add(fmt.Sprint(rules), grow, r.MemoryMB[rules].String())
	}
	return []report.Grid{connects, changes, growth}
}
