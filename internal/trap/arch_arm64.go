package trap

import "golang.org/x/sys/unix"

// NativeArch is the architecture whose system call numbers unix.SYS_* are, as Data.Arch has it.
const NativeArch = unix.AUDIT_ARCH_AARCH64
