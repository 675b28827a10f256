package netstack

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Calls of turns and packets, past Go's scheduler. None of them waits, but within a write the
// kernel carries a packet to its receiver: of a call that takes longer than 20 us the scheduler
// thinks that it waits, and wakes another thread to go on with the process's one processor. And
// each call that the scheduler sees wakes the thread that looks for such ones, which had gone to
// sleep when all waited: it then wakes every 20 us. tenant.gate makes one now and then.

// part is a slice as the kernel takes it.
func part(b []byte) unix.Iovec {
	v := unix.Iovec{Base: unsafe.SliceData(b)}
	v.SetLen(len(b))
	return v
}

// readParts reads a packet from a device that does not block.
func readParts(fd uintptr, parts []unix.Iovec) (int, error) {
	return result(unix.RawSyscall(unix.SYS_READV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(parts))), uintptr(len(parts))))
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

// peek reads from a socket what stays in it.
func peek(fd int, b []byte) (int, error) {
	return result(unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)),
		unix.MSG_PEEK|unix.MSG_DONTWAIT, 0, 0))
}

// queued counts the bytes that wait in a socket.
func queued(fd int) (int, error) {
	var n int32
	_, err := result(unix.RawSyscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCINQ, uintptr(unsafe.Pointer(&n))))
	return int(n), err
}

// poll asks for events without waiting.
func poll(fd *unix.PollFd) error {
	var now unix.Timespec
	_, err := result(unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(fd)), 1, uintptr(unsafe.Pointer(&now)), 0, 0, 0))
	return err
}

// epollWait asks a set for events without waiting.
func epollWait(fd int, events []unix.EpollEvent) (int, error) {
	return result(unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(events))), uintptr(len(events)), 0, 0, 0))
}

func result(n, _ uintptr, errno unix.Errno) (int, error) {
	if errno != 0 {
		return -1, errno
	}
	return int(n), nil
}
