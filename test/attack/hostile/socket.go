package main

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// addressOf is the kernel's form of a socket address: AF_INET of an IPv4 one, AF_INET6 of others,
// v4-mapped ones too.
func addressOf(a netip.Addr, port int) []byte {
	if a.Is4() {
		raw, ip := make([]byte, unix.SizeofSockaddrInet4), a.As4()
		binary.NativeEndian.PutUint16(raw, unix.AF_INET)
		binary.BigEndian.PutUint16(raw[2:], uint16(port))
		copy(raw[4:], ip[:])
		return raw
	}
	raw, ip := make([]byte, unix.SizeofSockaddrInet6), a.As16()
	binary.NativeEndian.PutUint16(raw, unix.AF_INET6)
	binary.BigEndian.PutUint16(raw[2:], uint16(port))
	copy(raw[8:], ip[:])
	return raw
}

// mapped is the IPv4 address as an AF_INET6 socket has it.
func mapped(a netip.Addr) netip.Addr { return netip.AddrFrom16(a.As16()) }

// parse reads an IPv4 address of the command line.
func parse(arg string) netip.Addr {
	a, err := netip.ParseAddr(arg)
	check(arg, err)
	return a
}

// newSocket makes a TCP socket whose calls end after some seconds, and ends the program if it
// cannot.
func newSocket(family int) int {
	fd, err := unix.Socket(family, unix.SOCK_STREAM, 0)
	check("socket", err)
	limit := unix.Timeval{Sec: 5}
	check("SO_RCVTIMEO", unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit))
	check("SO_SNDTIMEO", unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit))
	return fd
}

// call makes a system call with a socket, memory and its length.
func call(nr uintptr, fd int, memory []byte, length int) unix.Errno {
	_, _, errno := unix.Syscall(nr, uintptr(fd), uintptr(unsafe.Pointer(&memory[0])), uintptr(length))
	return errno
}

func bind(fd int, sa []byte) unix.Errno    { return call(unix.SYS_BIND, fd, sa, len(sa)) }
func connect(fd int, sa []byte) unix.Errno { return call(unix.SYS_CONNECT, fd, sa, len(sa)) }

// disconnect undoes a connect: AF_UNSPEC, in as many bytes as are given.
func disconnect(fd, length int) unix.Errno {
	return call(unix.SYS_CONNECT, fd, make([]byte, max(length, 1)), length)
}

// sendFast connects and sends in one call.
func sendFast(fd int, sa []byte) unix.Errno {
	data := [1]byte{'x'}
	_, _, errno := unix.Syscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&data[0])), 1, unix.MSG_FASTOPEN,
		uintptr(unsafe.Pointer(&sa[0])), uintptr(len(sa)))
	return errno
}

// greeting is what the other end says first, or why it does not.
func greeting(fd int) string {
	var b [16]byte
	n, err := unix.Read(fd, b[:])
	if err != nil {
		return nameOf(err.(unix.Errno))
	}
	return string(b[:n])
}

// greeted is the greeting of a connect that came to errno.
func greeted(fd int, errno unix.Errno) string {
	if errno != 0 {
		return nameOf(errno)
	}
	return greeting(fd)
}

// localOf is the address that getsockname() shows.
func localOf(fd int) netip.AddrPort {
	sa, err := unix.Getsockname(fd)
	check("getsockname", err)
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))
	}
	return netip.AddrPort{}
}
