package generate

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/differ"
)

// Exclusion is a known difference: programs with a step that may show it are generated without that step. To test
// what became equal, take the entry out.
type Exclusion struct {
	Name string
	Row  string // the beginning of its row in docs/differences.md
	// Excludes looks at a step and at the steps kept before it.
	Excludes func(p differ.Program, before []differ.Step, s differ.Step) bool
}

// Exclusions is all that is not generated though the generator could.
var Exclusions = []Exclusion{}

// exclude gives the steps of p that show no known difference.
func exclude(p differ.Program) []differ.Step {
	var kept []differ.Step
	for _, s := range p.Steps {
		if !slices.ContainsFunc(Exclusions, func(e Exclusion) bool { return e.Excludes(p, kept, s) }) {
			kept = append(kept, s)
		}
	}
	return kept
}

var _ = strings.HasPrefix
var _ = unix.AF_INET
