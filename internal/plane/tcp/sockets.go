package tcp

import (
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// tagger is the part of the datapath that making a socket needs.
type tagger interface {
	AddressOf(id model.EndpointID) (netip.Addr, bool)
	TagSocket(fd int, id model.EndpointID, mptcp bool) error
	CountSocket(fd int, caller model.Caller) error
}

// sockets makes the sockets that containers are handed. It has no state: any thread in the node's
// network namespace may call it.
type sockets struct {
	tags tagger
	// nodePorts are ports that the sockets do not get, the end of the node's ephemeral ports; the
	// zero range is none.
	nodePorts model.PortRange
}

// MakeSocket makes a TCP socket of endpoint ep in the calling thread's network namespace:
// transparent, so that it may use overlay addresses; at its container's address; tagged last, when
// it is ready for the hooks, and marked with that, so that overlay addresses are local to it.
func (s sockets) MakeSocket(ep model.EndpointID, family int) (fd int, err error) {
	fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	if err := setInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1); err != nil {
		return -1, fmt.Errorf("set IP_TRANSPARENT: %w", err)
	}
	if s.nodePorts.First != 0 && model.ProtectPorts.On() {
		if err := setInt(fd, unix.SOL_IP, ipLocalPortRange, int32(s.nodePorts.First-1)<<16); err != nil {
			return -1, fmt.Errorf("set IP_LOCAL_PORT_RANGE: %w", err)
		}
	}
	if model.ProtectSocketOptions.On() {
		// Timestamps on the error queue come without the packets, which have the underlay's
		// addresses.
		if err := setInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPING, unix.SOF_TIMESTAMPING_OPT_TSONLY); err != nil {
			return -1, fmt.Errorf("set SO_TIMESTAMPING: %w", err)
		}
	}
	if family == unix.AF_INET6 {
		// Underneath, IPv6 sockets use v4-mapped addresses; the program's own wish is kept in the
		// tag.
		if err := setInt(fd, unix.SOL_IPV6, unix.IPV6_V6ONLY, 0); err != nil {
			return -1, fmt.Errorf("clear IPV6_V6ONLY: %w", err)
		}
	}
	if addr, ok := s.tags.AddressOf(ep); ok {
		if err := place(fd, family, addr); err != nil {
			return -1, err
		}
	}
	if err := s.tags.TagSocket(fd, ep, false); err != nil {
		return -1, err
	}
	return fd, nil
}

// setInt sets a socket option without Go's scheduler, as unix.Socket makes the socket: nobody else
// has it, so the call does not wait. Ten such calls make a socket.
func setInt(fd, level, name int, value int32) error {
	_, _, errno := unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name),
		uintptr(unsafe.Pointer(&value)), unsafe.Sizeof(value), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// place gives a socket the address that it listens at if its program listens without bind(): the
// kernel then looks for a port there, and not at all addresses of the node. bind() and connect()
// take the place of it, as for any socket without a port.
func place(fd, family int, addr netip.Addr) error {
	if err := setInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1); err != nil {
		return fmt.Errorf("set IP_BIND_ADDRESS_NO_PORT: %w", err)
	}
	at4 := unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: addr.As4()}
	at, size := unsafe.Pointer(&at4), unsafe.Sizeof(at4)
	if family == unix.AF_INET6 {
		at6 := unix.RawSockaddrInet6{Family: unix.AF_INET6, Addr: addr.As16()}
		at, size = unsafe.Pointer(&at6), unsafe.Sizeof(at6)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_BIND, uintptr(fd), uintptr(at), size); errno != 0 {
		return fmt.Errorf("bind %v: %w", addr, errno)
	}
	if err := setInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 0); err != nil {
		return fmt.Errorf("clear IP_BIND_ADDRESS_NO_PORT: %w", err)
	}
	return nil
}

// SetMPTCP says in the tag of a new socket whether its program asked for IPPROTO_MPTCP.
func (s sockets) SetMPTCP(fd int, ep model.EndpointID, on bool) error {
	return s.tags.TagSocket(fd, ep, on)
}

// Admit counts a socket as one of its endpoint's.
func (s sockets) Admit(fd int, caller model.Caller) error { return s.tags.CountSocket(fd, caller) }
