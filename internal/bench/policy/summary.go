package policy

import (
	"errors"
	"fmt"
	"strings"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/report"
)

func summarize(d *report.Document) (string, error) {
	var caps CapsResult
	var scale ScaleResult
	if err := errors.Join(d.Read("policy.json", &caps), d.Read("policy-scale.json", &scale)); err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString("| cap on a live connection, Gb/s | carried, of the cap |\n|---|---|\n")
	for _, p := range caps.Phases {
		if p.CapBPS > 0 {
			fmt.Fprintf(&b, "| %.2f | %.3f |\n", p.CapBPS/1e9, p.LimitedBPS/p.CapBPS)
		}
	}
	fmt.Fprintf(&b, "\n| among %s endpoints, with so many rules |", bench.Thousands(scale.Endpoints))
	rule, cells := "|---|", map[bench.Scope]string{}
	for _, c := range scale.Connects {
		if c.Mode != bench.Heddle {
			continue
		}
		if c.Scope == bench.Inter {
			fmt.Fprintf(&b, " %s |", bench.Thousands(c.Rules))
			rule += "---|"
		}
		cells[c.Scope] += fmt.Sprintf(" %.2f |", c.RatioToHost.Median)
	}
	fmt.Fprintf(&b, "\n%s\n", rule)
	for _, scope := range bench.Scopes {
		fmt.Fprintf(&b, "| `socket()`+`connect()` p50 %s, to host |%s\n", scope.Title(), cells[scope])
	}
	return b.String(), nil
}
