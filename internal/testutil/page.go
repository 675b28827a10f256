package testutil

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// MissingPage maps a page that is there once somebody answers uffd, as one of a file system in user
// space is.
func MissingPage() (page []byte, uffd int, err error) {
	const apiIoctl, registerIoctl, api, missing = 0xc018aa3f, 0xc020aa00, 0xaa, 1
	fd, _, e := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	if e != 0 {
		return nil, -1, fmt.Errorf("userfaultfd: %w", e)
	}
	hello := [3]uint64{api}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, fd, apiIoctl, uintptr(unsafe.Pointer(&hello))); e != 0 {
		return nil, -1, fmt.Errorf("userfaultfd: %w", e)
	}
	if page, err = unix.Mmap(-1, 0, unix.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return nil, -1, err
	}
	area := [4]uint64{uint64(uintptr(unsafe.Pointer(&page[0]))), uint64(len(page)), missing}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, fd, registerIoctl, uintptr(unsafe.Pointer(&area))); e != 0 {
		return nil, -1, fmt.Errorf("userfaultfd: %w", e)
	}
	return page, int(fd), nil
}

// ProvidePage answers uffd for the page of MissingPage: it is empty.
func ProvidePage(page []byte, uffd int) error {
	const zeroPageIoctl = 0xc020aa04
	area := [4]uint64{uint64(uintptr(unsafe.Pointer(&page[0]))), uint64(len(page))}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(uffd), zeroPageIoctl, uintptr(unsafe.Pointer(&area))); e != 0 {
		return fmt.Errorf("userfaultfd: %w", e)
	}
	return nil
}
