// Package layout is values of layouts that C, Rust and Go share (clib/generate.sh) as bytes, in the
// machine's own byte order: messages between an agent and programs beside it.
package layout

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrMalformed is the error of bytes that are no message of the expected type.
var ErrMalformed = errors.New("malformed message")

// Append appends the bytes of v, whose type has a fixed size.
func Append[T any](b []byte, v *T) []byte {
	b, err := binary.Append(b, binary.NativeEndian, v)
	if err != nil {
		panic(err) // of a type without a fixed size
	}
	return b
}

// Parse reads a value, which all of b has to be.
func Parse[T any](b []byte) (T, error) {
	v, rest, err := Take[T](b)
	if err == nil && len(rest) > 0 {
		return v, fmt.Errorf("%w: %d bytes more than %T has", ErrMalformed, len(rest), v)
	}
	return v, err
}

// Take reads the value that b begins with, and gives what follows it.
func Take[T any](b []byte) (v T, rest []byte, err error) {
	n, err := binary.Decode(b, binary.NativeEndian, &v)
	if err != nil {
		return v, nil, fmt.Errorf("%w: %d bytes, fewer than %T has", ErrMalformed, len(b), v)
	}
	return v, b[n:], nil
}
