package loadgen

import (
	"errors"
	"fmt"
	"io"
	"net/netip"

	"golang.org/x/sys/unix"
)

// openSocket makes a blocking TCP socket.
func openSocket(family int) (int, error) {
	for {
		fd, _, errno := unix.RawSyscall(unix.SYS_SOCKET, uintptr(family), unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		switch errno {
		case 0:
			return int(fd), nil
		case unix.EINTR:
			continue
		default:
			return -1, fmt.Errorf("socket: %w", errno)
		}
	}
}

// sockaddr gives an address and its family in the form the system calls take.
func sockaddr(a netip.AddrPort) (unix.Sockaddr, int) {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}, unix.AF_INET
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}, unix.AF_INET6
}

// dial opens a connected socket; the caller closes it.
func dial(sa unix.Sockaddr, family int) (fd int, err error) {
	if fd, err = openSocket(family); err != nil {
		return -1, err
	}
	if err = unix.Connect(fd, sa); err != nil {
		return -1, errors.Join(fmt.Errorf("connect: %w", err), unix.Close(fd))
	}
	return fd, nil
}

// noDelay has each write sent at once.
func noDelay(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	return nil
}

// writeFull writes all of b.
func writeFull(fd int, b []byte) error {
	for len(b) > 0 {
		n, err := rawWrite(fd, b)
		if err != nil && err != unix.EINTR {
			return fmt.Errorf("write: %w", err)
		}
		b = b[max(n, 0):]
	}
	return nil
}

// readFull fills b.
func readFull(fd int, b []byte) error {
	for len(b) > 0 {
		n, err := rawRead(fd, b)
		if err != nil && err != unix.EINTR {
			return fmt.Errorf("read: %w", err)
		}
		if n == 0 && err == nil {
			return fmt.Errorf("read: %w", io.ErrUnexpectedEOF)
		}
		b = b[max(n, 0):]
	}
	return nil
}

// abort closes fd with a reset, so that the port is free at once: a client that closes thousands of
// connections a second would otherwise run out of ports in TIME_WAIT.
func abort(fd int) error {
	if err := rawLingerZero(fd); err != nil {
		return errors.Join(fmt.Errorf("set SO_LINGER: %w", err), rawClose(fd))
	}
	if err := rawClose(fd); err != nil {
		return fmt.Errorf("close: %w", err)
	}
	return nil
}
