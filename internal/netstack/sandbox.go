package netstack

import (
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/callfilter"
)

// firstUser is the first of those that tenants' processes become, each another one, by chance, and
// nobody foresees which: users of containers and of the node's programs are not among them (systemd
// calls them unused). Whoever has the same user may signal the process, and fill what the kernel
// allows a user of threads and of descriptors under way. nobody is what is left in a user namespace
// that does not have them.
const (
	firstUser  = 0x70000000
	countUsers = 1 << 24
	nobody     = 65534
)

// shutOff has the process give up what it does not need to move bytes between descriptors that it
// has, or gets from the host: its user, privileges, and system calls, which are all that lead to
// files and other processes. As another user than root there is less to give up.
func shutOff() error {
	const adjust = "/proc/self/oom_score_adj"
	if now, err := os.ReadFile(adjust); err == nil && now[0] == '-' {
		// What the agent has itself kept from is not for a tenant's memory.
		if err := os.WriteFile(adjust, []byte("0"), 0); err != nil {
			return err
		}
	}
	if os.Geteuid() == 0 {
		if err := syscall.Setgroups(nil); err != nil {
			return fmt.Errorf("setgroups: %w", err)
		}
		if err := becomeOther(firstUser + rand.IntN(countUsers)); err != nil && becomeOther(nobody) != nil {
			return err
		}
		// Another user's process does not end with its parent unless it says so again.
		if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
			return fmt.Errorf("end with the host: %w", err)
		}
	}
	return filterCalls()
}

// becomeOther makes the process another user's; capabilities go, too.
func becomeOther(user int) error {
	if err := syscall.Setresgid(user, user, user); err != nil {
		return fmt.Errorf("setresgid: %w", err)
	}
	if err := syscall.Setresuid(user, user, user); err != nil {
		return fmt.Errorf("setresuid: %w", err)
	}
	return nil
}

// calls are what Go's runtime needs after its start, and what moves bytes. No call opens, creates,
// connects, executes or looks at another process.
var calls = []uint32{
	unix.SYS_READ, unix.SYS_READV, unix.SYS_PREAD64, unix.SYS_WRITE, unix.SYS_WRITEV, unix.SYS_RECVFROM, unix.SYS_RECVMSG, unix.SYS_SENDTO, unix.SYS_SENDMSG,
	unix.SYS_SHUTDOWN, unix.SYS_CLOSE, unix.SYS_SOCKETPAIR, unix.SYS_GETSOCKOPT, unix.SYS_SETSOCKOPT, unix.SYS_GETSOCKNAME, unix.SYS_GETPEERNAME,
	unix.SYS_FCNTL, unix.SYS_IOCTL, unix.SYS_FSTAT,
	unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_EVENTFD2, unix.SYS_PPOLL,
	unix.SYS_MMAP, unix.SYS_MUNMAP, unix.SYS_MADVISE, unix.SYS_MPROTECT, unix.SYS_MINCORE, unix.SYS_BRK,
	unix.SYS_FUTEX, unix.SYS_NANOSLEEP, unix.SYS_CLOCK_GETTIME, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY,
	unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK, unix.SYS_TGKILL, unix.SYS_RESTART_SYSCALL,
	unix.SYS_GETPID, unix.SYS_GETTID, unix.SYS_GETRANDOM, unix.SYS_MEMBARRIER, unix.SYS_RSEQ, unix.SYS_SET_ROBUST_LIST, unix.SYS_PRCTL,
	unix.SYS_EXIT, unix.SYS_EXIT_GROUP, unix.SYS_TIMER_CREATE, unix.SYS_TIMER_SETTIME, unix.SYS_TIMER_DELETE, unix.SYS_SETITIMER,
}

// filterCalls has all other calls of all threads fail with EPERM, and clone() make nothing but
// threads.
func filterCalls() error {
	const threads = unix.CLONE_VM | unix.CLONE_THREAD
	rules := append(callfilter.Each(0, append(calls, archCalls...)...), callfilter.NoClone3,
		callfilter.Rule{Call: unix.SYS_CLONE, Mask: threads, Value: threads})
	return callfilter.Install(callfilter.AllThreads, unix.EPERM, rules...)
}
