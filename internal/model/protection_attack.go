//go:build attack

package model

import (
	"fmt"
	"os"
)

// EnvWithout names the environment variable that lists what an attack build does without. Product builds do not know
// it.
const EnvWithout = "HEDDLE_WITHOUT"

var without = func() uint64 {
	set, err := ParseProtections(os.Getenv(EnvWithout))
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", EnvWithout, err)
		os.Exit(2)
	}
	return set
}()

// On reports whether the protection is in force.
func (p Protection) On() bool { return without>>p&1 == 0 }

// Without gives the set of protections that this program does without: bit i for Protection i.
func Without() uint64 { return without }
