package stacks

import (
	"errors"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/stacks/socket"
)

// getsockname tells a socket's own address.
func (c *call) getsockname() {
	unlock, ok := c.lock()
	if !ok {
		return
	}
	c.resolve()
	n := c.n
	unlock()
	c.tell(&n, n.Local)
}

// getpeername tells the other side's.
func (c *call) getpeername() {
	unlock, ok := c.lock()
	if !ok {
		return
	}
	c.resolve()
	n, over := c.n, c.isOver()
	unlock()
	if n.State != socket.Connected || over {
		c.end(0, unix.ENOTCONN)
		return
	}
	c.tell(&n, n.Remote)
}

// isOver reports whether the connection has ended at both sides: the module knows it no more.
func (c *call) isOver() bool {
	if c.n.State != socket.Connected || !socket.HungUp(c.fd) {
		return false
	}
	_, err := c.info()
	return errors.Is(err, unix.ENOENT)
}

func (c *call) tell(n *socket.Note, a protocol.Address) {
	d := c.Data()
	c.end(0, c.writeValue(d.Args[1], d.Args[2], n.Sockaddr(a), true))
}
