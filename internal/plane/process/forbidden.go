package process

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/callfilter"
)

// forbidden are the calls that fail for a confined program, with what it starts: those by which the
// kernel was broken into, or which look into other processes, and all that lead to sockets of the
// node, which lie in its file system. Any program can do without that moves bytes between
// descriptors that it is given; how it starts is its own affair, so that this cannot be a list of
// what it may call.
var forbidden = append(append(callfilter.Each(unix.EPERM,
	// other processes
	unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_PROCESS_MADVISE, unix.SYS_PIDFD_GETFD,
	unix.SYS_KCMP,
	// parts of the kernel that few programs need
	unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD, unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER,
	unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL, unix.SYS_FANOTIFY_INIT, unix.SYS_QUOTACTL, unix.SYS_QUOTACTL_FD, unix.SYS_SYSLOG,
	// namespaces and mounts
	unix.SYS_UNSHARE, unix.SYS_SETNS, unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_CHROOT, unix.SYS_MOVE_MOUNT, unix.SYS_OPEN_TREE,
	unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_MOUNT_SETATTR,
	unix.SYS_NAME_TO_HANDLE_AT, unix.SYS_OPEN_BY_HANDLE_AT,
	// the machine
	unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE, unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD, unix.SYS_REBOOT,
	unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_ACCT, unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_ADJTIMEX, unix.SYS_CLOCK_ADJTIME,
	// sockets of others: the agent is who connects
	unix.SYS_CONNECT),
	callfilter.Each(unix.EPERM, archForbidden...)...),
	callfilter.NoClone3,
	callfilter.Rule{Call: unix.SYS_CLONE, Mask: unix.CLONE_NEWUSER, Value: unix.CLONE_NEWUSER, Errno: unix.EPERM},
	// Datagrams are sent to names.
	callfilter.Rule{Call: unix.SYS_SOCKETPAIR, Argument: 1, Mask: 0xf, Value: unix.SOCK_DGRAM, Errno: unix.EPERM},
	callfilter.Rule{Call: unix.SYS_SOCKET, Argument: 1, Mask: 0xf, Value: unix.SOCK_DGRAM, Errno: unix.EPERM},
	callfilter.Rule{Call: unix.SYS_SOCKET, Mask: ^uint32(0), Value: unix.AF_UNIX},
	callfilter.Rule{Call: unix.SYS_SOCKET, Errno: unix.EAFNOSUPPORT},
)

// bounds are the resources that a confined program has: each process by itself, but for their
// number, threads counted.
var bounds = map[int]uint64{
	unix.RLIMIT_NOFILE: 1 << 18, // a connection has one
	unix.RLIMIT_NPROC:  1 << 12,
	unix.RLIMIT_DATA:   4 << 30,
	unix.RLIMIT_CORE:   0,
}

// Become confines the calling process, which has its user, namespaces and descriptors already, and
// has it go on as the program. It returns if that fails.
func Become(program string, arguments []string) error {
	for resource, most := range bounds {
		var now syscall.Rlimit
		if err := syscall.Getrlimit(resource, &now); err != nil {
			return fmt.Errorf("read limit %d: %w", resource, err)
		}
		most = min(most, now.Max)
		if err := syscall.Setrlimit(resource, &syscall.Rlimit{Cur: most, Max: most}); err != nil {
			return fmt.Errorf("set limit %d: %w", resource, err)
		}
	}
	if err := callfilter.Install(callfilter.AllThreads, 0, forbidden...); err != nil {
		return err
	}
	return fmt.Errorf("execute %s: %w", program, syscall.Exec(program, append([]string{program}, arguments...), os.Environ()))
}
