package sockets

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/differ"
	"heddle.dev/heddle/internal/differ/generate"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// differStack is a flag of TestDifferModules.
var differStack = flag.String("differ.stack", "", "the stack module that programs run on, smoltcp or netstack; none: each")

// moduleProfile has a module run the TCP of labelled endpoints.
const moduleProfile = `apiVersion: heddle.dev/v1
kind: StackProfile
name: differ
selector: {labels: {stack: differ}}
stack: %s
fallback: refuse
`

// moduleContainers have their TCP by a module.
var moduleContainers = []string{"n1/c1", "n2/c1"}

// TestDifferModules runs generated programs in containers whose TCP a module runs, and on the plain
// overlay, which is that of another lab: a container with a module has no TCP of its own.
func TestDifferModules(t *testing.T) {
	plain := differLab(t, differPools{"overlay": differContainers})
	lab.Another(t, "m", "--stacks")
	for _, c := range moduleContainers {
		node, _, _ := strings.Cut(c, "/")
		lab.Heddle(t, "endpoints", "label", "--node", node, c, "stack=differ")
	}
	kinds := []string{"smoltcp", "netstack"}
	if *differStack != "" {
		if !slices.Contains(kinds, *differStack) {
			t.Fatalf("-differ.stack=%s: want one of %v", *differStack, kinds)
		}
		kinds = []string{*differStack}
	}
	for _, kind := range kinds {
		file := filepath.Join(t.TempDir(), "profile.yaml")
		testutil.NoError(t, os.WriteFile(file, fmt.Appendf(nil, moduleProfile, kind), 0o600))
		lab.Heddle(t, "stack", "apply", "--node", "n1", file)
		t.Run(kind, func(t *testing.T) {
			hosts := differLab(t, differPools{"heddle": differContainers, "overlay": {"n1/c2", "n2/c2"}})
			runner := func(p differ.Program, mode string, pace differ.Pace) (differ.Trace, error) {
				on := hosts
				if mode == "overlay" {
					on = plain
				}
				trace, err := on.Run(p, mode, pace)
				generate.Modules.Level(p, &trace)
				return trace, err
			}
			for _, p := range namedPrograms(t, "testdata/differ/modules/*.json") {
				if f, err := differ.Check(runner, p, 3); err != nil || f != nil {
					t.Errorf("%s: %v\n%v", p.Name, err, f)
				}
			}
			h := &hunt{t: t, runner: runner, set: generate.Modules}
			h.asked(300)
		})
	}
}
