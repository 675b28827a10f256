// Package socket is the program's end of a socket whose TCP a stack module runs: the pair of
// AF_UNIX sockets that it is one of, and what the kernel keeps noted with it, socket options among
// it. It knows neither modules nor tenants, and has no state of its own but pairs that are made
// ahead of need, by the goroutine that runs Pairs. Calls of one socket are serialised by its
// callers.
package socket

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// State is what a program has done with a socket.
type State uint32

// The states of a socket, in the order of its life.
const (
	Fresh      State = 1 // the module does not know it; ID 0: it is not an end of a pair yet
	Bound      State = 2 // the module keeps its address for it
	Listening  State = 3 // what comes out of it are connections
	Connecting State = 4 // the module was asked to connect it
	Connected  State = 5 // or was, until either side ended it
	Failed     State = 6 // it was not connected, and can be used no more
)

// Flags are what a program asked for, and what it was told.
type Flags uint32

// SO_REUSEPORT, IPV6_V6ONLY and IPPROTO_MPTCP as a program asked for them.
const (
	ReusePort Flags = 1 << iota
	V6Only
	MPTCP
	// Told says that connect() has told the program that it is connected.
	Told
)

// Note is what the agent knows of the program's end of a pair. The kernel keeps it with the socket,
// for agents of this build and later ones: members are only ever added at the end, and zero must
// mean what it meant before.
type Note struct {
	ID                 uint64 // at the module; 0: none
	_                  uint64
	Tenant, Generation uint64
	State              State
	Family             uint32
	Flags              Flags
	// Error is an errno that SO_ERROR has yet to tell, or 0.
	Error         int32
	Local, Remote protocol.Address
	Backlog       uint32
	// Set has a bit for each of Options that the program has set.
	Set     uint32
	Options [optionCount]int32
	// Listener accepted it; 0: none did.
	Listener uint64
	// Congestion is enum stack_congestion as the program set it.
	Congestion uint32
	// Number is one more than the descriptor of it that a process has that called accept() and was
	// interrupted before it was told; 0: none has. Exec is whether that stays over exec().
	Number uint32
	Exec   uint32
}

// Bytes gives the form in which the kernel keeps it.
func (n *Note) Bytes() (out [plane.NoteBytes]byte) {
	if _, err := binary.Encode(out[:], binary.NativeEndian, n); err != nil {
		panic(err) // too long for NoteBytes, which TestNoteFits finds
	}
	return out
}

// ParseNote reads what Bytes gave, of this build or of another.
func ParseNote(b [plane.NoteBytes]byte) (n Note) {
	if _, err := binary.Decode(b[:], binary.NativeEndian, &n); err != nil {
		panic(err) // as above
	}
	return n
}

// Sockaddr gives an address as a program of the note's family has it.
func (n *Note) Sockaddr(a protocol.Address) []byte {
	addr := a.AddrPort()
	if n.Family == unix.AF_INET6 {
		b := make([]byte, unix.SizeofSockaddrInet6)
		binary.NativeEndian.PutUint16(b, unix.AF_INET6)
		binary.BigEndian.PutUint16(b[2:], addr.Port())
		copy(b[8:], a.Address[:])
		return b
	}
	b := make([]byte, unix.SizeofSockaddrInet4)
	binary.NativeEndian.PutUint16(b, unix.AF_INET)
	binary.BigEndian.PutUint16(b[2:], addr.Port())
	if addr.Addr().Is4() {
		four := addr.Addr().As4()
		copy(b[4:], four[:])
	}
	return b
}

// ParseSockaddr reads an address that a program gave, as bind() and connect() of the kernel's TCP
// do.
func (n *Note) ParseSockaddr(b []byte) (netip.AddrPort, unix.Errno) {
	if len(b) < 2 {
		return netip.AddrPort{}, unix.EINVAL
	}
	family := binary.NativeEndian.Uint16(b)
	switch n.Family {
	case unix.AF_INET:
		if len(b) < unix.SizeofSockaddrInet4 {
			return netip.AddrPort{}, unix.EINVAL
		}
		if family != unix.AF_INET && (family != unix.AF_UNSPEC || [4]byte(b[4:8]) != [4]byte{}) {
			return netip.AddrPort{}, unix.EAFNOSUPPORT
		}
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:])), 0
	}
	if len(b) < sizeofSockaddrInet6Old {
		return netip.AddrPort{}, unix.EINVAL
	}
	if family != unix.AF_INET6 {
		return netip.AddrPort{}, unix.EAFNOSUPPORT
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[8:24])).Unmap(), binary.BigEndian.Uint16(b[2:])), 0
}

// sizeofSockaddrInet6Old is without sin6_scope_id (RFC 2133), which the kernel takes, too.
const sizeofSockaddrInet6Old = 24

// Unspecified is where a socket is that was not bound.
func (n *Note) Unspecified() netip.AddrPort {
	if n.Family == unix.AF_INET6 {
		return netip.AddrPortFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
}
