package session

import (
	"time"

	"github.com/spf13/pflag"
)

// Settings are the flags that several benchmarks have. A benchmark's own are its own variables.
type Settings struct {
	Workloads, Scopes, Modes []string
	Runs                     int
	Duration                 time.Duration
	Lab                      string
	JSON, Plot               string // files; "": not wanted
	Quick, Up                bool
}

// Flags declares flags: those that several benchmarks have by the methods here, with one name and
// meaning each.
type Flags struct {
	*pflag.FlagSet
	*Settings
}

// Runs declares --runs.
func (f Flags) DeclareRuns(runs int, usage string) { f.IntVar(&f.Runs, "runs", runs, usage) }

// DeclareDuration declares --duration.
func (f Flags) DeclareDuration(d time.Duration, usage string) {
	f.DurationVar(&f.Settings.Duration, "duration", d, usage)
}

// DeclareWorkloads declares --workloads.
func (f Flags) DeclareWorkloads(names []string, usage string) {
	f.StringSliceVar(&f.Workloads, "workloads", names, usage)
}

// DeclareScopes declares --scopes.
func (f Flags) DeclareScopes() {
	f.StringSliceVar(&f.Scopes, "scopes", []string{"inter", "intra"}, "inter (between nodes), intra (on one node)")
}

// DeclareModes declares --modes.
func (f Flags) DeclareModes(usage string, names ...string) {
	f.StringSliceVar(&f.Modes, "modes", names, "modes to compare; host is needed"+usage)
}
