// Package protocol has the messages between an agent and the service of queues, which
// docs/protocols/stack-queues.md describes. abi.go is made of clib/stack/queues.h, as the Rust side
// is.
package protocol

import (
	"fmt"

	"heddle.dev/heddle/internal/plane/layout"
)

// ErrMalformed is the error of bytes that are no message of the expected type.
var ErrMalformed = layout.ErrMalformed

// Message is any message of the protocol.
type Message interface {
	Plain | Region | Give | Make | Stats
}

// Append appends the bytes of m.
func Append[M Message](b []byte, m *M) []byte { return layout.Append(b, m) }

// ParseHead reads the head that each message begins with.
func ParseHead(b []byte) (Head, error) {
	h, _, err := layout.Take[Head](b)
	if err != nil || h.Reserved != 0 || h.Error < 0 {
		return Head{}, fmt.Errorf("%w: %d bytes", ErrMalformed, len(b))
	}
	return h, nil
}

// Parse reads a message, which has to be as long as its type is.
func Parse[M Message](b []byte) (M, error) { return layout.Parse[M](b) }
