package differ

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// Runner runs a program in a mode: Lab.Run, or something else in tests.
type Runner func(p Program, mode string, pace Pace) (Trace, error)

// The modes that are compared.
const modeOverlay, modeHeddle = "overlay", "heddle"

// Finding is a program that sees something else in heddle mode than in overlay mode.
type Finding struct {
	Program         Program
	Overlay, Heddle Trace
}

// String writes a finding for people, and the program so that it can be replayed.
func (f Finding) String() string {
	return fmt.Sprintf("%s\n\n(- overlay, + heddle)\n%s\nprogram:\n%s", f.header(), Diff(f.Program, f.Overlay, f.Heddle), f.Program.JSON())
}

func (f Finding) header() string {
	return strings.SplitN(f.Program.String(), "\n", 2)[0]
}

// Kind says in a word what differs: the call of the first entry in which the traces do, and both
// answers. Findings of one kind are likely to have one cause.
func (f Finding) Kind() string {
	i := f.Overlay.firstDifference(f.Heddle)
	if i < 0 || i >= len(f.Overlay.Entries) || i >= len(f.Heddle.Entries) {
		return "length"
	}
	what := "end"
	if step := f.Overlay.Entries[i].Step; step < len(f.Program.Steps) {
		s := f.Program.Steps[step]
		what = s.Op
		if s.Op == "getsockopt" || s.Op == "setsockopt" {
			what += " " + strings.Join(s.named()[:2], " ")
		}
	}
	a, b := f.Overlay.Entries[i].Result, f.Heddle.Entries[i].Result
	if a == b {
		for _, line := range f.Overlay.Entries[i].Ended {
			if !slices.Contains(f.Heddle.Entries[i].Ended, line) {
				if call := calledIn.FindString(line); call != "" {
					return what + ": " + call
				}
			}
		}
		return what + ": afterwards"
	}
	return fmt.Sprintf("%s: %s, not %s", what, firstWord(b), firstWord(a))
}

// calledIn finds the call in a line about one that has ended.
var calledIn = regexp.MustCompile(`\w+\(`)

func firstWord(s string) string {
	word, _, _ := strings.Cut(s, " ")
	if word == "" || word[0] < '0' || word[0] > '9' {
		return word
	}
	return "a number"
}

// Check compares a program's traces in both modes. A difference of the first, fast run counts only
// if Confirm sees it in so many tries.
func Check(runner Runner, p Program, tries int) (*Finding, error) {
	overlay, heddle, err := both(runner, p, Fast)
	if err != nil || overlay.Equal(heddle) {
		return nil, err
	}
	return Confirm(runner, p, tries)
}

// Confirm has a program run slowly so many times in each mode. There is a finding only if no run of
// one mode sees what one of the other does.
func Confirm(runner Runner, p Program, tries int) (*Finding, error) {
	var overlay, heddle Trace
	var overlays, heddles []Trace
	for range tries {
		var err error
		if overlay, heddle, err = both(runner, p, Slow); err != nil {
			return nil, err
		}
		overlays, heddles = append(overlays, overlay), append(heddles, heddle)
		for _, o := range overlays {
			for _, h := range heddles {
				if o.Equal(h) {
					return nil, nil
				}
			}
		}
	}
	return &Finding{p, overlay, heddle}, nil
}

func both(runner Runner, p Program, pace Pace) (overlay, heddle Trace, err error) {
	var wait sync.WaitGroup
	var failed error
	wait.Go(func() { heddle, failed = runner(p, modeHeddle, pace) })
	overlay, err = runner(p, modeOverlay, pace)
	wait.Wait()
	if err == nil {
		err = failed
	}
	return overlay, heddle, err
}
