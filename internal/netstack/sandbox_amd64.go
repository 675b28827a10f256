package netstack

import "golang.org/x/sys/unix"

// archCalls are calls that other architectures do not have.
var archCalls = []uint32{unix.SYS_EPOLL_WAIT, unix.SYS_POLL, unix.SYS_ARCH_PRCTL}
