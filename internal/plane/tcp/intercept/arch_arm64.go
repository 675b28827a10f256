package intercept

import "golang.org/x/sys/unix"

// auditArch is the architecture whose system call numbers unix.SYS_* are.
const auditArch = unix.AUDIT_ARCH_AARCH64

// compatIoctl reports whether the call is ioctl() of the 32-bit interface.
func compatIoctl(d *callData) bool { return d.Arch == unix.AUDIT_ARCH_ARM && d.Nr == 54 }
