package trap

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// Call is one trapped call, which waits for its answer. It belongs to the reader's thread, and is
// another call as soon as Answer has returned.
type Call struct {
	// Endpoint is the caller's; nil if no EndpointHandler has been asked.
	Endpoint *Endpoint

	reader  *reader
	handler *handling   // that answers
	others  []*handling // that have not been asked yet
}

// Data is the call itself.
func (c *Call) Data() *Data { return &c.reader.inflight.call.Data }

// Thread is the caller's number in the agent's PID namespace; 0 if it has none there.
func (c *Call) Thread() uint32 { return c.reader.inflight.call.PID }

// Listener is the one by which the call came.
func (c *Call) Listener() *Listener { return c.reader.Listener }

// Context is done when the agent ends.
func (c *Call) Context() context.Context { return c.reader.srv.ctx }

func (c *Call) id() uint64 { return c.reader.inflight.call.ID }

// Descriptor is an open file that a caller gets.
type Descriptor struct {
	FD int
	// Inode is that of a socket, for the next agent to find out whether the caller has it; 0: it
	// does not look.
	Inode       uint64
	CloseOnExec bool
	// Key says what was asked for, if a caller that was interrupted before it was told may get the
	// same descriptor when it asks for the same again (Redeliver). 0: it may not. The handler is
	// told Note then.
	Key  uint64
	Note int
}

// Give has the call return a descriptor, d.FD in the caller's table of files, and closes d.FD,
// which is the last one of the agent's then. It is two steps, which doc.go explains.
func (c *Call) Give(d Descriptor) error {
	r := c.reader
	r.inflight.inode = d.Inode // before the caller can have it: see finish
	began := time.Now()
	number, err := addDescriptor(r.fd, c.id(), d.FD, d.CloseOnExec)
	r.affinity.answered(time.Since(began))
	// Before the caller goes on: its close() must be the last.
	r.closeGiven(d.FD)
	if err != nil {
		return c.refused(fmt.Errorf("give descriptor to caller: %w", err))
	}
	if err := sendValue(r.fd, c.id(), number); err != nil {
		if d.Key != 0 {
			r.addUndelivered(c.Thread(), undelivered{c.handler, d.Inode, number, d.Key, d.Note})
		}
		return c.refused(fmt.Errorf("tell caller its descriptor: %w", err))
	}
	return nil
}

// Redeliver answers the call with the descriptor that an interrupted one of the same thread left
// behind, if it asked for the same, and gives that one's note. done is false if there is none; else
// the call is answered, or its caller has gone again, and then the note is 0.
func (c *Call) Redeliver(key uint64) (note int, done bool) {
	r := c.reader
	u, ok := r.takeUndelivered(c.Thread(), c.handler)
	if !ok || u.key != key || !r.srv.proc.IsSocket(c.Thread(), u.number, u.inode) {
		return 0, false
	}
	r.inflight.inode = u.inode
	switch err := sendValue(r.fd, c.id(), u.number); {
	case err == nil:
		if u.note == 0 {
			c.handler.redelivered.Add(1)
		}
		return u.note, true
	case gone(err):
		r.addUndelivered(c.Thread(), u) // interrupted again
		r.fail(&r.srv.why.callerGone, err)
		return 0, true
	}
	return 0, false
}

// Return has the call return a number.
func (c *Call) Return(value int) error { return c.refused(sendValue(c.reader.fd, c.id(), value)) }

// Refuse has the call fail.
func (c *Call) Refuse(errno unix.Errno) error {
	return c.refused(sendErrno(c.reader.fd, c.id(), errno))
}

// PassThrough has the kernel go on with the call, in the caller's namespaces, as if it had not been
// trapped. It is for calls of which only integers were looked at.
func (c *Call) PassThrough() error {
	if err := sendContinue(c.reader.fd, c.id()); err != nil {
		return c.refused(err)
	}
	c.reader.srv.continued.Add(1)
	return nil
}

// passFor lets the call go on for a reason.
func (c *Call) passFor(why *Reason, err error) error {
	if err := c.PassThrough(); err != nil {
		return err
	}
	c.reader.fail(why, err)
	return nil
}

// PassToOwnNetns lets a caller that is not in its endpoint's network namespace have the call's
// effect in its own, as it would without Heddle.
func (c *Call) PassToOwnNetns() error { return c.passFor(&c.reader.srv.why.otherNetns, errOtherNetns) }

// InOtherNetns reports whether the caller is in another network namespace than the endpoint: it has
// unshared or changed its own, or its bundle names an endpoint that is not its. A task cannot
// change its namespace while it waits for an answer.
func (c *Call) InOtherNetns() (bool, error) {
	want, ok := c.EndpointNetns()
	if !ok {
		return true, nil
	}
	if want == 0 {
		return false, nil
	}
	have, err := c.reader.srv.proc.Netns(c.Thread())
	if err != nil {
		return false, c.reader.srv.why.netns.Because(fmt.Errorf("network namespace of thread %d: %w", c.Thread(), err))
	}
	return have != want, nil
}

// EndpointNetns gives the inode of the endpoint's network namespace, which the caller is to be in;
// 0 if that is not compared. ok is false for an endpoint that is not there any more.
func (c *Call) EndpointNetns() (inode uint64, ok bool) {
	if c.reader.srv.cfg.NetnsOf == nil || !model.ProtectNetns.On() {
		return 0, true
	}
	return c.reader.srv.cfg.NetnsOf(c.Endpoint.ID)
}

// EndpointGone is the failure of a call whose endpoint was removed meanwhile.
func (c *Call) EndpointGone() error { return c.reader.srv.why.unknown.Because(errUnknownEndpoint) }

// OutOfDescriptors is the failure of an agent that has no descriptor left.
func (c *Call) OutOfDescriptors(err error) error { return c.reader.srv.why.agentNofile.Because(err) }

// CallerGone reports whether err says that nobody waits for an answer any more.
func (c *Call) CallerGone(err error) bool {
	return c.reader.srv.why.of(err) == &c.reader.srv.why.callerGone
}

// Crowded reports whether several callers of the listener call at the same time.
func (c *Call) Crowded() bool { return !c.reader.primary }

// YieldToCaller lets a caller that has just been answered run before what is not needed for that:
// the thread is on its processor, and what it wakes would be, too.
func (c *Call) YieldToCaller() { c.reader.affinity.yieldToCaller() }

// StillWaits fails if nobody waits for an answer any more: what was looked at may be another
// task's.
func (c *Call) StillWaits() error { return c.refused(stillWaits(c.reader.fd, c.id())) }

// Waiter gives what asks the same when the call may not be the reader's any more. The caller closes
// it.
func (c *Call) Waiter() (Waiter, error) {
	fd, err := unix.FcntlInt(uintptr(c.reader.fd), unix.F_DUPFD_CLOEXEC, 0)
	return Waiter{fd, c.id()}, err
}

// Waiter asks whether a call still waits.
type Waiter struct {
	fd int
	id uint64
}

// StillWaits is that of Call.
func (w Waiter) StillWaits() error { return stillWaits(w.fd, w.id) }

// Close must be called once.
func (w Waiter) Close() { closeFD(w.fd) }

// refused gives an error of the kernel's, if it is one, with its reason.
func (c *Call) refused(err error) error { return c.reader.refused(c.Thread(), err) }
