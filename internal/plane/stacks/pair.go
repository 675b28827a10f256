package stacks

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/trap/task"
)

// pair is what a program gets of socket(): a stream socket of AF_UNIX that is connected to nothing.
// It becomes the program's end of a pair when a call needs the other one (ends.join), which no
// program ever has: who has it could hold up whoever reads it.
type pair struct {
	program int
	inode   uint64 // of program
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

// fillBytes is how much unread data keeps a program's end from being writable. A page of them is
// charged as a page, so that this many are charged more than a quarter of the send buffer.
func fillBytes(program int) (int, error) {
	buffer, err := unix.GetsockoptInt(program, unix.SOL_SOCKET, unix.SO_SNDBUF)
	return buffer/4 + 4096, err
}

// pairs makes programs' ends ahead of need, in a network namespace of their own: a name that a
// program gives its end by a call that is not trapped is nobody's there.
type pairs struct{ ready chan pair }

func newPairs() *pairs { return &pairs{make(chan pair, readyPairs)} }

// run makes them until ctx ends.
func (p *pairs) run(ctx context.Context) error {
	done := make(chan error, 1)
	task.OnThread(func() {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("make a network namespace for socket pairs: %w", err)
			return
		}
		for {
			made, err := makePair()
			if err != nil {
				done <- err
				return
			}
			select {
			case p.ready <- made:
			case <-ctx.Done():
				closeFD(made.program)
				done <- nil
				return
			}
		}
	})
	err := <-done
	for {
		select {
		case made := <-p.ready:
			closeFD(made.program)
		default:
			return err
		}
	}
}

func makePair() (p pair, err error) {
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
	return pair{fd, st.Ino}, nil
}

func setSendBuffer(fd int) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer/2); err != nil { // the kernel doubles it
		return fmt.Errorf("set SO_SNDBUF: %w", err)
	}
	return nil
}

// setSendBufferTo gives a program what it asks for by SO_SNDBUF, within the node's wmem_max, but
// never less than sendBuffer.
func setSendBufferTo(fd int, value int32) error {
	value = max(sendBuffer/2, min(value, mostSendBuffer/2))
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, int(value)); err != nil {
		return err
	}
	return leastSendBuffer(fd)
}

// leastSendBuffer gives a program's end what it needs: one that a module made, or with a small
// wmem_max.
func leastSendBuffer(fd int) error {
	got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err != nil || got >= sendBuffer {
		return err
	}
	return setSendBuffer(fd)
}

// ends makes the other ends of a tenant's sockets: a listener to which the agent connects programs'
// sockets. Each tenant has one, because connect() waits for a bind() of the same socket, which its
// program may make wait for ever (a name on a file system of its own).
type ends struct {
	listener, path int // path is the listener's file, which has no name any more; -1: not made yet
}

// join connects a program's socket, and gives the other end. One at a time: what is accepted is the
// one that was connected.
func (e *ends) join(stateDir string, program int) (other int, err error) {
	if e.listener < 0 {
		if err := e.open(stateDir); err != nil {
			return -1, fmt.Errorf("listen for programs' sockets: %w", err)
		}
	}
	// By the file: an address of the socket's network namespace would have to be made in that one.
	err = unix.Connect(program, &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d", e.path)})
	if err != nil {
		return -1, fmt.Errorf("%w: %w", errQueue, err)
	}
	other, _, err = unix.Accept4(e.listener, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
	if err != nil {
		e.close() // and with it what was connected
		return -1, fmt.Errorf("accept a program's socket: %w", err)
	}
	if err := setSendBuffer(other); err != nil {
		closeFD(other)
		return -1, err
	}
	return other, nil
}

// open makes the listener. Its path says nothing: getpeername() shows it to programs.
func (e *ends) open(stateDir string) error {
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
		e.close()
	}
	return err
}

func (e *ends) close() {
	for _, fd := range []*int{&e.listener, &e.path} {
		if *fd >= 0 {
			closeFD(*fd)
		}
		*fd = -1
	}
}

// park puts a file into the queue of the end that is the peer of fd, where it lives as long as
// that.
func park(fd, file int) error {
	err := unix.Sendmsg(fd, []byte{0}, unix.UnixRights(file), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if err != nil {
		return fmt.Errorf("put a file into the program's end: %w", err)
	}
	return nil
}

var errQueue = errors.New("the socket is not as the agent made it")

// unpark takes the next connection out of the queue of a listener's program, for which it may have
// to wait: mayBlock. The errno is EAGAIN if there is none. Only the agent writes there.
func unpark(program int) (file int, err error) {
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
		return -1, errQueue
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) == 0 {
		return -1, errQueue
	}
	return fds[0], nil
}

// takeOther gives the other end of a socket: the one that the plane holds, or a new one.
func (c *call) takeOther() (other int, err error) {
	if c.n.ID != 0 {
		return c.takeHeld()
	}
	if err := c.acquire(c.t.joining); err != nil {
		return -1, err
	}
	defer func() { <-c.t.joining }()
	err = c.mayBlock(func() error { other, err = c.t.ends.join(c.p.cfg.StateDir, c.fd); return err })
	return other, err
}

// maxSpare is how many sockets of a tenant may have an other end without being bound.
const maxSpare = 1024

// giveBack keeps the other end of a socket that the module does not know any more, or not yet: it
// can be used once more. What is noted of the socket says so; the caller writes that.
func (c *call) giveBack(other int) {
	if c.n.Local != (protocol.Address{}) { // it was bound, and the module may have kept that
		c.p.forget(c.t, c.n.ID)
	}
	c.n.State, c.n.Local, c.n.Remote = fresh, protocol.Address{}, protocol.Address{}
	c.n.ID = c.p.ids.Add(1)
	err := errSpare
	if drain(other); c.t.spares() < maxSpare {
		err = c.p.hold(c.t, &held{id: c.n.ID, note: c.n}, other)
	} else {
		closeFD(other)
	}
	if err != nil {
		c.p.why.spare.Add()
		c.n.State = failed
		c.p.cfg.Log.Warn("a socket cannot be used any more", "endpoint", c.t.Name, "err", err)
	}
}

var errSpare = errors.New("too many sockets that failed to bind or connect are open")

// spares counts them.
func (t *tenant) spares() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, h := range t.held {
		if h.note.State == fresh {
			n++
		}
	}
	return n
}

// drain drops what a program wrote to a socket that was not connected, but not what it goes on
// writing meanwhile.
func drain(fd int) {
	buf := make([]byte, 64<<10)
	for range 2 * sendBuffer / len(buf) {
		n, _, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
		if n <= 0 || err != nil {
			return
		}
	}
}

// closeFD closes a descriptor of ours: the number is always free then.
func closeFD(fd int) { _ = unix.Close(fd) }
