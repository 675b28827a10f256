package loadgen

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// answerers is how many threads answer: one has the same times with one caller, and is slower
	// with more.
	answerers = 2
	// An answerer has stockSize sockets made ahead. What was taken is made again every makerPause,
	// by a thread that nobody has to wake: rarer, its turns were so long that p99 showed them.
	stockSize  = 256
	makerPause = 1e6 // ns
)

// The kernel's structs seccomp_notif, seccomp_notif_addfd and seccomp_notif_resp.
type (
	trappedCall struct {
		id         uint64
		pid, flags uint32
		nr         int32
		arch       uint32
		ip         uint64
		args       [6]uint64
	}
	givenFD struct {
		id                            uint64
		flags, srcFD, newFD, newFlags uint32
	}
	answerTo struct {
		id    uint64
		value int64
		errno int32
		flags uint32
	}
)

// stock is a queue of sockets: one thread puts, another one takes.
type stock struct {
	sockets     [stockSize]int32
	taken, made atomic.Uint32 // so far
}

func (s *stock) left() uint32 { return s.made.Load() - s.taken.Load() }

// fill makes as many sockets as there is room for.
func (s *stock) fill() error {
	for s.left() < stockSize {
		fd, err := makeFloorSocket()
		if err != nil {
			return err
		}
		s.sockets[s.made.Load()%stockSize] = int32(fd)
		s.made.Add(1)
	}
	return nil
}

// take gives a socket; one is made on the spot if there is none.
func (s *stock) take() (int, error) {
	if s.left() == 0 {
		return makeFloorSocket()
	}
	fd := s.sockets[s.taken.Load()%stockSize]
	s.taken.Add(1)
	return int(fd), nil
}

// makeFloorSocket makes a socket by the system calls of MakeSocket (internal/plane/tcp), which tags
// by the last of them.
func makeFloorSocket() (int, error) {
	const ipLocalPortRange, lastPort = 51, 60000
	fd, _, errno := unix.RawSyscall(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if errno != 0 {
		return -1, fmt.Errorf("socket: %w", errno)
	}
	set := func(level, name int, value uint32) {
		_, _, e := unix.RawSyscall6(unix.SYS_SETSOCKOPT, fd, uintptr(level), uintptr(name), uintptr(unsafe.Pointer(&value)), unsafe.Sizeof(value), 0)
		errno |= e
	}
	set(unix.SOL_IP, unix.IP_TRANSPARENT, 1)
	set(unix.SOL_IP, ipLocalPortRange, lastPort<<16)
	set(unix.SOL_SOCKET, unix.SO_TIMESTAMPING, unix.SOF_TIMESTAMPING_OPT_TSONLY)
	set(unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	any := unix.RawSockaddrInet4{Family: unix.AF_INET}
	_, _, e := unix.RawSyscall(unix.SYS_BIND, fd, uintptr(unsafe.Pointer(&any)), unsafe.Sizeof(any))
	errno |= e
	set(unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 0)
	set(unix.SOL_SOCKET, unix.SO_MARK, 1)
	if errno != 0 {
		return -1, errors.Join(fmt.Errorf("prepare socket: %w", errno), rawClose(int(fd)))
	}
	return int(fd), nil
}

// answer has threads answer a listener's calls from now on, for as long as it has users and this
// process lives.
func answer(listener int) error {
	// Callers and answerers wake each other on one processor, as Heddle's do. The flags are the
	// argument itself.
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(listener), unix.SECCOMP_IOCTL_NOTIF_SET_FLAGS, unix.SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP)
	if errno != 0 && errno != unix.EINVAL { // kernels before 6.6
		return fmt.Errorf("set the listener's flags: %w", errno)
	}
	// Threads keep their processor of the Go scheduler for good (raw.go).
	runtime.GOMAXPROCS(runtime.NumCPU() + answerers + 1)
	stocks := make([]stock, answerers)
	for i := range stocks {
		if err := stocks[i].fill(); err != nil {
			return err
		}
		go func() {
			floorThread(0)
			for answerOne(listener, &stocks[i]) {
			}
		}()
	}
	go func() {
		floorThread(19)
		for refill(stocks) == nil {
			pause := unix.NsecToTimespec(makerPause)
			_, _, _ = unix.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&pause)), 0, 0)
		}
	}()
	return nil
}

// floorThread makes the goroutine a thread that pushes nobody aside, as a reader of the agent does
// not, and that Go does not ask to make room.
func floorThread(nice int32) {
	runtime.LockOSThread()
	all := unix.Sigset_t{}
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	// Neither fails; it would be slower.
	_ = unix.PthreadSigmask(unix.SIG_SETMASK, &all, nil)
	_ = unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_BATCH, Nice: nice}, 0)
}

// refill fills the stocks.
func refill(stocks []stock) error {
	for i := range stocks {
		if err := stocks[i].fill(); err != nil {
			return err
		}
	}
	return nil
}

// answerOne waits for a call and answers it, in two steps. It reports false when there is nobody to
// answer, or nothing to answer with: callers then have ENOSYS.
func answerOne(listener int, s *stock) bool {
	var call trappedCall
	switch err := rawIoctl(listener, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&call)); err {
	case nil:
	case unix.EINTR, unix.ENOENT: // the caller was killed, or all are gone, and this process is about to end
		return true
	default:
		return false
	}
	answer := answerTo{id: call.id}
	if call.nr != unix.SYS_SOCKET || call.args[0] != unix.AF_INET {
		answer.flags = unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE
		_ = rawIoctl(listener, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&answer)) // as below
		return true
	}
	fd, err := s.take()
	if err != nil {
		return false
	}
	give := givenFD{id: call.id, srcFD: uint32(fd), newFlags: unix.O_CLOEXEC}
	number, _, errno := unix.RawSyscall(unix.SYS_IOCTL, uintptr(listener), unix.SECCOMP_IOCTL_NOTIF_ADDFD, uintptr(unsafe.Pointer(&give)))
	_ = rawClose(fd) // before the caller goes on, whose close() is the last
	if errno == 0 {
		answer.value = int64(number)
		_ = rawIoctl(listener, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&answer)) // fails if the caller was killed
	}
	return true
}

func rawIoctl(fd int, request uintptr, argument unsafe.Pointer) error {
	_, _, errno := unix.RawSyscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(argument))
	return rawErr(errno)
}
