// Package protocol has the messages between an agent and a stack module, which
// docs/protocols/stack-module.md describes. abi.go is made of clib/stack/protocol.h, as the Rust
// side is.
package protocol

import (
	"fmt"
	"net/netip"

	"heddle.dev/heddle/internal/plane/layout"
)

// ErrMalformed is the error of bytes that are no message of the expected type.
var ErrMalformed = layout.ErrMalformed

// Message is any message of the protocol.
type Message interface {
	Plain | Hello | Tenant | Bind | Listen | Connect | Named | Set | Close | Accepted | Info | Stats
}

// Append appends the bytes of m.
func Append[M Message](b []byte, m *M) []byte { return layout.Append(b, m) }

// ParseHead reads the head that each message begins with. An answer that says an error has nothing
// else.
func ParseHead(b []byte) (Head, error) {
	h, _, err := layout.Take[Head](b)
	if err != nil || h.Reserved != 0 || h.Error < 0 {
		return Head{}, fmt.Errorf("%w: %d bytes", ErrMalformed, len(b))
	}
	return h, nil
}

// Parse reads a message, which has to be as long as its type is.
func Parse[M Message](b []byte) (M, error) { return layout.Parse[M](b) }

// AddressOf gives the form that an address and port have in messages.
func AddressOf(a netip.AddrPort) Address { return Address{Address: a.Addr().As16(), Port: a.Port()} }

// AddrPort gives an address and port of a message; IPv4 addresses are given as such.
func (a Address) AddrPort() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(a.Address).Unmap(), a.Port)
}
