//go:build !attack

package model

// On reports whether the protection is in force: always.
func (p Protection) On() bool { return true }

// Without gives the set of protections that this program does without: none.
func Without() uint64 { return 0 }
