package differ

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// Trace is what a program saw.
type Trace struct {
	Entries []Entry `json:"entries"`
}

// Entry is what came of one step; the last of a trace is the end of the program.
type Entry struct {
	Step    int      `json:"step"`
	Result  string   `json:"result"`
	Ended   []string `json:"ended,omitempty"`   // calls that were pending and ended meanwhile
	Changes []string `json:"changes,omitempty"` // what became of the sockets
}

// String writes a result as strace does.
func (r Result) String() string {
	if r.Errno != "" {
		return r.Errno + r.Out
	}
	return fmt.Sprint(r.Ret) + r.Out
}

// changes lists the slots whose readiness is not what it was.
func changes(before, after map[string]string) []string {
	var out []string
	for slot, text := range after {
		if before[slot] != text {
			out = append(out, slot+": "+text)
		}
	}
	for slot := range before {
		if _, ok := after[slot]; !ok {
			out = append(out, slot+": closed")
		}
	}
	slices.Sort(out)
	return out
}

var (
	inBrackets = regexp.MustCompile(`<[^>]*>`)
	withPort   = regexp.MustCompile(`^<(family \d+|\S+) (\d+)`)
)

// normalise names addresses and ports. Ports of the program have the names it gave them; those the
// kernel chose are E1, E2 ... in the order in which they appear: which they are is chance, which of
// them are equal is not.
func (t *Trace) normalise(hosts map[string]Addrs, ports map[string]int) {
	names := map[string]string{}
	for _, symbol := range slices.Backward(slices.Sorted(maps.Keys(hosts))) {
		if symbol == "a" || symbol == "b" || symbol == "nobody" || symbol == "gateway" {
			names[hosts[symbol].V4], names[hosts[symbol].V6] = symbol, symbol
		}
	}
	portNames := map[string]string{"0": "0"}
	for name, port := range ports {
		portNames[fmt.Sprint(port)] = name
	}
	chosen := 0
	rename := func(text string) string {
		return inBrackets.ReplaceAllStringFunc(text, func(m string) string {
			found := withPort.FindStringSubmatch(m)
			if found == nil {
				return m
			}
			addr, port := found[1], found[2]
			if portNames[port] == "" {
				chosen++
				portNames[port] = fmt.Sprintf("E%d", chosen)
			}
			bare := strings.TrimPrefix(addr, "::ffff:")
			if name := names[bare]; name != "" {
				addr = strings.TrimSuffix(addr, bare) + name
			}
			return "<" + addr + " " + portNames[port] + m[len(found[0]):]
		})
	}
	for i := range t.Entries {
		e := &t.Entries[i]
		e.Result = rename(e.Result)
		for j := range e.Ended {
			e.Ended[j] = rename(e.Ended[j])
		}
	}
}

// lines writes an entry.
func (e Entry) lines(p Program) []string {
	out := []string{fmt.Sprintf("%3d end", e.Step)}
	if e.Step < len(p.Steps) {
		out[0] = fmt.Sprintf("%3d %s = %s", e.Step, p.Steps[e.Step], e.Result)
	}
	for _, d := range e.Ended {
		out = append(out, "      then "+d)
	}
	for _, c := range e.Changes {
		out = append(out, "      now  "+c)
	}
	return out
}

// Equal compares two traces.
func (t Trace) Equal(u Trace) bool { return t.firstDifference(u) < 0 }

// firstDifference gives the first entry in which two traces of one program differ, or -1.
func (t Trace) firstDifference(u Trace) int {
	for i := range min(len(t.Entries), len(u.Entries)) {
		a, b := t.Entries[i], u.Entries[i]
		if a.Result != b.Result || !slices.Equal(a.Ended, b.Ended) || !slices.Equal(a.Changes, b.Changes) {
			return i
		}
	}
	if len(t.Entries) != len(u.Entries) {
		return min(len(t.Entries), len(u.Entries))
	}
	return -1
}

// Diff writes both traces of a program as one: lines in which they agree once, others as "-" of the
// first and "+" of the second.
func Diff(p Program, first, second Trace) string {
	var b strings.Builder
	for i := range max(len(first.Entries), len(second.Entries)) {
		var x, y []string
		if i < len(first.Entries) {
			x = first.Entries[i].lines(p)
		}
		if i < len(second.Entries) {
			y = second.Entries[i].lines(p)
		}
		for _, l := range x {
			if slices.Contains(y, l) {
				fmt.Fprintln(&b, "  "+l)
			} else {
				fmt.Fprintln(&b, "- "+l)
			}
		}
		for _, l := range y {
			if !slices.Contains(x, l) {
				fmt.Fprintln(&b, "+ "+l)
			}
		}
	}
	return b.String()
}
