package intercept

import (
	"context"
	"errors"
	"fmt"

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
	crate    int // the agent's end; the refiller has a descriptor of its own for it
	endpoint *endpoint
	family   int
	want     traits
	left     int // sockets still to be put into it
}

// put puts a socket that has been admitted into the crate, which has it then, or, with what Admit counted, nobody.
func (p *packing) put(s socket) error {
	err := unix.Sendmsg(p.crate, []byte{0}, unix.UnixRights(s.fd), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	closeFD(s.fd)
	if err != nil {
		return fmt.Errorf("pack socket: %w", err)
	}
	p.left--
	return nil
}

// end tells the program that no more sockets come, by a message without one. A program that does not hear it, because the
// agent was killed, finds the end of the connection, or stops waiting.
func (p *packing) end() {
	_ = unix.Sendmsg(p.crate, []byte{0}, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
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
	// The listener closes its own when the program has closed the crate.
	own, err := unix.FcntlInt(uintptr(p.crate), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		p.end()
		return
	}
	p.crate = own
	select {
	case r.crates <- p:
		r.rouse(needNow, before)
	default:
		p.end()
		closeFD(own)
	}
}

// packSome adds some sockets to the crate whose turn it is. It reports false if there is none.
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
	p := r.packings[0]
	r.packings = r.packings[1:]
	if err := r.packInto(ctx, p); err != nil || p.left == 0 {
		p.end()
		closeFD(p.crate)
		// A program that closed its crate, and one that has all it may have, gets to know when it asks again.
		if err != nil && !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, model.ErrSocketQuota) {
			r.failed(p.endpoint.id, err)
		}
		return true
	}
	r.packings = append(r.packings, p)
	return true
}

// packInto adds some sockets to a crate. The caller who asked for them was compared when the first ones were packed.
func (r *refiller) packInto(ctx context.Context, p *packing) error {
	packed := uint64(0)
	defer func() { r.packed.Add(packed) }()
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
		closeFD(p.crate)
	}
	r.packings = nil
	for {
		select {
		case p := <-r.crates:
			closeFD(p.crate)
		default:
			return
		}
	}
}
