package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"text/tabwriter"
)

// text is what is printed when a module is done: its row, and all that is known of the cases that
// differ.
func (v verdict) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s: %s: %s; %s: %s\n", v.suite, v.name, overlay, v.on.line(), heddle, v.through.line())
	for _, line := range v.remarks() {
		fmt.Fprintf(&b, "  %s\n", line)
	}
	for _, d := range v.worse {
		if v.class(d) == stays {
			continue
		}
		fmt.Fprintf(&b, "  %s through Heddle:\n", d.name)
		for line := range strings.Lines(d.through.detail) {
			b.WriteString("    | " + strings.TrimRight(line, "\n") + "\n")
		}
	}
	return b.String()
}

// remarks gives a line for all that has to be said of the module, case by case.
func (v verdict) remarks() []string {
	var out []string
	if v.through.broken != "" {
		first, _, _ := strings.Cut(v.through.broken, "\n")
		out = append(out, "broken through Heddle: "+first)
	}
	for _, d := range v.worse {
		line := fmt.Sprintf("%s: %s", v.class(d), d.line())
		if reason := v.reason(d); reason != "" {
			line += ": " + reason
		}
		out = append(out, line)
	}
	for _, name := range v.outlived() {
		out = append(out, "known, but did not fail: "+name+": take it from the list of known differences")
	}
	return out
}

func (r moduleRun) line() string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped, %.0f s", r.count(passed), r.count(failed), r.count(skipped), r.seconds)
}

func (d difference) line() string {
	out := fmt.Sprintf("%s: overlay %s, heddle %s; the same again when run alone: overlay %s, heddle %s", d.name, shown(d.on), shown(d.through), d.aloneOn, d.alone)
	if d.again.runs > 0 {
		out += fmt.Sprintf("; with its module, heddle %s", d.again)
	}
	return out
}

// table gives the whole result for a terminal.
func table(verdicts []verdict) string {
	var b bytes.Buffer
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, cells := range rows(verdicts) {
		fmt.Fprintln(w, strings.Join(cells, "\t"))
	}
	_ = w.Flush() // to memory
	return b.String()
}

var header = []string{"suite", "module", "mode", "run", "passed", "failed", "skipped", "seconds", "sockets", "heddle only"}

// rows are the table's, the header first.
func rows(verdicts []verdict) [][]string {
	out := [][]string{header}
	for _, v := range verdicts {
		for _, r := range []struct {
			mode string
			run  moduleRun
		}{{overlay, v.on}, {heddle, v.through}} {
			only := ""
			if r.mode == heddle {
				only = v.summary()
			}
			ran := len(r.run.cases) - r.run.count(skipped)
			out = append(out, []string{v.suite, v.name, r.mode, fmt.Sprint(ran), fmt.Sprint(r.run.count(passed)),
				fmt.Sprint(r.run.count(failed)), fmt.Sprint(r.run.count(skipped)), fmt.Sprintf("%.0f", r.run.seconds),
				fmt.Sprint(r.run.sockets), only})
		}
	}
	return out
}

// shown is how a case ended, for a line.
func shown(c caseResult) string {
	if c == missing {
		return c.detail
	}
	return string(c.outcome)
}

// summary says in one cell how the modes differ.
func (v verdict) summary() string {
	if v.through.broken != "" {
		return "broken"
	}
	var parts []string
	for _, c := range []class{fails, stays, flaky} {
		if n := v.count(c); n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, c))
		}
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, ", ")
}

// markdown gives the table and the list of cases that differ, for the page.
func markdown(verdicts []verdict) string {
	var b strings.Builder
	for i, cells := range rows(verdicts) {
		b.WriteString("| " + strings.Join(cells, " | ") + " |\n")
		if i == 0 {
			b.WriteString(strings.Repeat("|---", len(cells)) + "|\n")
		}
	}
	b.WriteString("\n")
	silent := true
	for _, v := range verdicts {
		for _, line := range v.remarks() {
			fmt.Fprintf(&b, "- %s %s: %s\n", v.suite, v.name, line)
			silent = false
		}
	}
	if silent {
		b.WriteString("No case failed through Heddle and not on the overlay.\n")
	}
	return b.String()
}

// The lines of the page between which each suite's table is. Suites that did not run keep theirs.
func markers(suite string) (begin, end string) {
	return "<!-- " + suite + ": begin, written by make conformance -->\n", "<!-- " + suite + ": end -->\n"
}

// updatePage puts the results of each suite that ran between its markers.
func updatePage(path string, verdicts []verdict) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("update the table: %w", err)
	}
	page := string(raw)
	for _, suite := range suiteNames() {
		var own []verdict
		for _, v := range verdicts {
			if v.suite == suite {
				own = append(own, v)
			}
		}
		if len(own) == 0 {
			continue
		}
		begin, end := markers(suite)
		before, rest, ok := strings.Cut(page, begin)
		_, after, ok2 := strings.Cut(rest, end)
		if !ok || !ok2 {
			return fmt.Errorf("update the table: %s lacks the markers of %s", path, suite)
		}
		page = before + begin + "\n" + markdown(own) + "\n" + end + after
	}
	if err := os.WriteFile(path, []byte(page), 0o644); err != nil {
		return fmt.Errorf("update the table: %w", err)
	}
	return nil
}
