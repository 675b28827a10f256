package netstack

import (
	"errors"

	"golang.org/x/sys/unix"
)

// pairBuffer is how many bytes may lie in a pair, in each direction.
const pairBuffer = 256 << 10

// otherEnd is what the program has done with its end of a pair.
type otherEnd struct {
	silent bool // it sends no more
	gone   bool // nobody has it open
	unread bool // it was closed with bytes in it that nobody read
}

func lookAt(fd int) (o otherEnd) {
	asked := unix.PollFd{Fd: int32(fd), Events: unix.POLLRDHUP}
	if err := poll(&asked); err != nil {
		return o // interrupted: it is looked at again with what comes next
	}
	got := asked.Revents
	return otherEnd{silent: got&(unix.POLLRDHUP|unix.POLLHUP) != 0, gone: got&unix.POLLHUP != 0, unread: got&unix.POLLERR != 0}
}

// waiting counts the bytes that wait to be read.
func waiting(fd int) int {
	n, err := queued(fd)
	if err != nil {
		return 0
	}
	return n
}

// readPair reads what is there. It never waits, whatever the file's flags are: a program may have
// the file, too (MSG_PEEK), and change them. Of parts there are two at most.
func readPair(fd int, parts ...[]byte) int {
	var vectors [2]unix.Iovec
	for i, p := range parts {
		vectors[i] = part(p)
	}
	n, err := receiveParts(fd, vectors[:len(parts)])
	if err != nil {
		return 0
	}
	return n
}

// program is what a program has written, as netstack reads it. The last byte stays in the pair,
// though it has been sent on: the guard of the protocol.
type program struct {
	fd    int
	guard bool // the first byte in the pair has been sent on already
	fresh int  // bytes behind that
	want  int  // how many of them are to be sent
}

// errShort says that there is less than was counted: urgent data, say.
var errShort = errors.New("the pair has less than it had")

// Len implements tcpip.Payloader.
func (p *program) Len() int { return p.want }

// Read implements tcpip.Payloader. It never says io.EOF, for which netstack would ask for ever.
func (p *program) Read(b []byte) (int, error) {
	n := min(len(b), p.fresh, p.want)
	last := n == p.fresh // which is not read but looked at
	if last {
		n--
	}
	if n < 0 {
		return 0, errShort
	}
	data := 0
	if n > 0 || p.guard {
		var got int
		if p.guard {
			var skipped [1]byte
			if got = readPair(p.fd, skipped[:], b[:n]); got > 0 {
				got, p.guard = got-1, false
			}
		} else {
			got = readPair(p.fd, b[:n])
		}
		data = got
	}
	p.fresh, p.want = p.fresh-data, p.want-data
	if last && data == n && !p.guard {
		if got, err := peek(p.fd, b[data:data+1]); err == nil && got == 1 {
			data, p.guard, p.fresh, p.want = data+1, true, 0, 0
		}
	}
	if data == 0 {
		return 0, errShort
	}
	return data, nil
}

// errFull ends a Read of netstack's whose data the pair does not take.
var errFull = errors.New("the pair is full")

// reader gives a program what has come for it.
type reader struct {
	fd   int
	left int  // how much it may get
	full bool // the pair takes no more
	deaf bool // the program reads no more
}

// Write implements io.Writer.
func (r *reader) Write(b []byte) (int, error) {
	if r.left == 0 {
		return 0, errFull
	}
	n, err := send(r.fd, b[:min(len(b), r.left)])
	n = max(n, 0)
	r.left -= n
	switch {
	case err == unix.EAGAIN || err == unix.EINTR || err == unix.ENOBUFS || err == unix.ENOMEM:
		r.full = true
	case err != nil:
		r.deaf = true
	}
	if n < len(b) {
		return n, errFull
	}
	return n, nil
}

// newPair makes the pair of a connection that was accepted, with its first guard.
func newPair() (program, own int, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, -1, err
	}
	for _, fd := range fds {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, pairBuffer) // it is only smaller without
	}
	if _, err := unix.Write(fds[0], []byte{0}); err != nil {
		closeAll(fds[:])
		return -1, -1, err
	}
	return fds[0], fds[1], nil
}

// isStream reports whether a descriptor is a stream socket of AF_UNIX.
func isStream(fd int) bool {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	kind, err2 := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	return err == nil && err2 == nil && domain == unix.AF_UNIX && kind == unix.SOCK_STREAM
}
