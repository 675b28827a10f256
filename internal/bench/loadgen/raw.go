package loadgen

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The measured loops enter the kernel by these, behind the Go scheduler's back, as a C program
// would. Told of every call, the scheduler's monitor thread wakes every 20 microseconds on some
// processor to take the loop's place in the scheduler away, which costs more than what is measured.
// Each loop has a thread of its own, nothing else needs to run in the process, and garbage
// collection is off.

func rawErr(e unix.Errno) error {
	if e == 0 {
		return nil
	}
	return e
}

func rawRead(fd int, b []byte) (int, error) {
	n, _, e := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return int(n), rawErr(e)
}

func rawWrite(fd int, b []byte) (int, error) {
	n, _, e := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return int(n), rawErr(e)
}

func rawClose(fd int) error {
	_, _, e := unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0)
	return rawErr(e)
}

// rawAddress is a socket address in the kernel's form.
type rawAddress struct {
	family int
	length uintptr
	bytes  [unix.SizeofSockaddrInet6]byte
}

func newRawAddress(a netip.AddrPort) *rawAddress {
	r := &rawAddress{family: unix.AF_INET, length: unix.SizeofSockaddrInet4}
	at := 4 // behind family and port
	if a.Addr().Is6() {
		r.family, r.length = unix.AF_INET6, unix.SizeofSockaddrInet6
		at = 8 // and flow information
	}
	binary.NativeEndian.PutUint16(r.bytes[0:], uint16(r.family))
	binary.BigEndian.PutUint16(r.bytes[2:], a.Port())
	copy(r.bytes[at:], a.Addr().AsSlice())
	return r
}

func rawConnect(fd int, to *rawAddress) error {
	_, _, e := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&to.bytes)), to.length)
	return rawErr(e)
}

// rawLingerZero makes close(fd) send a reset.
func rawLingerZero(fd int) error {
	linger := unix.Linger{Onoff: 1}
	_, _, e := unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_LINGER,
		uintptr(unsafe.Pointer(&linger)), unix.SizeofLinger, 0)
	return rawErr(e)
}

func rawAccept(listener int) (int, error) {
	fd, _, e := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(listener), 0, 0, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
	return int(fd), rawErr(e)
}

func rawEpollWait(epoll int, events []unix.EpollEvent) (int, error) {
	n, _, e := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epoll), uintptr(unsafe.Pointer(&events[0])),
		uintptr(len(events)), ^uintptr(0), 0, 0)
	return int(n), rawErr(e)
}
