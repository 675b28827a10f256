package stacks

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/trap/task"
)

// pair is a pair of connected stream sockets of AF_UNIX: the program's end, and the other one.
type pair struct {
	program, other int
	inode          uint64 // of program
	cookie         uint64 // of other
}

const (
	// readyPairs are made ahead of need.
	readyPairs = 16
	// sendBuffer is the program's in bytes: what it may write before the module reads.
	sendBuffer = 256 << 10
	// fillBytes is how much unread data keeps a program's end from being writable: unix_writable()
	// of the kernel asks that four times what is charged fits the send buffer. A page of them is
	// charged as a page, so that this many are charged more.
	fillBytes = sendBuffer/4 + 4096
)

// pairs makes pairs ahead of need, in a network namespace of their own: a name that a program gives
// its end by a call that is not trapped is nobody's there.
type pairs struct{ ready chan pair }

func newPairs() *pairs { return &pairs{make(chan pair, readyPairs)} }

// run makes pairs until ctx ends.
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
				made.close()
				done <- nil
				return
			}
		}
	})
	err := <-done
	for {
		select {
		case made := <-p.ready:
			made.close()
		default:
			return err
		}
	}
}

func (p pair) close() {
	closeFD(p.program)
	closeFD(p.other)
}

func makePair() (p pair, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return p, fmt.Errorf("make a socket pair: %w", err)
	}
	p = pair{program: fds[0], other: fds[1]}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	for _, fd := range fds {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer/2); err != nil { // the kernel doubles it
			return p, fmt.Errorf("set SO_SNDBUF: %w", err)
		}
	}
	if p.cookie, err = unix.GetsockoptUint64(p.other, unix.SOL_SOCKET, unix.SO_COOKIE); err != nil {
		return p, fmt.Errorf("get SO_COOKIE: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(p.program, &st); err != nil {
		return p, err
	}
	p.inode = st.Ino
	return p, park(p.other, p.other)
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

var errQueue = errors.New("the program has taken what waits in its socket")

// strayBytes is how many bytes that somebody wrote are passed over for a file: a program that has
// both ends, by MSG_PEEK, can write them faster than they are read.
const strayBytes = 256

// unpark takes the next file out of the queue of the program's end, for which it may have to wait:
// mayBlock. The errno is EAGAIN if there is none.
func unpark(program int) (file int, err error) {
	var one [1]byte
	rights := make([]byte, unix.CmsgSpace(4))
	for range strayBytes {
		n, m, _, _, err := unix.Recvmsg(program, one[:], rights, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		if err != nil {
			return -1, err
		}
		if n == 0 && m == 0 {
			return -1, unix.EINVAL // shut down
		}
		messages, err := unix.ParseSocketControlMessage(rights[:m])
		if err != nil || len(messages) == 0 {
			continue // bytes that somebody wrote
		}
		fds, err := unix.ParseUnixRights(&messages[0])
		if err != nil || len(fds) == 0 {
			continue
		}
		return fds[0], nil
	}
	return -1, errQueue
}

// takeOther takes the other end, whose cookie is given, out of the program's end.
func takeOther(program int, cookie uint64) (int, error) {
	other, err := unpark(program)
	if err != nil {
		return -1, fmt.Errorf("%w: %w", errQueue, err)
	}
	have, err := unix.GetsockoptUint64(other, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil || have != cookie {
		closeFD(other)
		return -1, errQueue
	}
	drain(other)
	return other, nil
}

// takeOther takes the other end of the call's socket out of it.
func (c *call) takeOther() (other int, err error) {
	err = c.mayBlock(func() error { other, err = takeOther(c.fd, c.n.OtherEnd); return err })
	return other, err
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
