package stacks

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/stacks/socket"
	"heddle.dev/heddle/internal/trap"
)

// Bound sockets and listeners outlive the agent because the fd keeper has their other ends, too; by
// the way a module that takes the place of one that was killed is told of them. All others wait in
// the program's own queue, or are the module's.

// keepKey is a held socket's at the keeper.
func (t *tenant) keepKey(id uint64) string {
	return fmt.Sprintf("%sstack/%d/%d/%d", trap.OthersKey, t.number(), t.generation(), id)
}

// keepHeld gives the keeper a duplicate of a held socket's other end, fd, and what is noted of it.
func (p *Plane) keepHeld(t *tenant, h *held, fd int) error {
	keeper := p.cfg.Keeper()
	if keeper == nil {
		return nil
	}
	n := t.noteOf(h)
	note := n.Bytes()
	meta := append(note[:], 0)
	if h.reuseAddress {
		meta[plane.NoteBytes] = 1
	}
	// It keeps two, the second one without looking at it.
	return keeper.Put(t.keepKey(h.id), meta, fd, fd)
}

// keepAgain is keepHeld for a socket of which something else is noted since.
func (p *Plane) keepAgain(t *tenant, h *held) {
	raw, err := h.other.SyscallConn()
	if err == nil {
		ctl := raw.Control(func(fd uintptr) { err = p.keepHeld(t, h, int(fd)) })
		err = errors.Join(ctl, err)
	}
	if err != nil {
		p.notKept(t, err)
	}
}

func (p *Plane) notKept(t *tenant, err error) {
	p.why.notKept.Add()
	p.cfg.Log.Error("a bound socket is lost should this agent end; see that the fd keeper runs", "endpoint", t.Name, "err", err)
}

// unkeep undoes keepHeld. The keeper forgets by itself what a program has closed.
func (p *Plane) unkeep(t *tenant, h *held) {
	if keeper := p.cfg.Keeper(); keeper != nil {
		_ = keeper.Drop(t.keepKey(h.id)) // as said
	}
}

// adopt takes over the bound sockets and listeners that the agent before this one had of a tenant.
func (p *Plane) adopt(t *tenant) error {
	keeper := p.cfg.Keeper()
	if keeper == nil {
		return nil
	}
	all, err := keeper.Take(strings.TrimSuffix(t.keepKey(0), "0"))
	if err != nil {
		return err
	}
	var errs []error
	for _, k := range all {
		closeFD(k.Page)
		if len(k.Meta) != plane.NoteBytes+1 {
			closeFD(k.FD)
			continue
		}
		n := socket.ParseNote([plane.NoteBytes]byte(k.Meta[:plane.NoteBytes]))
		h := &held{id: n.ID, note: n, reuseAddress: k.Meta[plane.NoteBytes] != 0}
		p.useID(n.ID)
		if err := p.hold(t, h, k.FD); err != nil && !errors.Is(err, unix.ENETDOWN) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// useID has ids that are given out from now on be greater.
func (p *Plane) useID(id uint64) {
	for {
		last := p.ids.Load()
		if last >= id || p.ids.CompareAndSwap(last, id) {
			return
		}
	}
}
