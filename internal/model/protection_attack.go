//go:build attack

package model

import (
	"fmt"
	"os"
	"sync/atomic"
)

// EnvWithout names the environment variable that lists what an attack build does without, and
// EnvWithoutFile the file whose list a running agent takes in its place at each SIGUSR1. Product
// builds do not know them.
const (
	EnvWithout     = "HEDDLE_WITHOUT"
	EnvWithoutFile = "HEDDLE_WITHOUT_FILE"
)

var without = func() *atomic.Uint64 {
	set, err := ParseProtections(os.Getenv(EnvWithout))
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", EnvWithout, err)
		os.Exit(2)
	}
	var w atomic.Uint64
	w.Store(set)
	return &w
}()

// On reports whether the protection is in force.
func (p Protection) On() bool { return without.Load()>>p&1 == 0 }

// Without gives the set of protections that this program does without: bit i for Protection i.
func Without() uint64 { return without.Load() }

// SetWithout makes set what this program does without.
func SetWithout(set uint64) { without.Store(set) }
