package intercept

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

const (
	// filledFirst is how many sockets a batch has when its caller gets it.
	filledFirst = 4
	// filledAtATime is how many sockets are added to a batch before the prefiller looks for what is
	// more urgent.
	filledAtATime = 8
)

// filling is a batch whose program takes sockets from it while the prefiller adds to it. It belongs
// to the reader that gives the batch, then to the prefiller.
type filling struct {
	// batch is a descriptor of its own for the agent's end: the other one is closed when the
	// program has closed the batch.
	batch  int
	pools  *pools
	family int
	want   socketOptions
	left   int         // sockets still to be put into it
	done   atomic.Bool // nothing will be put into it any more; set once
}

// put puts a socket that has been admitted into the batch, which has it then, or, with what Admit
// counted, nobody.
func (p *filling) put(s socket) error {
	err := unix.Sendmsg(p.batch, []byte{0}, unix.UnixRights(s.fd), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	waited := closeWaits(s.fd)
	switch {
	case waited:
		return errLingers
	case err != nil:
		return fmt.Errorf("put socket into batch: %w", err)
	}
	p.left--
	return nil
}

// end tells the program that no more sockets come, by a message without one. A program that does
// not hear it, because the agent was killed, finds the end of the connection, or stops waiting.
func (p *filling) end() {
	_ = unix.Sendmsg(p.batch, []byte{0}, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	p.close()
}

// close tells the program nothing.
func (p *filling) close() {
	closeFD(p.batch)
	p.done.Store(true)
}

// closed reports whether the program has closed the batch.
func (p *filling) closed() bool {
	ends := [1]unix.PollFd{{Fd: int32(p.batch)}}
	_, err := unix.Poll(ends[:], 0)
	return err == nil && ends[0].Revents&unix.POLLHUP != 0
}

// becomeBatchUser makes the calling thread's the sockets that it has under way in batches. Its
// effective user stays root.
func becomeBatchUser() error {
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, batchUser, ^uintptr(0), ^uintptr(0)); e != 0 {
		return fmt.Errorf("become the user of batches: %w", e)
	}
	return nil
}

// startFilling has what is left put into a batch; nothing if more is false. before is called before
// the prefiller is woken.
func (r *prefiller) startFilling(p *filling, more bool, before func()) {
	if !more || p.left == 0 {
		p.end()
		return
	}
	select {
	case r.batches <- p:
		r.rouse(needNow, before)
	default:
		p.end()
	}
}

// fillSome adds some sockets to the batch whose turn it is: of the endpoint whose last turn was
// longest ago the one that has waited longest. It reports false if there is none.
func (r *prefiller) fillSome(ctx context.Context) bool {
	for more := true; more; {
		select {
		case p := <-r.batches:
			r.fillings = append(r.fillings, p)
		default:
			more = false
		}
	}
	if len(r.fillings) == 0 {
		return false
	}
	next := 0
	for i, p := range r.fillings {
		if p.pools.lastFilled < r.fillings[next].pools.lastFilled {
			next = i
		}
	}
	p := r.fillings[next]
	r.fillings = slices.Delete(r.fillings, next, next+1)
	r.turns++
	p.pools.lastFilled = r.turns
	err := r.fillInto(ctx, p)
	if err == nil && p.left > 0 {
		r.fillings = append(r.fillings, p)
		return true
	}
	// A program that has all it may have gets to know when it asks again.
	switch {
	case errors.Is(err, errLingers):
		p.pools.lingers.Store(true)
		r.failed(p.pools.endpoint.ID, err)
	case err != nil && !errors.Is(err, model.ErrSocketQuota) && !p.closed():
		r.failed(p.pools.endpoint.ID, fmt.Errorf("fill batch: %w", err))
	}
	p.end()
	return true
}

// fillInto adds some sockets to a batch. The caller who asked for them was compared when the first
// ones were filled.
func (r *prefiller) fillInto(ctx context.Context, p *filling) error {
	if p.closed() {
		p.left = 0
		return nil
	}
	filled := uint64(0)
	defer func() { r.filled.Add(filled) }()
	r.interrupts.set(lingerTimeout)
	defer r.interrupts.set(0)
	for ; filled < filledAtATime && p.left > 0 && ctx.Err() == nil; filled++ {
		if p.pools.endpoint.Removed() {
			p.left = 0
			return nil
		}
		s, err := makeSocket(r.maker, p.pools.endpoint.ID, p.family)
		if err != nil {
			return err
		}
		if err = s.apply(r.maker, p.pools.endpoint.ID, p.want); err == nil {
			err = r.maker.Admit(s.fd, model.Caller{})
		}
		if err != nil {
			closeFD(s.fd)
			return err
		}
		if err := p.put(s); err != nil {
			return err
		}
	}
	return nil
}

// endFillings gives up the batches that are being filled: the end of the connection tells their
// programs.
func (r *prefiller) endFillings() {
	for _, p := range r.fillings {
		p.close()
	}
	r.fillings = nil
	for {
		select {
		case p := <-r.batches:
			p.close()
		default:
			return
		}
	}
}
