package trap

import (
	"os"
	"runtime"
	"strconv"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Data is the kernel's struct seccomp_data: a trapped call in host byte order.
type Data struct {
	Nr                 int32
	Arch               uint32
	InstructionPointer uint64
	Args               [6]uint64
}

// notification is the kernel's struct seccomp_notif. PID is the calling thread, in the PID
// namespace of the thread that received it; 0 if it is not visible there.
type notification struct {
	ID    uint64
	PID   uint32
	Flags uint32
	Data  Data
}

// response is the kernel's struct seccomp_notif_resp.
type response struct {
	ID    uint64
	Val   int64
	Error int32
	Flags uint32
}

// addFD is the kernel's struct seccomp_notif_addfd.
type addFD struct {
	ID         uint64
	Flags      uint32
	SrcFD      uint32
	NewFD      uint32
	NewFDFlags uint32
}

// notifyLink is what /proc/self/fd/N of a seccomp listener points to.
const notifyLink = "anon_inode:seccomp notify"

// isNotifyFD reports whether fd is a seccomp listener. It asks /proc, because trying an ioctl on a
// descriptor of unknown kind could do anything.
func isNotifyFD(fd int) bool {
	link, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	return err == nil && link == notifyLink
}

// ioctl issues one ioctl through the scheduler-aware Syscall: each of ours can block.
func ioctl(fd int, request uintptr, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
	if errno != 0 {
		return errno
	}
	return nil
}

// receive blocks until a call is trapped and stores it in n, which must be zero. ENOENT means that
// the caller went away before it could be received.
func receive(fd int, n *notification) error {
	return ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(n))
}

// addDescriptor gives the caller of notification id the open file behind srcFD and reports its
// number there. It sleeps until the caller has run; the call goes on waiting for sendValue. Not in
// one step, by the flag SEND, if that can be helped: doc.go says why. ENOENT, ESRCH and EINPROGRESS
// mean that nobody waits for this answer any more.
func addDescriptor(fd int, id uint64, srcFD int, closeOnExec bool) (number int, err error) {
	a := addFD{ID: id, SrcFD: uint32(srcFD)}
	if closeOnExec {
		a.NewFDFlags = unix.O_CLOEXEC
	}
	for {
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SECCOMP_IOCTL_NOTIF_ADDFD, uintptr(unsafe.Pointer(&a)))
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR: // as of send
		default:
			return -1, errno
		}
	}
}

// addDescriptorAndAnswer is addDescriptor and sendValue in one step, after which srcFD is
// closed. After an error it is not, and the call still waits unless gone says otherwise. A
// signal on its way to the caller comes either before all of it, or after. One to the calling
// thread would have the kernel take the descriptor back when it has said that the call is
// answered: all are blocked.
func addDescriptorAndAnswer(fd int, id uint64, srcFD int, closeOnExec bool) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before unix.Sigset_t
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, nil, &before); err != nil {
		return err
	}
	if err := blockSignals(); err != nil {
		return err
	}
	a := addFD{ID: id, SrcFD: uint32(srcFD), Flags: unix.SECCOMP_ADDFD_FLAG_SEND}
	if closeOnExec {
		a.NewFDFlags = unix.O_CLOEXEC
	}
	// On a busy machine the caller might else have closed its own, and its epoll tell it of that,
	// before this thread is back. Where a thread may not hurry, it comes when it comes.
	if undo, err := hurry(); err == nil {
		defer undo()
	}
	errno := addAndClose(uintptr(fd), uintptr(unsafe.Pointer(&a)), uintptr(srcFD))
	runtime.KeepAlive(&a)
	_ = unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil) // of what it was before
	if errno != 0 {
		return errno
	}
	return nil
}

// addAndClose closes the descriptor as soon as the caller has it, and not when the scheduler of Go
// has a processor for that: until then the caller's close() is not the last. It waits for the
// caller, which may be stopped, so nothing else of Go may have to wait for it.
//
//go:nosplit
//go:norace
func addAndClose(fd, argument, srcFD uintptr) unix.Errno {
	entersyscall()
	_, _, errno := unix.RawSyscall(unix.SYS_IOCTL, fd, unix.SECCOMP_IOCTL_NOTIF_ADDFD, argument)
	if errno == 0 {
		_, _, _ = unix.RawSyscall(unix.SYS_CLOSE, srcFD, 0, 0)
	}
	exitsyscall()
	return errno
}

//go:linkname entersyscall runtime.entersyscall
func entersyscall()

//go:linkname exitsyscall runtime.exitsyscall
func exitsyscall()

// sendValue makes the call return value.
func sendValue(fd int, id uint64, value int) error {
	return send(fd, response{ID: id, Val: int64(value)})
}

// sendErrno makes the call return -errno.
func sendErrno(fd int, id uint64, errno unix.Errno) error {
	return send(fd, response{ID: id, Error: -int32(errno)})
}

// send answers. A signal of ours, which the runtime sends to preempt, says nothing of the caller.
func send(fd int, r response) (err error) {
	for err = unix.EINTR; err == unix.EINTR; {
		err = ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&r))
	}
	return err
}

// stillWaits fails, in a way that gone knows, if nobody waits for an answer to notification id any
// more.
func stillWaits(fd int, id uint64) error {
	return ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_ID_VALID, unsafe.Pointer(&id))
}

// sendContinue lets the kernel run the call as if it had not been trapped.
func sendContinue(fd int, id uint64) error {
	r := response{ID: id, Flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
	return ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&r))
}

// syncWakeUp remembers whether the kernel knows SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP (6.6 and later).
type syncWakeUp struct{ unsupported atomic.Bool }

// set asks that caller and reader wake each other on the same CPU, which about halves the cost of a
// trapped call. It reports whether the kernel does so.
func (s *syncWakeUp) set(fd int) bool {
	if s.unsupported.Load() {
		return false
	}
	// The flags are the argument itself, not a pointer to them.
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SECCOMP_IOCTL_NOTIF_SET_FLAGS,
		unix.SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP)
	if errno == unix.EINVAL {
		s.unsupported.Store(true)
	}
	return errno == 0
}

// blockSignals blocks every signal that can be blocked on the calling thread but InterruptSignal;
// doc.go says why.
func blockSignals() error {
	var all unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	all.Val[0] &^= 1 << (InterruptSignal - 1)
	return unix.PthreadSigmask(unix.SIG_SETMASK, &all, nil)
}
