package intercept

import (
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/trap"
)

// sockTypeMask is the kernel's SOCK_TYPE_MASK: the part of socket()'s second argument that is the
// type.
const sockTypeMask = 0xf

// request is a trapped call that asks for a TCP socket.
type request struct {
	family      int  // AF_INET or AF_INET6
	mptcp       bool // asked for by IPPROTO_MPTCP
	closeOnExec bool
	nonblock    bool
	batch       int // how many sockets are wanted in a batch (batch.go); 0: one socket, as it is
}

// parse reads a trapped call. It returns false for everything but a well-formed socket() call for
// TCP over IPv4 or IPv6: those the kernel carries out, or refuses with the right errno, in the
// container's own namespace. That includes calls by 32-bit programs, whose call numbers are another
// table's.
func parse(d *trap.Data) (request, bool) {
	if d.Arch != trap.NativeArch || d.Nr != unix.SYS_SOCKET {
		return request{}, false
	}
	// The kernel takes ints: it ignores the upper halves of the registers, and so must we.
	family, typ, protocol := int(int32(d.Args[0])), int(int32(d.Args[1])), int(int32(d.Args[2]))
	if family != unix.AF_INET && family != unix.AF_INET6 {
		return request{}, false
	}
	if typ&sockTypeMask != unix.SOCK_STREAM {
		return request{}, false
	}
	if typ&^(sockTypeMask|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK) != 0 {
		return request{}, false
	}
	switch protocol {
	case 0, unix.IPPROTO_TCP:
	case unix.IPPROTO_MPTCP:
		// MPTCP falls back to TCP with any peer that lacks it; programs that ask for it (Go's
		// listeners do) must cope with that already.
	default:
		return request{}, false
	}
	return request{
		family:      family,
		mptcp:       protocol == unix.IPPROTO_MPTCP,
		closeOnExec: typ&unix.SOCK_CLOEXEC != 0,
		nonblock:    typ&unix.SOCK_NONBLOCK != 0,
		batch:       batchWanted(d, protocol),
	}, true
}

// key tells a request from others that ask for something else; it is never 0.
func (r request) key() uint64 {
	key := uint64(1)<<32 | uint64(r.batch)<<16 | uint64(r.family)<<8
	for i, is := range []bool{r.mptcp, r.closeOnExec, r.nonblock} {
		if is {
			key |= 1 << i
		}
	}
	return key
}
