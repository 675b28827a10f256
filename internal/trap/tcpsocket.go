package trap

import "golang.org/x/sys/unix"

// TCPSocket is what a socket() for TCP asks for.
type TCPSocket struct {
	Family                       int // AF_INET or AF_INET6
	MPTCP, CloseOnExec, Nonblock bool
}

// ParseTCPSocket reads a trapped call. It returns false for everything but a well-formed socket()
// call for TCP over IPv4 or IPv6: those the kernel carries out, or refuses with the right errno, in
// the container's own namespace. That includes calls by 32-bit programs, whose call numbers are
// another table's.
func ParseTCPSocket(d *Data) (s TCPSocket, ok bool) {
	// The kernel takes ints: it ignores the upper halves of the registers, and so must we.
	family, typ, protocol := int(int32(d.Args[0])), int(int32(d.Args[1])), int(int32(d.Args[2]))
	s = TCPSocket{
		Family: family,
		// MPTCP falls back to TCP with any peer that lacks it; programs that ask for it (Go's
		// listeners do) must cope with that already.
		MPTCP:       protocol == unix.IPPROTO_MPTCP,
		CloseOnExec: typ&unix.SOCK_CLOEXEC != 0, Nonblock: typ&unix.SOCK_NONBLOCK != 0,
	}
	return s, d.Arch == NativeArch && d.Nr == unix.SYS_SOCKET &&
		(family == unix.AF_INET || family == unix.AF_INET6) && typ&^(unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK) == unix.SOCK_STREAM &&
		(protocol == 0 || protocol == unix.IPPROTO_TCP || s.MPTCP)
}

// Key tells what is asked for from what others ask for, in the 16 lowest bits.
func (s TCPSocket) Key() uint64 {
	key := uint64(s.Family) << 8
	for i, is := range []bool{s.MPTCP, s.CloseOnExec, s.Nonblock} {
		if is {
			key |= 1 << i
		}
	}
	return key
}
