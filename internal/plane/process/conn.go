package process

import (
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// Conn is a connection to a program, by messages of which each may have a descriptor.
type Conn struct {
	*net.UnixConn
	PID int // the program's process
}

// Connect connects to the program that listens at path.
func Connect(path string) (c Conn, err error) {
	conn, err := net.DialTimeout("unixpacket", path, Answers)
	if err != nil {
		return c, err
	}
	c.UnixConn = conn.(*net.UnixConn)
	if c.PID, err = Peer(c.UnixConn); err != nil {
		return c, errors.Join(fmt.Errorf("look who listens at %s: %w", path, err), conn.Close())
	}
	return c, nil
}

// Process implements Link.
func (c Conn) Process() int { return c.PID }

// Send sends a message, with a descriptor unless fd is -1. A program that does not read is as good
// as none.
func (c Conn) Send(message []byte, fd int) error {
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	if err := c.SetWriteDeadline(time.Now().Add(Answers)); err != nil {
		return err
	}
	_, _, err := c.WriteMsgUnix(message, rights, nil)
	return err
}

// Receive waits for a message, of n bytes, and gives the descriptor that came with it, -1 if none
// did. The error is io.EOF when the program has ended.
func (c Conn) Receive(buf []byte) (n, fd int, err error) {
	rights := make([]byte, unix.CmsgSpace(4*8))
	n, m, flags, _, err := c.ReadMsgUnix(buf, rights)
	if err != nil {
		return 0, -1, err
	}
	if n == 0 {
		return 0, -1, io.EOF
	}
	if fd, err = descriptor(rights[:m]); err == nil && flags&unix.MSG_CTRUNC != 0 {
		err = errors.New("descriptors of a message are cut off")
	}
	if err != nil {
		closeFD(fd)
		return 0, -1, err
	}
	return n, fd, nil
}

// descriptor gives the one that came with a message, -1 if none did.
func descriptor(rights []byte) (fd int, err error) {
	fd = -1
	messages, err := unix.ParseSocketControlMessage(rights)
	for _, m := range messages {
		fds, _ := unix.ParseUnixRights(&m) // or it has none
		for _, got := range fds {
			if fd < 0 {
				fd = got
				continue
			}
			closeFD(got)
			err = errors.New("more than one descriptor with a message")
		}
	}
	return fd, err
}

// closeFD closes a descriptor of ours; -1 is none.
func closeFD(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd)
	}
}
