package differ

import (
	"encoding/hex"
	"fmt"
	"maps"
	"net/netip"
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

// LevelStates rewrites what a trace says of the readiness and state of sockets, and leaves out what
// is no change any more.
func (t *Trace) LevelStates(rewrite func(state string) string) {
	last := map[string]string{}
	for i := range t.Entries {
		var kept []string
		for _, line := range t.Entries[i].Changes {
			slot, state, _ := strings.Cut(line, ": ")
			if state = rewrite(state); last[slot] != state {
				kept = append(kept, slot+": "+state)
			}
			last[slot] = state
		}
		t.Entries[i].Changes = kept
	}
}

// LevelResults rewrites what steps gave, as Step and Result of entries have it, also at the end.
// state is the last one of the step's socket.
func (t *Trace) LevelResults(p Program, rewrite func(s Step, state, result string) string) {
	last := map[string]string{}
	for i := range t.Entries {
		e := &t.Entries[i]
		for _, line := range e.Changes {
			slot, state, _ := strings.Cut(line, ": ")
			last[slot] = state
		}
		if e.Step < len(p.Steps) {
			s := p.Steps[e.Step]
			e.Result = rewrite(s, last[fmt.Sprintf("%s f%d", s.At, s.Fd)], e.Result)
		}
		for j, line := range e.Ended {
			head, result, _ := strings.Cut(line, " = ")
			if s, ok := p.stepIn(head); ok {
				e.Ended[j] = head + " = " + rewrite(s, last[fmt.Sprintf("%s f%d", s.At, s.Fd)], result)
			}
		}
	}
	t.renumber()
}

// stepIn gives the step that a line about one begins with: by its number, or one of those at the
// end.
func (p Program) stepIn(line string) (s Step, ok bool) {
	var i int
	if n, _ := fmt.Sscanf(line, "%d", &i); n == 1 && i < len(p.Steps) {
		return p.Steps[i], true
	}
	_, err := fmt.Sscanf(strings.NewReplacer(":", " ", "(", " ", ",", " ").Replace(line), "%s %s f%d", &s.At, &s.Op, &s.Fd)
	return s, err == nil
}

// renumber names the ports that the kernel chose again, of those that are left.
func (t *Trace) renumber() {
	names := map[string]string{}
	rename := func(text string) string {
		return chosenPort.ReplaceAllStringFunc(text, func(m string) string {
			if names[m] == "" {
				names[m] = fmt.Sprintf(" E%d", len(names)+1)
			}
			return names[m]
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

var (
	inBrackets = regexp.MustCompile(`<[^>]*>`)
	chosenPort = regexp.MustCompile(` E\d+\b`)
	withPort   = regexp.MustCompile(`^<(family \d+|\S+) (\d+)`)
)

// normalise names addresses and ports. Ports of the program have the names it gave them; those the
// kernel chose are E1, E2 ... in the order in which they appear: which they are is chance, which of
// them are equal is not.
func (t *Trace) normalise(hosts map[string]Addrs, ports map[string]int) {
	names := map[string]string{}
	for _, symbol := range slices.Backward(slices.Sorted(maps.Keys(hosts))) {
		if symbol == "a" || symbol == "b" || symbol == "nobody" || symbol == "gateway" || symbol == PlaceNode {
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
			rest := m[len(found[0]):]
			if raw, err := hex.DecodeString(strings.Trim(rest, " >")); err == nil && len(raw) == 4 { // a name that was cut off
				if name := names[netip.AddrFrom4([4]byte(raw)).String()]; name != "" {
					rest = " " + name + ">"
				}
			}
			return "<" + addr + " " + portNames[port] + rest
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
