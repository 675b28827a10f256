package model

import (
	"fmt"
	"slices"
)

// ClearConnections says what becomes of direct connections that stood before their node began to
// encrypt, and go on in the clear.
type ClearConnections string

// What becomes of them.
const (
	ClearEnd  ClearConnections = "end"  // they are ended
	ClearKeep ClearConnections = "keep" // they go on, and the status says how many there are
)

// Validate reports what is neither.
func (c ClearConnections) Validate() error {
	if all := []ClearConnections{ClearEnd, ClearKeep}; !slices.Contains(all, c) {
		return fmt.Errorf("encrypt open connections %.40q: want %s or %s", c, ClearEnd, ClearKeep)
	}
	return nil
}
