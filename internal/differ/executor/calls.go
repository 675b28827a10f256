package main

import (
	"encoding/hex"
	"errors"
	"fmt"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/differ"
)

// call is one that may block, on a thread of its own.
type call struct {
	tid   int
	ended chan differ.Result
}

// step carries out one step. A call that takes longer than its limit is left pending.
func (w *worker) step(q differ.Request) differ.Reply {
	s := q.Step
	if !s.Blocks() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		return differ.Reply{Result: w.carryOut(q.Index, s)}
	}
	c := &call{ended: make(chan differ.Result, 1)}
	fd := w.fd(s.Fd) // what the slot is now, not when the thread runs
	started := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		c.tid = unix.Gettid()
		close(started)
		r := w.blocking(q.Index, fd, s)
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.pending[q.Index] == c {
			delete(w.pending, q.Index)
			w.done = append(w.done, differ.Done{Index: q.Index, Result: r})
		}
		c.ended <- r
	}()
	<-started
	select {
	case r := <-c.ended:
		return differ.Reply{Result: r}
	case <-time.After(time.Duration(q.LimitMS) * time.Millisecond):
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case r := <-c.ended: // just now
		return differ.Reply{Result: r}
	default:
	}
	w.pending[q.Index] = c
	return differ.Reply{Pending: true}
}

// fd gives the descriptor of a slot; an empty one has a number that is never open.
func (w *worker) fd(slot int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if fd, ok := w.slots[slot]; ok {
		return fd
	}
	if slot < 0 {
		return -1
	}
	return 700 + slot
}

// opened puts a new descriptor into a slot and says its number.
func (w *worker) opened(slot, fd int, err error, out ...string) differ.Result {
	if err != nil {
		return result(0, err, out...)
	}
	w.mu.Lock()
	w.slots[slot] = fd
	w.mu.Unlock()
	return result(fd, nil, out...)
}

func result(ret int, err error, out ...string) differ.Result {
	r := differ.Result{Ret: ret}
	var e unix.Errno
	switch {
	case errors.As(err, &e):
		r.Ret, r.Errno = -1, unix.ErrnoName(e)
		if r.Errno == "" {
			r.Errno = fmt.Sprintf("errno %d", int(e))
		}
	case err != nil:
		r.Ret, r.Errno = -1, err.Error()
	}
	for _, o := range out {
		if o != "" {
			r.Out += " " + o
		}
	}
	return r
}

// sys makes a system call; its error is nil or an errno.
func sys(trap uintptr, args ...uintptr) (int, error) {
	var a [6]uintptr
	copy(a[:], args)
	n, _, e := unix.Syscall6(trap, a[0], a[1], a[2], a[3], a[4], a[5])
	if e != 0 {
		return -1, e
	}
	return int(n), nil
}

// carryOut makes a call that cannot block.
func (w *worker) carryOut(index int, s differ.Step) differ.Result {
	fd := w.fd(s.Fd)
	switch s.Op {
	case "socket":
		n, err := sys(unix.SYS_SOCKET, uintptr(s.Arg(0)), uintptr(s.Arg(1)), uintptr(s.Arg(2)))
		return w.opened(s.To, n, err)
	case "bind":
		a, size := w.sockaddr(*s.Addr)
		return asUser(s.Arg(0), func() differ.Result {
			return result(sys(unix.SYS_BIND, uintptr(fd), uintptr(unsafe.Pointer(&a)), uintptr(size)))
		})
	case "listen":
		return result(sys(unix.SYS_LISTEN, uintptr(fd), uintptr(s.Arg(0))))
	case "getsockname":
		return getName(unix.SYS_GETSOCKNAME, fd, s.Arg(0))
	case "getpeername":
		return getName(unix.SYS_GETPEERNAME, fd, s.Arg(0))
	case "getsockopt":
		return getOption(fd, s.Arg(0), s.Arg(1), s.Arg(2))
	case "setsockopt":
		value, err := hex.DecodeString(s.Data)
		if err != nil {
			return result(0, err)
		}
		value = append(value, make([]byte, 16)...) // a length that is too long must not leave the buffer
		return result(sys(unix.SYS_SETSOCKOPT, uintptr(fd), uintptr(s.Arg(0)), uintptr(s.Arg(1)), uintptr(unsafe.Pointer(&value[0])), uintptr(s.Arg(2))))
	case "shutdown":
		return result(sys(unix.SYS_SHUTDOWN, uintptr(fd), uintptr(s.Arg(0))))
	case "ioctl":
		value := int32(s.Arg(1))
		n, err := sys(unix.SYS_IOCTL, uintptr(fd), uintptr(s.Arg(0)), uintptr(unsafe.Pointer(&value)))
		return result(n, err, fmt.Sprintf("value %d", value))
	case "fcntl":
		n, err := sys(unix.SYS_FCNTL, uintptr(fd), uintptr(s.Arg(0)), uintptr(s.Arg(1)))
		return result(n, err)
	case "fork", "exec":
		return w.startChild(s.Op == "fork")
	}
	return w.carryOutFd(fd, s)
}

// carryOutFd makes the calls that are about descriptors.
func (w *worker) carryOutFd(fd int, s differ.Step) differ.Result {
	switch s.Op {
	case "close":
		w.mu.Lock()
		delete(w.slots, s.Fd)
		w.mu.Unlock()
		return result(sys(unix.SYS_CLOSE, uintptr(fd)))
	case "dup":
		n, err := sys(unix.SYS_DUP, uintptr(fd))
		return w.opened(s.To, n, err)
	case "dup2":
		if to := w.fd(s.To); to != fd {
			n, err := sys(unix.SYS_DUP3, uintptr(fd), uintptr(to), 0) // there is no dup2 on arm64
			return w.opened(s.To, n, err)
		}
		n, err := sys(unix.SYS_FCNTL, uintptr(fd), unix.F_GETFD)
		return result(min(n, 0), err)
	case "dup3":
		n, err := sys(unix.SYS_DUP3, uintptr(fd), uintptr(w.fd(s.To)), uintptr(s.Arg(0)))
		return w.opened(s.To, n, err)
	case "epoll_create":
		n, err := sys(unix.SYS_EPOLL_CREATE1, uintptr(s.Arg(0)))
		return w.opened(s.To, n, err)
	case "epoll_ctl":
		ev := unix.EpollEvent{Events: uint32(s.Arg(1)), Fd: int32(s.To)}
		return result(sys(unix.SYS_EPOLL_CTL, uintptr(fd), uintptr(s.Arg(0)), uintptr(w.fd(s.To)), uintptr(unsafe.Pointer(&ev))))
	case "socketpair":
		var p [2]int32
		n, err := sys(unix.SYS_SOCKETPAIR, unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0, uintptr(unsafe.Pointer(&p)))
		if err == nil {
			w.opened(s.Fd, int(p[0]), nil)
			w.opened(s.To, int(p[1]), nil)
		}
		return result(n, err)
	case "send_fd":
		return result(0, unix.Sendmsg(fd, []byte{'x'}, unix.UnixRights(w.fd(s.To)), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL))
	case "recv_fd":
		return w.receiveFd(fd, s.To)
	}
	return result(0, fmt.Errorf("the executor has no %s", s.Op))
}

func (w *worker) receiveFd(fd, slot int) differ.Result {
	data, control := make([]byte, 1), make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(fd, data, control, unix.MSG_DONTWAIT)
	if err != nil {
		return result(0, err)
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil || len(messages) == 0 {
		return result(0, err, "nothing came")
	}
	got, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(got) == 0 {
		return result(0, err, "nothing came")
	}
	return w.opened(slot, got[0], nil)
}

// blocking makes a call that may block.
func (w *worker) blocking(index, fd int, s differ.Step) differ.Result {
	switch s.Op {
	case "connect":
		a, size := w.sockaddr(*s.Addr)
		return result(sys(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&a)), uintptr(size)))
	case "accept4":
		return w.accept(fd, s)
	case "poll":
		p := unix.PollFd{Fd: int32(fd), Events: int16(s.Arg(0))}
		timeout := unix.NsecToTimespec(int64(s.Arg(1)) * 1e6)
		bounded := unsafe.Pointer(&timeout)
		if s.Arg(1) < 0 {
			bounded = nil
		}
		n, err := sys(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(bounded), 0, 0)
		return result(n, err, differ.PollEvents(int(p.Revents)))
	case "epoll_wait":
		return epollWait(fd, s.Arg(0), s.Arg(1))
	}
	var r differ.Result
	if withSigpipe(func() { r = w.send(index, fd, s) }) {
		r.Out += " SIGPIPE"
	}
	return r
}

// send sends, with an address or without, or receives.
func (w *worker) send(index, fd int, s differ.Step) differ.Result {
	if s.Op != "sendto" {
		return transfer(index, fd, s)
	}
	n := max(0, min(s.Arg(0), maxTransfer))
	data := append(pattern(index, n), 0) // never empty, so that it has an address
	a, size := w.sockaddr(*s.Addr)
	return result(sys(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&data[0])), uintptr(n), uintptr(s.Arg(1)), uintptr(unsafe.Pointer(&a)), uintptr(size)))
}

// asUser makes a call with the rights of a user: the thread's only, which the caller has locked.
func asUser(uid int, call func() differ.Result) differ.Result {
	if uid == 0 {
		return call()
	}
	if _, err := sys(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), 0); err != nil {
		return result(0, fmt.Errorf("become user %d: %w", uid, err))
	}
	r := call()
	if _, err := sys(unix.SYS_SETRESUID, 0, 0, 0); err != nil {
		return result(0, fmt.Errorf("become root again: %w", err))
	}
	return r
}

func (w *worker) accept(fd int, s differ.Step) differ.Result {
	var a rawAddr
	size := int32(s.Arg(1))
	where, length := unsafe.Pointer(&a), unsafe.Pointer(&size)
	if size < 0 {
		where, length = nil, nil
	}
	n, err := sys(unix.SYS_ACCEPT4, uintptr(fd), uintptr(where), uintptr(length), uintptr(s.Arg(0)))
	if err != nil {
		return result(n, err)
	}
	if where == nil {
		return w.opened(s.To, n, nil)
	}
	return w.opened(s.To, n, nil, a.text(s.Arg(1), size))
}

func epollWait(fd, most, timeout int) differ.Result {
	events := make([]unix.EpollEvent, 16)
	n, err := sys(unix.SYS_EPOLL_PWAIT, uintptr(fd), uintptr(unsafe.Pointer(&events[0])), uintptr(min(most, len(events))), uintptr(timeout), 0, 0)
	if err != nil {
		return result(n, err)
	}
	var out []string
	for _, e := range events[:n] {
		out = append(out, fmt.Sprintf("f%d:%s", e.Fd, differ.EpollEvents(int(e.Events))))
	}
	return result(n, nil, out...)
}
