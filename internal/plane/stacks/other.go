package stacks

import (
	"errors"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
	"heddle.dev/heddle/internal/plane/stacks/socket"
)

// The other end of a program's socket: calls take it from the plane, or have it made, and give it
// back when the module does not take it after all.

// takeOther gives the other end of a socket: the one that the plane holds, or a new one.
func (c *call) takeOther() (other int, err error) {
	if c.n.ID != 0 {
		return c.takeHeld()
	}
	if err := c.acquire(c.t.joining); err != nil {
		return -1, err
	}
	defer func() { <-c.t.joining }()
	err = c.mayBlock(func() error { other, err = c.t.ends.Join(c.p.cfg.StateDir, c.fd); return err })
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
	c.n.State, c.n.Local, c.n.Remote = socket.Fresh, protocol.Address{}, protocol.Address{}
	c.n.ID = c.p.ids.Add(1)
	err := errSpare
	if socket.Drain(other); c.t.spares() < maxSpare {
		err = c.p.hold(c.t, &held{id: c.n.ID, note: c.n}, other)
	} else {
		closeFD(other)
	}
	if err != nil {
		c.p.why.spare.Add()
		c.n.State = socket.Failed
		c.p.cfg.Log.Warn("a socket cannot be used any more", "endpoint", c.t.Name, "err", err)
	}
}

var errSpare = errors.New("too many sockets that failed to bind or connect are open")

// spares counts them.
func (t *tenant) spares() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, h := range t.held {
		if h.note.State == socket.Fresh {
			n++
		}
	}
	return n
}

// unbegin has a socket be as it was made.
func (c *call) unbegin(other int) {
	c.giveBack(other)
	c.write()
}

// takeHeld takes the other end of a socket from the plane.
func (c *call) takeHeld() (other int, err error) {
	c.t.mu.Lock()
	h := c.t.held[c.n.ID]
	c.t.mu.Unlock()
	if h == nil {
		return -1, unix.EINVAL // it was shut down
	}
	return c.releaseHeld(h)
}

func (c *call) releaseHeld(h *held) (other int, err error) {
	if other, err = c.t.release(h); err != nil {
		return -1, err
	}
	c.p.unkeep(c.t, h)
	socket.Drain(other)
	return other, nil
}
