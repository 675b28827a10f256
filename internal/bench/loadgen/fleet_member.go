package loadgen

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"time"
	"unsafe"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// member is one of a fleet. What it does, it does on its thread; its fields are that thread's, or
// the command's between two calls.
type member struct {
	number   int
	spec     FleetMember
	work     chan func()
	held     []int // connections
	serving  bool
	listener int
}

// live makes the goroutine a thread that nobody else uses. The thread ends with it.
func (m *member) live() {
	runtime.LockOSThread()
	for f := range m.work {
		f()
	}
}

// call runs f on the member's thread.
func (m *member) call(f func() error) error {
	done := make(chan error, 1)
	m.work <- func() { done <- f() }
	return <-done
}

// enter makes the calling thread what a container's is.
func (m *member) enter() error {
	if m.spec.Netns != "" {
		fd, err := unix.Open(m.spec.Netns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open %s: %w", m.spec.Netns, err)
		}
		if err := errors.Join(unix.Setns(fd, unix.CLONE_NEWNET), unix.Close(fd)); err != nil {
			return fmt.Errorf("enter %s: %w", m.spec.Netns, err)
		}
	}
	// Descriptors of the process that are open now, its streams and the Go runtime's, are in the
	// new table, too.
	if err := unix.Unshare(unix.CLONE_FILES); err != nil {
		return fmt.Errorf("have descriptors of its own: %w", err)
	}
	if m.spec.Endpoint == "" {
		return nil
	}
	listener, err := installFilter()
	if err != nil {
		return err
	}
	if err := errors.Join(handOver(m.spec.Socket, m.spec.Endpoint, listener), unix.Close(listener)); err != nil {
		return err
	}
	// The agent may have refused the listener.
	fd, err := openSocket(unix.AF_INET)
	if errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("the agent took no listener of %s, its log says why: %w", m.spec.Endpoint, err)
	}
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// installFilter traps what heddle-runtime has container runtimes trap, on the calling thread, and
// gives the listener.
func installFilter() (int, error) {
	const nr, arg0, arg1 = 0, 16, 24 // offsets in struct seccomp_data; little endian: the low halves
	load := func(off uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: off}
	}
	and := func(k uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: k}
	}
	jeq := func(k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: yes, Jf: no, K: k}
	}
	ret := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k} }
	program := []unix.SockFilter{
		load(nr), jeq(unix.SYS_IOCTL, 0, 3),
		load(arg1), and(0xfffffd00), jeq(0x8900, 8, 7),
		jeq(unix.SYS_SOCKET, 0, 6),
		load(arg0), jeq(unix.AF_INET, 1, 0), jeq(unix.AF_INET6, 0, 3),
		load(arg1), and(0xf), jeq(unix.SOCK_STREAM, 1, 0),
		ret(unix.SECCOMP_RET_ALLOW), ret(unix.SECCOMP_RET_USER_NOTIF),
	}
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return -1, fmt.Errorf("set no_new_privs: %w", err)
	}
	const flags = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
	fd, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&prog)))
	runtime.KeepAlive(program)
	if e != 0 {
		return -1, fmt.Errorf("install seccomp filter: %w", e)
	}
	return int(fd), nil
}

// handOver gives a listener to the agent at path, as a container runtime does, and returns once it
// has it.
func handOver(path, endpoint string, listener int) (err error) {
	thread := unix.Gettid()
	state := specs.ContainerProcessState{Version: specs.Version, Fds: []string{specs.SeccompFdName}, Pid: thread, Metadata: endpoint,
		State: specs.State{Version: specs.Version, ID: fmt.Sprintf("fleet-%d", thread), Status: specs.StateRunning, Pid: thread, Bundle: "/"}}
	message, err := json.Marshal(state)
	if err != nil {
		return err
	}
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("hand listener over: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(s)) }()
	if err = unix.Connect(s, &unix.SockaddrUnix{Name: path}); err == nil {
		err = unix.Sendmsg(s, message, unix.UnixRights(listener), nil, 0)
	}
	if err != nil {
		return fmt.Errorf("hand listener over to %s: %w", path, err)
	}
	// The agent hangs up when it serves the listener, or has refused it.
	b := make([]byte, 1)
	for {
		if _, err = unix.Read(s, b); err != unix.EINTR {
			break
		}
	}
	if err == unix.ECONNRESET {
		err = nil
	}
	return err
}

// listen opens the member's listener on a free port.
func (m *member) listen() (port uint16, err error) {
	fd, err := openSocket(unix.AF_INET)
	if err != nil {
		return 0, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, unix.Close(fd))
		}
	}()
	if err = unix.Bind(fd, &unix.SockaddrInet4{}); err != nil {
		return 0, fmt.Errorf("bind: %w", err)
	}
	// Accepted sockets inherit it: their close is a reset, which leaves nobody in TIME_WAIT.
	if err = rawLingerZero(fd); err != nil {
		return 0, fmt.Errorf("set SO_LINGER: %w", err)
	}
	if err = unix.Listen(fd, backlog); err != nil {
		return 0, fmt.Errorf("listen: %w", err)
	}
	if err = unix.SetNonblock(fd, true); err != nil {
		return 0, fmt.Errorf("make listener non-blocking: %w", err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return 0, fmt.Errorf("getsockname: %w", err)
	}
	in4, ok := sa.(*unix.SockaddrInet4)
	if !ok {
		return 0, fmt.Errorf("getsockname: %T", sa)
	}
	m.listener, m.serving = fd, true
	return uint16(in4.Port), nil
}

// acceptPoll is how often a server that has nothing to accept looks whether it is to drop what it
// keeps, in milliseconds.
const acceptPoll = 50

// accept serves until the fleet ends: connections are kept while c.keep is true, and ended at once
// otherwise.
func (m *member) accept(c *fleetState) {
	seen := c.drops.Load()
	poll := [1]unix.PollFd{{Fd: int32(m.listener), Events: unix.POLLIN}}
	for !c.over.Load() {
		if now := c.drops.Load(); now != seen {
			for _, fd := range m.held {
				_ = rawClose(fd) // frees the number in any case
			}
			c.accepted.Add(-int64(len(m.held)))
			seen, m.held = now, nil
		}
		fd, err := rawAccept(m.listener)
		switch {
		case err == unix.EAGAIN:
			// poll() is no system call of arm64. The kernel writes into timeout what is left of it.
			timeout := unix.NsecToTimespec(int64(acceptPoll * time.Millisecond))
			_, _, _ = unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&poll)), 1, uintptr(unsafe.Pointer(&timeout)), 0, 0, 0)
		case err == unix.EMFILE || err == unix.ENFILE || err == unix.ENOMEM:
			c.refused.Store(&err)
			time.Sleep(acceptPoll * time.Millisecond)
		case err != nil: // of one connection
		case c.keep.Load():
			m.held = append(m.held, fd)
			c.accepted.Add(1)
		default:
			_ = rawClose(fd)
		}
	}
}

// connectOnce makes a connection, waits until the server has ended it, and adds what it took. Time
// is read from start.
func (m *member) connectOnce(to *rawAddress, start time.Time, t *times) error {
	began := time.Since(start)
	fd, err := openSocket(to.family)
	if err != nil {
		return err
	}
	hasSocket := time.Since(start)
	// The server's reset may be faster than the connect that it follows; one that is refused says
	// so otherwise.
	if err = rawConnect(fd, to); err != nil && err != unix.ECONNRESET {
		return errors.Join(fmt.Errorf("connect: %w", err), rawClose(fd))
	}
	connected := time.Since(start)
	t.sockets, t.connects = append(t.sockets, int64(hasSocket-began)), append(t.connects, int64(connected-began))
	if err == nil {
		_, err = rawRead(fd, make([]byte, 1))
	}
	if err == unix.ECONNRESET {
		err = nil
	}
	return errors.Join(err, abort(fd))
}

// pace calls socket() when it is due: every interval from begin on.
func (m *member) pace(begin time.Time, interval, duration time.Duration, t *times) error {
	end := begin.Add(duration)
	for due := begin; due.Before(end); {
		if wait := time.Until(due); wait > 0 {
			time.Sleep(max(wait, paceTick))
		}
		for now := time.Now(); !due.After(now) && due.Before(end); due = due.Add(interval) {
			called := time.Now()
			if called.After(end) {
				return nil // the rate cannot be kept
			}
			fd, err := openSocket(unix.AF_INET)
			if err != nil {
				return err
			}
			t.sockets = append(t.sockets, int64(time.Since(called)))
			if err := rawClose(fd); err != nil {
				return fmt.Errorf("close: %w", err)
			}
		}
	}
	return nil
}
