// Package protocol has the messages between an agent and the service of queues, which
// docs/protocols/stack-queues.md describes. abi.go is made of clib/stack/queues.h, as the Rust side
// is.
package protocol

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrMalformed is the error of bytes that are no message of the expected type.
var ErrMalformed = errors.New("malformed message of the service of queues")

// Message is any message of the protocol.
type Message interface {
	Plain | Region | Give | Make | Stats
}

// Append appends the bytes of m, in the machine's own byte order.
func Append[M Message](b []byte, m *M) []byte {
	b, err := binary.Append(b, binary.NativeEndian, m)
	if err != nil {
		panic(err) // of a type without a fixed size, of which Message has none
	}
	return b
}

// ParseHead reads the head that each message begins with.
func ParseHead(b []byte) (Head, error) {
	var h Head
	if _, err := binary.Decode(b, binary.NativeEndian, &h); err != nil || h.Reserved != 0 || h.Error < 0 {
		return Head{}, fmt.Errorf("%w: %d bytes", ErrMalformed, len(b))
	}
	return h, nil
}

// Parse reads a message, which has to be as long as its type is.
func Parse[M Message](b []byte) (M, error) {
	var m M
	if n := binary.Size(&m); n != len(b) {
		return m, fmt.Errorf("%w: %d bytes, not the %d of %T", ErrMalformed, len(b), n, m)
	}
	_, err := binary.Decode(b, binary.NativeEndian, &m)
	return m, err
}
