package intercept

import "golang.org/x/sys/unix"

// auditArch is the architecture whose system call numbers unix.SYS_* are.
const auditArch = unix.AUDIT_ARCH_AARCH64
