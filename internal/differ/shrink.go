package differ

import (
	"slices"
	"time"
)

// Shrink makes the program of a finding as small as it can within a time: it leaves steps out,
// halves at first and single ones in the end, and takes simpler arguments, as long as a finding of
// the same kind remains. Programs that are not allowed are not tried: they may show a known
// difference instead.
func Shrink(runner Runner, f Finding, allowed func(Program) bool, within time.Duration) Finding {
	kind, end := f.Kind(), time.Now().Add(within)
	best := f
	try := func(p Program) bool {
		if time.Now().After(end) || !allowed(p) {
			return false
		}
		g, err := Check(runner, p, 1)
		if err != nil || g == nil || g.Kind() != kind {
			return false
		}
		best = *g
		return true
	}
	for smaller := true; smaller && time.Now().Before(end); {
		smaller = false
		for size := max(1, len(best.Program.Steps)/2); size > 0; size /= 2 {
			for from := len(best.Program.Steps) - size; from >= 0; from -= size {
				if from+size <= len(best.Program.Steps) {
					smaller = try(without(best.Program, from, size)) || smaller
				}
			}
		}
		for _, p := range simpler(best.Program) {
			smaller = try(p) || smaller
		}
	}
	return best
}

func without(p Program, from, n int) Program {
	p.Steps = slices.Delete(slices.Clone(p.Steps), from, from+n)
	return p
}

// simpler gives programs with one argument less strange. Each is made of p, so only one of those
// for the same step can be taken in a round.
func simpler(p Program) []Program {
	var out []Program
	change := func(i int, f func(s *Step) bool) {
		s := p.Steps[i]
		s.Args = slices.Clone(s.Args)
		if s.Addr != nil {
			a := *s.Addr
			s.Addr = &a
		}
		if f(&s) {
			q := p
			q.Steps = slices.Clone(p.Steps)
			q.Steps[i] = s
			out = append(out, q)
		}
	}
	const plainType = 0xf // without NONBLOCK and CLOEXEC
	for i := range p.Steps {
		change(i, func(s *Step) bool {
			if s.Op != "socket" || s.Args[1] == s.Args[1]&plainType {
				return false
			}
			s.Args[1] &= plainType
			return true
		})
		change(i, func(s *Step) bool {
			if s.Op != "socket" || s.Args[2] == 0 {
				return false
			}
			s.Args[2] = 0
			return true
		})
		change(i, func(s *Step) bool {
			if s.Addr == nil || s.Addr.Len == 0 {
				return false
			}
			s.Addr.Len = 0
			return true
		})
		change(i, func(s *Step) bool {
			if n := len(s.Args); n == 0 || s.Op == "socket" || s.Op == "getsockopt" || s.Op == "setsockopt" || s.Args[n-1] == 0 || n < 2 {
				return false
			}
			s.Args[len(s.Args)-1] = 0
			return true
		})
	}
	if p.B != p.A {
		q := p
		q.B = p.A
		q.Plain = ""
		out = append(out, q)
	}
	return out
}
