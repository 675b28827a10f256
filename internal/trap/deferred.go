package trap

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Deferred is a call that its reader has left to others, because its answer may take time. It must
// be answered once, by any goroutine. An agent that ends before leaves it to the next one, whose
// handler gets it as a new Call; ErrAgentEnds says that.
type Deferred struct {
	Endpoint *Endpoint

	listener *Listener
	call     notification
	kept     *inflightCall // the same where the next agent finds it; not to be touched once that has it
}

// deferredCalls are a listener's, guarded by its mu. Those with a place lie in its page.
type deferredCalls struct {
	places []*inflightCall        // zero: free
	others map[*Deferred]struct{} // without a place
}

// Defer takes the call from its reader, which then receives the next one. It is the last thing that
// Answer does with c.
func (c *Call) Defer() *Deferred {
	l := c.reader.Listener
	d := &Deferred{Endpoint: c.Endpoint, listener: l, call: c.reader.inflight.call}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, place := range l.deferred.places {
		if place.call.ID == 0 {
			d.kept = place
			*place = inflightCall{call: d.call}
			return d
		}
	}
	d.kept = new(inflightCall)
	if l.deferred.others == nil {
		l.deferred.others = map[*Deferred]struct{}{}
	}
	l.deferred.others[d] = struct{}{}
	return d
}

// Data is the call itself.
func (d *Deferred) Data() Data { return d.call.Data }

// Thread is that of Call.
func (d *Deferred) Thread() uint32 { return d.call.PID }

// Done is closed when the agent ends.
func (d *Deferred) Done() <-chan struct{} { return d.listener.srv.ctx.Done() }

// use runs f unless the listener's descriptor is not the agent's any more. If f answered, the call
// is forgotten.
func (d *Deferred) use(answers bool, f func(fd int, id uint64) error) error {
	l := d.listener
	l.deferMu.RLock()
	defer l.deferMu.RUnlock()
	if l.deferEnded {
		return ErrAgentEnds
	}
	err := f(l.fd, d.call.ID)
	if !answers {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.deferred.others, d)
	*d.kept = inflightCall{}
	return err
}

// StillWaits is that of Call.
func (d *Deferred) StillWaits() error {
	return d.use(false, func(fd int, id uint64) error { return d.refused(stillWaits(fd, id)) })
}

// Return has the call return a number.
func (d *Deferred) Return(value int) error {
	return d.use(true, func(fd int, id uint64) error { return d.refused(sendValue(fd, id, value)) })
}

// Refuse has the call fail.
func (d *Deferred) Refuse(errno unix.Errno) error {
	return d.use(true, func(fd int, id uint64) error { return d.refused(sendErrno(fd, id, errno)) })
}

// Fail has the call fail as an error of Answer does: by the errno of its Reason, and counted. An
// error that says that the agent ends, or that the caller has gone, is no news to the caller.
func (d *Deferred) Fail(err error) {
	l := d.listener
	why := l.srv.why.of(err)
	if why == &l.srv.why.callerGone {
		_ = d.Drop()
	} else if serr := d.Refuse(why.errno(err)); serr != nil {
		return
	}
	l.fail(why, err)
}

// Drop forgets a call whose caller has gone.
func (d *Deferred) Drop() error { return d.use(true, func(int, uint64) error { return nil }) }

// Left is what is left of a descriptor that was to be given.
type Left struct {
	// FD is the agent's, as open as Descriptor.FD was; -1: it has none.
	FD int
	// Number is the caller's, who was not told of it: a signal interrupted it. -1: it has none.
	Number int
}

// Give is that of Call, and answers the call in any case, by an errno if the caller cannot have the
// descriptor: it may have as many as its limit allows. After an error left is the agent's, but not
// if the caller was killed, or interrupted with what is no socket.
//
// Where signals interrupt calls it is one step instead of two (doc.go).
func (d *Deferred) Give(give Descriptor) (left Left, err error) {
	if d.listener.isInterrupted() {
		return d.giveAtOnce(give)
	}
	return d.give(give.FD, give.Inode, func(fd int, id uint64) (int, error) {
		return addDescriptor(fd, id, give.FD, give.CloseOnExec)
	})
}

// GiveAgain has the call return a descriptor of Left, if the caller has it still; if not it gives
// another one. A program that had two would close one, and not the file.
func (d *Deferred) GiveAgain(left Left, give Descriptor) (Left, error) {
	if left.Number < 0 || !d.listener.srv.proc.IsSocket(d.Thread(), left.Number, give.Inode) {
		return d.Give(give)
	}
	return d.give(give.FD, give.Inode, func(int, uint64) (int, error) { return left.Number, nil })
}

// give has the call return the number that add says, of the file that the agent has by own.
func (d *Deferred) give(own int, inode uint64, add func(fd int, id uint64) (number int, err error)) (left Left, err error) {
	left = Left{own, -1}
	err = d.use(true, func(fd int, id uint64) error {
		d.kept.inode = inode // before the caller can have it: see reader.finish
		number, err := add(fd, id)
		if err != nil {
			why := d.listener.srv.why.ofAnswer(err)
			_ = sendErrno(fd, id, why.errno(err)) // fails if the caller has gone
			return d.refused(fmt.Errorf("give descriptor to caller: %w", err))
		}
		closeFD(own) // before the caller goes on: its close() must be the last
		left.FD = -1
		if err := sendValue(fd, id, number); err != nil {
			left = d.takeBack(number, inode)
			return d.refused(fmt.Errorf("tell caller its descriptor: %w", err))
		}
		return nil
	})
	return left, err
}

// giveAtOnce is Give by which a caller that a signal interrupts has either all or nothing.
func (d *Deferred) giveAtOnce(give Descriptor) (left Left, err error) {
	left = Left{give.FD, -1}
	err = d.use(true, func(fd int, id uint64) error {
		if err := addDescriptorAndAnswer(fd, id, give.FD, give.CloseOnExec); err != nil {
			_ = sendErrno(fd, id, d.listener.srv.why.ofAnswer(err).errno(err)) // fails if the caller has gone
			return d.refused(fmt.Errorf("give descriptor to caller: %w", err))
		}
		left.FD = -1
		return nil
	})
	return left, err
}

// takeBack gives a socket that a caller has got and was not told of; nothing if it has it no more.
func (d *Deferred) takeBack(number int, inode uint64) Left {
	none := Left{-1, -1}
	if inode == 0 {
		return none
	}
	fd, ok, err := d.listener.srv.proc.Take(d.Thread(), number)
	if !ok || err != nil {
		return none
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Ino != inode {
		closeFD(fd)
		return none
	}
	return Left{fd, number}
}

func (d *Deferred) refused(err error) error { return d.listener.refused(d.Thread(), err) }

// resumeDeferred answers the calls that the agent before this one had deferred. It reports false if
// they are the next agent's.
func (r *reader) resumeDeferred() bool {
	for _, left := range r.deferred.places {
		if left.call.ID == 0 {
			continue
		}
		*r.inflight = *left
		*left = inflightCall{}
		r.finish()
		if r.inflight.call.ID != 0 {
			return false
		}
	}
	return true
}

// endDeferred leaves deferred calls to the next agent; those that it would not get fail with EINTR,
// after which programs call again.
func (l *Listener) endDeferred() {
	l.deferMu.Lock()
	defer l.deferMu.Unlock()
	l.deferEnded = true
	l.mu.Lock()
	others := l.deferred.others
	l.deferred = deferredCalls{}
	l.mu.Unlock()
	for d := range others {
		_ = sendErrno(l.fd, d.call.ID, unix.EINTR) // fails if the caller has gone
	}
}
