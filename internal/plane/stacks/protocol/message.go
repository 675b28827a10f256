// Package protocol has the messages between an agent and a stack module, which
// docs/protocols/stack-module.md describes. abi.go is made of clib/stack/protocol.h, as the Rust
// side is.
package protocol

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
)

// ErrMalformed is the error of bytes that are no message of the expected type.
var ErrMalformed = errors.New("malformed message of the stack module")

// Message is any message of the protocol.
type Message interface {
	Plain | Hello | Tenant | Bind | Listen | Connect | Named | Set | Close | Accepted | Info | Stats
}

// Append appends the bytes of m, in the machine's own byte order.
func Append[M Message](b []byte, m *M) []byte {
	b, err := binary.Append(b, binary.NativeEndian, m)
	if err != nil {
		panic(err) // of a type without a fixed size, of which Message has none
	}
	return b
}

// ParseHead reads the head that each message begins with. An answer that says an error has nothing
// else.
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

// AddressOf gives the form that an address and port have in messages.
func AddressOf(a netip.AddrPort) Address { return Address{Address: a.Addr().As16(), Port: a.Port()} }

// AddrPort gives an address and port of a message; IPv4 addresses are given as such.
func (a Address) AddrPort() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(a.Address).Unmap(), a.Port)
}
