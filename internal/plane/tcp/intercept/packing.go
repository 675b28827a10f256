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
	// packedFirst is how many sockets a crate has when its caller gets it.
	packedFirst = 4
	// packedAtATime is how many sockets are added to a crate before the refiller looks for what is more urgent.
	packedAtATime = 8
)

// packing is a crate whose program takes sockets from it while the refiller adds to it. It belongs to the reader that gives the
// crate, then to the refiller.
type packing struct {
	// crate is a descriptor of its own for the agent's end: the other one is closed when the program has closed the crate.
	crate    int
	endpoint *endpoint
	family   int
	want     traits
	left     int         // sockets still to be put into it
	done     atomic.Bool // nothing will be put into it any more; set once
}

// put puts a socket that has been admitted into the crate, which has it then, or, with what Admit counted, nobody.
func (p *packing) put(s socket) error {
	err := unix.Sendmsg(p.crate, []byte{0}, unix.UnixRights(s.fd), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	waited := closeWaits(s.fd)
	switch {
	case waited:
		return errLingers
	case err != nil:
		return fmt.Errorf("pack socket: %w", err)
	}
	p.left--
	return nil
}

// end tells the program that no more sockets come, by a message without one. A program that does not hear it, because the
// agent was killed, finds the end of the connection, or stops waiting.
func (p *packing) end() {
	_ = unix.Sendmsg(p.crate, []byte{0}, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	p.close()
}

// close tells the program nothing.
func (p *packing) close() {
	closeFD(p.crate)
	p.done.Store(true)
}

// closed reports whether the program has closed the crate.
func (p *packing) closed() bool {
	ends := [1]unix.PollFd{{Fd: int32(p.crate)}}
	_, err := unix.Poll(ends[:], 0)
	return err == nil && ends[0].Revents&unix.POLLHUP != 0
}

// becomeCrateUser makes the calling thread's the sockets that it has under way in crates. Its effective user stays root.
func becomeCrateUser() error {
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, crateUser, ^uintptr(0), ^uintptr(0)); e != 0 {
		return fmt.Errorf("become the user of crates: %w", e)
	}
	return nil
}

// pack has what is left put into a crate; nothing if more is false. before is called before the refiller is woken.
func (r *refiller) pack(p *packing, more bool, before func()) {
	if !more || p.left == 0 {
		p.end()
		return
	}
	select {
	case r.crates <- p:
		r.rouse(needNow, before)
	default:
		p.end()
	}
}

// packSome adds some sockets to the crate whose turn it is: of the endpoint whose last turn was longest ago the one that has waited
// longest. It reports false if there is none.
func (r *refiller) packSome(ctx context.Context) bool {
	for more := true; more; {
		select {
		case p := <-r.crates:
			r.packings = append(r.packings, p)
		default:
			more = false
		}
	}
	if len(r.packings) == 0 {
		return false
	}
	next := 0
	for i, p := range r.packings {
		if p.endpoint.lastTurn < r.packings[next].endpoint.lastTurn {
			next = i
		}
	}
	p := r.packings[next]
	r.packings = slices.Delete(r.packings, next, next+1)
	r.turns++
	p.endpoint.lastTurn = r.turns
	err := r.packInto(ctx, p)
	if err == nil && p.left > 0 {
		r.packings = append(r.packings, p)
		return true
	}
	// A program that has all it may have gets to know when it asks again.
	switch {
	case errors.Is(err, errLingers):
		p.endpoint.lingers.Store(true)
		r.failed(p.endpoint.id, err)
	case err != nil && !errors.Is(err, model.ErrSocketQuota) && !p.closed():
		r.failed(p.endpoint.id, fmt.Errorf("pack crate: %w", err))
	}
	p.end()
	return true
}

// packInto adds some sockets to a crate. The caller who asked for them was compared when the first ones were packed.
func (r *refiller) packInto(ctx context.Context, p *packing) error {
	if p.closed() {
		p.left = 0
		return nil
	}
	packed := uint64(0)
	defer func() { r.packed.Add(packed) }()
	r.alarm.set(lingerPatience)
	defer r.alarm.set(0)
	for ; packed < packedAtATime && p.left > 0 && ctx.Err() == nil; packed++ {
		if p.endpoint.removed.Load() {
			p.left = 0
			return nil
		}
		s, err := makeSocket(r.maker, p.endpoint.id, p.family)
		if err != nil {
			return err
		}
		if err = s.fit(r.maker, p.endpoint.id, p.want); err == nil {
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

// endPackings gives up the crates that are being packed: the end of the connection tells their programs.
func (r *refiller) endPackings() {
	for _, p := range r.packings {
		p.close()
	}
	r.packings = nil
	for {
		select {
		case p := <-r.crates:
			p.close()
		default:
			return
		}
	}
}
