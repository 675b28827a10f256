package doctor

import (
	"errors"
	"fmt"

	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netns"
)

// addFD mirrors struct seccomp_notif_addfd.
type addFD struct {
	id                             uint64
	flags, srcFD, newFD, newFDFlag uint32
}

// probeSeccomp tries the user notification interface on a thread of its own, with a filter that
// lets everything pass. The thread is never unlocked, so the runtime ends it, and the filter with
// it, when the goroutine ends.
func probeSeccomp() []finding {
	var out []finding
	err := netns.OnDiscardedThread(func() error {
		out = seccompFindings()
		return nil
	})
	if err != nil {
		return []finding{{name: "seccomp_notify", detail: "a listener for trapped calls", err: err}}
	}
	return out
}

// seccompFindings leaves the calling thread with a filter, which cannot be taken off.
func seccompFindings() []finding {
	listener := finding{name: "seccomp_notify", detail: "a listener for trapped calls"}
	add := finding{name: "seccomp_addfd", detail: "SECCOMP_IOCTL_NOTIF_ADDFD"}
	wake := finding{name: "seccomp_sync_wake_up", detail: "SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP"}
	killable := finding{name: "seccomp_wait_killable", detail: "SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"}

	fd, err := newListener(unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV)
	if errors.Is(err, unix.EINVAL) {
		// The flag is unknown, or everything is.
		killable.err = fmt.Errorf("seccomp(SECCOMP_SET_MODE_FILTER): %w", err)
		fd, err = newListener(0)
	}
	if err != nil {
		listener.err = listenerError(err)
		noListener := errors.New("not tried: no listener")
		add.err, wake.err = noListener, noListener
		if killable.err == nil && !errors.Is(err, unix.EBUSY) {
			killable.err = noListener
		}
		return []finding{listener, add, wake, killable}
	}
	add.err, wake.err = tryAddFD(fd), trySyncWakeUp(fd)
	listener.err = unix.Close(fd)
	return []finding{listener, add, wake, killable}
}

func newListener(flags uintptr) (fd int, err error) {
	const returnConstant = unix.BPF_RET | unix.BPF_K
	filter := unix.SockFilter{Code: returnConstant, K: unix.SECCOMP_RET_ALLOW}
	prog := unix.SockFprog{Len: 1, Filter: &filter}
	r, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_NEW_LISTENER|flags, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return -1, errno
	}
	return int(r), nil
}

func listenerError(err error) error {
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("this process is under a seccomp listener already: %w", err)
	}
	return fmt.Errorf("seccomp(SECCOMP_SET_MODE_FILTER, NEW_LISTENER): %w", err)
}

// tryAddFD answers a call that was never made: a kernel that does not know the request says EINVAL,
// others look for the call (ENOENT).
func tryAddFD(listener int) error {
	a := addFD{srcFD: uint32(listener)}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), unix.SECCOMP_IOCTL_NOTIF_ADDFD, uintptr(unsafe.Pointer(&a)))
	switch errno {
	case unix.ENOENT:
		return nil
	case 0:
		return errors.New("ioctl(SECCOMP_IOCTL_NOTIF_ADDFD): the kernel took an answer to no call")
	}
	return fmt.Errorf("ioctl(SECCOMP_IOCTL_NOTIF_ADDFD): %w", errno)
}

func trySyncWakeUp(listener int) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), unix.SECCOMP_IOCTL_NOTIF_SET_FLAGS,
		unix.SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP)
	if errno != 0 {
		return fmt.Errorf("ioctl(SECCOMP_IOCTL_NOTIF_SET_FLAGS): %w", errno)
	}
	return nil
}
