package intercept

import "golang.org/x/sys/unix"

// auditArch is the architecture whose system call numbers unix.SYS_* are.
const auditArch = unix.AUDIT_ARCH_X86_64

// compatIoctl reports whether the call is ioctl() of the i386 or the x32 interface.
func compatIoctl(d *callData) bool {
	const i386, x32 = 54, 0x40000000 | 514
	return d.Arch == unix.AUDIT_ARCH_I386 && d.Nr == i386 || d.Arch == auditArch && d.Nr == x32
}
