package main

import "slices"

// known are the cases that fail through Heddle because of a difference that stays, by suite, module
// and case, with the difference as docs/differences.md has it. One that no longer fails has to go
// from here.
var known = map[[3]string]string{
	{"go", "net", "TestMultiPathTCP"}:       mptcp,
	{"go", "net (cgo)", "TestMultiPathTCP"}: mptcp,
}

const mptcp = "a request for MPTCP gives a TCP socket, and the test wants to see MPTCP (docs/differences.md, socket options)"

// reason gives the known difference behind a case that fails, or "".
func (v verdict) reason(d difference) string { return known[[3]string{v.suite, v.name, d.name}] }

// outlived gives the cases of the module whose known difference is gone: both modes pass them.
func (v verdict) outlived() []string {
	var out []string
	for key := range known {
		if key[0] == v.suite && key[1] == v.name && v.on.cases[key[2]].outcome == passed && v.through.cases[key[2]].outcome == passed {
			out = append(out, key[2])
		}
	}
	slices.Sort(out)
	return out
}
