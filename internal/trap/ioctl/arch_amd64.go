package ioctl

import (
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/trap"
)

// compat reports whether the call is ioctl() of the i386 or the x32 interface.
func compat(d *trap.Data) bool {
	const i386, x32 = 54, 0x40000000 | 514
	return d.Arch == unix.AUDIT_ARCH_I386 && d.Nr == i386 || d.Arch == trap.NativeArch && d.Nr == x32
}
