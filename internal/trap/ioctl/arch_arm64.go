package ioctl

import (
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/trap"
)

// compat reports whether the call is ioctl() of the 32-bit interface.
func compat(d *trap.Data) bool { return d.Arch == unix.AUDIT_ARCH_ARM && d.Nr == 54 }
