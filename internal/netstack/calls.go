package netstack

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Calls that move bytes, past Go's scheduler. None of them waits, but within a write the kernel
// carries a packet to its receiver: of a call that takes longer than 20 us the scheduler thinks
// that it waits, and wakes another thread to go on with the process's one processor.

// part is a slice as the kernel takes it.
func part(b []byte) unix.Iovec {
	v := unix.Iovec{Base: unsafe.SliceData(b)}
	v.SetLen(len(b))
	return v
}

// read reads a packet from a device that does not block.
func read(fd uintptr, b []byte) (int, error) {
	return result(unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b))))
}

// writeParts writes a packet to a device that does not block.
func writeParts(fd uintptr, parts []unix.Iovec) (int, error) {
	return result(unix.RawSyscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(parts))), uintptr(len(parts))))
}

// receiveParts reads from a socket.
func receiveParts(fd int, parts []unix.Iovec) (int, error) {
	m := unix.Msghdr{Iov: unsafe.SliceData(parts)}
	m.SetIovlen(len(parts))
	return result(unix.RawSyscall(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(&m)), unix.MSG_DONTWAIT))
}

// send writes to a socket.
func send(fd int, b []byte) (int, error) {
	return result(unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)),
		unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0))
}

func result(n, _ uintptr, errno unix.Errno) (int, error) {
	if errno != 0 {
		return -1, errno
	}
	return int(n), nil
}
