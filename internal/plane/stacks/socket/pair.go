package socket

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/trap/task"
)

// Pair is what a program gets of socket(): a stream socket of AF_UNIX that is connected to nothing.
// It becomes the program's end of a pair when a call needs the other one (Ends.Join), which no
// program ever has: who has it could hold up whoever reads it.
type Pair struct {
	Program int    // the descriptor
	Inode   uint64 // of Program
}

const (
	// readyPairs are made ahead of need.
	readyPairs = 16
	// sendBuffer is the program's in bytes: what it may write before the module reads. A writer
	// that waits is woken when four times what is charged fits it (unix_writable() of the kernel).
	// The module leaves a byte, for which all is charged that the kernel put into one buffer with
	// it: 64 KiB and its own size, by sendfile(). With less a program would wait for ever.
	sendBuffer = 320 << 10
	// mostSendBuffer is what a program may have of it.
	mostSendBuffer = 2 << 20
)

var zeroes [mostSendBuffer/4 + 4096]byte

// Fill writes a byte into the program's end, or, of all, as many as keep it from being writable. A
// page of unread data is charged as a page, so that this many are charged more than a quarter of
// the send buffer.
func Fill(program int, all bool) (n int, err error) {
	n = 1
	if all {
		buffer, err := unix.GetsockoptInt(program, unix.SOL_SOCKET, unix.SO_SNDBUF)
		if err != nil {
			return 0, err
		}
		n = min(buffer/4+4096, len(zeroes))
	}
	n, err = unix.SendmsgN(program, zeroes[:n], nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if err != nil || n == 0 {
		return 0, ErrQueue
	}
	return n, nil
}

// Pairs makes programs' ends ahead of need, in a network namespace of their own: a name that a
// program gives its end by a call that is not trapped is nobody's there.
type Pairs struct{ Ready chan Pair }

// NewPairs gives a maker of pairs, which makes none until it runs.
func NewPairs() *Pairs { return &Pairs{make(chan Pair, readyPairs)} }

// Run makes them until ctx ends.
func (p *Pairs) Run(ctx context.Context) error {
	done := make(chan error, 1)
	task.OnThread(func() {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("make a network namespace for socket pairs: %w", err)
			return
		}
		for {
			made, err := MakePair()
			if err != nil {
				done <- err
				return
			}
			select {
			case p.Ready <- made:
			case <-ctx.Done():
				closeFD(made.Program)
				done <- nil
				return
			}
		}
	})
	err := <-done
	for {
		select {
		case made := <-p.Ready:
			closeFD(made.Program)
		default:
			return err
		}
	}
}

// MakePair makes one in the network namespace of the calling thread.
func MakePair() (p Pair, err error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return p, fmt.Errorf("make a socket: %w", err)
	}
	var st unix.Stat_t
	if err = setSendBuffer(fd); err == nil {
		err = unix.Fstat(fd, &st)
	}
	if err != nil {
		closeFD(fd)
		return p, err
	}
	return Pair{fd, st.Ino}, nil
}

func setSendBuffer(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer/2); err != nil { // the kernel doubles it
		return fmt.Errorf("set SO_SNDBUF: %w", err)
	}
	return nil
}

// SetSendBufferTo gives a program what it asks for by SO_SNDBUF, within the node's wmem_max, but
// never less than sendBuffer.
func SetSendBufferTo(fd int, value int32) error {
	value = max(sendBuffer/2, min(value, mostSendBuffer/2))
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, int(value)); err != nil {
		return err
	}
	return LeastSendBuffer(fd)
}

// LeastSendBuffer gives a program's end what it needs: one that a module made, or with a small
// wmem_max.
func LeastSendBuffer(fd int) error {
	got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err != nil || got >= sendBuffer {
		return err
	}
	return setSendBuffer(fd)
}

// Ends makes the other ends of a tenant's sockets: a listener to which the agent connects programs'
// sockets. Each tenant has one, because connect() waits for a bind() of the same socket, which its
// program may make wait for ever (a name on a file system of its own).
type Ends struct {
	listener, path int // path is the listener's file, which has no name any more; -1: not made yet
}

// NewEnds gives the maker of other ends, which listens from the first one on.
func NewEnds() *Ends { return &Ends{-1, -1} }

// Join connects a program's socket, and gives the other end. One at a time: what is accepted is the
// one that was connected.
func (e *Ends) Join(stateDir string, program int) (other int, err error) {
	if e.listener < 0 {
		if err := e.open(stateDir); err != nil {
			return -1, fmt.Errorf("listen for programs' sockets: %w", err)
		}
	}
	// By the file: an address of the socket's network namespace would have to be made in that one.
	err = unix.Connect(program, &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d", e.path)})
	if err != nil {
		return -1, fmt.Errorf("%w: %w", ErrQueue, err)
	}
	other, _, err = unix.Accept4(e.listener, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
	if err != nil {
		e.Close() // and with it what was connected
		return -1, fmt.Errorf("accept a program's socket: %w", err)
	}
	if err := setSendBuffer(other); err != nil {
		closeFD(other)
		return -1, err
	}
	return other, nil
}

// open makes the listener. Its path says nothing: getpeername() shows it to programs.
func (e *Ends) open(stateDir string) error {
	dir, err := unix.Open(stateDir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer closeFD(dir)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	e.listener = fd
	name := fmt.Sprintf("/proc/self/fd/%d/end%d", dir, fd) // of this tenant's while it has the number
	_ = unix.Unlink(name)                                  // of an agent that was killed
	if err = unix.Bind(fd, &unix.SockaddrUnix{Name: name}); err == nil {
		e.path, err = unix.Open(name, unix.O_PATH|unix.O_CLOEXEC, 0)
		err = errors.Join(err, unix.Unlink(name))
	}
	if err == nil {
		err = unix.Listen(fd, 1)
	}
	if err != nil {
		e.Close()
	}
	return err
}

// Close ends it; it may be used again.
func (e *Ends) Close() {
	for _, fd := range []*int{&e.listener, &e.path} {
		if *fd >= 0 {
			closeFD(*fd)
		}
		*fd = -1
	}
}

// Park puts a file into the queue of the end that is the peer of fd, where it lives as long as
// that.
func Park(fd, file int) error {
	err := unix.Sendmsg(fd, []byte{0}, unix.UnixRights(file), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if err != nil {
		return fmt.Errorf("put a file into the program's end: %w", err)
	}
	return nil
}

// ErrQueue says that a program has done something with its end that only the agent may.
var ErrQueue = errors.New("the socket is not as the agent made it")

// Unpark takes the next connection out of the queue of a listener's program, for which it may have
// to wait. The errno is EAGAIN if there is none. Only the agent writes there.
func Unpark(program int) (file int, err error) {
	var one [1]byte
	rights := make([]byte, unix.CmsgSpace(4))
	n, m, _, _, err := unix.Recvmsg(program, one[:], rights, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return -1, err
	}
	if n == 0 {
		return -1, unix.EINVAL // shut down
	}
	messages, err := unix.ParseSocketControlMessage(rights[:m])
	if err != nil || len(messages) == 0 {
		return -1, ErrQueue
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) == 0 {
		return -1, ErrQueue
	}
	return fds[0], nil
}

// Drain drops what a program wrote to a socket that was not connected, but not what it goes on
// writing meanwhile.
func Drain(fd int) {
	buf := make([]byte, 64<<10)
	for range 2 * sendBuffer / len(buf) {
		n, _, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
		if n <= 0 || err != nil {
			return
		}
	}
}

// Writable reports whether a socket that is being connected shows that this is over.
func Writable(fd int) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0
}

// HungUp reports whether both directions of a pair's end are shut down.
func HungUp(fd int) bool {
	fds := []unix.PollFd{{Fd: int32(fd)}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1 && fds[0].Revents&unix.POLLHUP != 0
}

// Ended drops what a program wrote to a listener, and reports whether it has closed its end.
func Ended(fd int, buf []byte) bool {
	for {
		n, _, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
		if err != unix.EINTR && (n <= 0 || err != nil) {
			return err != unix.EAGAIN
		}
	}
}

// closeFD closes a descriptor of ours: the number is always free then.
func closeFD(fd int) { _ = unix.Close(fd) }
