package process

import "golang.org/x/sys/unix"

// archForbidden are calls that other architectures do not have.
var archForbidden = []uint32{unix.SYS_IOPL, unix.SYS_IOPERM, unix.SYS_MODIFY_LDT, unix.SYS_USELIB}
