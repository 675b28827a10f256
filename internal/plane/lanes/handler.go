package lanes

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/guest"
	"heddle.dev/heddle/internal/trap"
)

// The library's question is role<<32 | descriptor, the answer a file.
const askMagic = 0x9c4be1f27d5830a6

// What an end has done for its connection.
const (
	connector = 0
	acceptor  = 1
)

var (
	errNotChosen = errors.New("the stack profile of an end does not say shared-memory")
	errLimited   = errors.New("an end has a cap, which memory would not be held to")
	errFull      = errors.New("an end has as many connections with lanes as it may")
	errElsewhere = errors.New("the other end is no other endpoint of this node")
)

// begin implements guest.Handler.
func (p *Plane) begin(id model.EndpointID) (guest.Places, func(*trap.Deferred) error, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.endpoints[id]
	if err := p.mayHave(e); err != nil {
		return nil, nil, err
	}
	return e.places, func(d *trap.Deferred) error { return p.answer(d, e) }, nil
}

// mayHave refuses an endpoint whose connections are to have no lanes. The caller holds mu.
func (p *Plane) mayHave(e *endpoint) error {
	switch {
	case e == nil || !e.attached || !e.chosen:
		return p.why.notChosen.Because(errNotChosen)
	case e.limited:
		return p.why.limited.Because(errLimited)
	case e.pairs >= maxPairs:
		return p.why.full.Because(errFull)
	}
	return nil
}

// end is one end of a connection, as its program has it.
type end struct {
	guest.Connection
	local, remote netip.AddrPort
}

// answer answers endpoint e's question d. An error means that the call was not answered.
func (p *Plane) answer(d *trap.Deferred, e *endpoint) error {
	question := guest.Question(d.Data())
	role, number := int(question>>32&1), int(int32(question))
	at, err := p.look(d.Thread(), number)
	if err != nil {
		return err
	}
	// From here on what was looked at is known to be the caller's: it has been waiting.
	if err := d.StillWaits(); err != nil {
		return err
	}
	file, err := p.lanesOf(e, role, at)
	if err != nil {
		return err
	}
	if left, err := d.Give(trap.Descriptor{FD: file, CloseOnExec: true}); err != nil {
		if left.FD >= 0 {
			closeFD(left.FD)
		}
		p.cfg.Log.Debug("a program did not get its lanes", "endpoint", e.Name, "err", err)
	}
	return nil
}

// look looks at a descriptor of the caller's: it must be an established connection that the node's
// own TCP runs, so that rules have let it come to be.
func (p *Plane) look(thread uint32, number int) (at end, err error) {
	fd, c, err := p.programs.Connection(thread, number, guest.Established)
	if err != nil {
		return at, p.why.socket.Because(err)
	}
	defer closeFD(fd)
	local, err := unix.Getsockname(fd)
	if err != nil {
		return at, p.why.socket.Because(fmt.Errorf("name of a socket: %w", err))
	}
	remote, err := unix.Getpeername(fd)
	if err != nil {
		return at, p.why.socket.Because(fmt.Errorf("name of a socket's peer: %w", err))
	}
	return end{c, addrPort(local), addrPort(remote)}, nil
}

func addrPort(a unix.Sockaddr) netip.AddrPort {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
	}
	return netip.AddrPort{}
}

// lanesOf gives the file of the lanes of endpoint e's connection: that which the other end has
// asked for, or new ones.
func (p *Plane) lanesOf(e *endpoint, role int, at end) (file int, err error) {
	key := connection{at.local, at.remote}
	if role == acceptor {
		key = connection{at.remote, at.local}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	other := p.endpointAt(at.remote.Addr())
	if p.endpointAt(at.local.Addr()) != e {
		return -1, p.why.socket.Because(guest.ErrNoConnection)
	}
	if other == nil || other == e {
		return -1, p.why.elsewhere.Because(errElsewhere)
	}
	if err := p.mayHave(e); err != nil {
		return -1, err
	}
	if err := p.mayHave(other); err != nil {
		return -1, err
	}
	found := p.pairs[key]
	if found != nil && !p.waitsFor(found, role, e) {
		p.forget(key, found) // of an earlier connection
		found = nil
	}
	if found == nil {
		ends := [2]*endpoint{e, other}
		if role == acceptor {
			ends = [2]*endpoint{other, e}
		}
		if found, err = newPair(ends); err != nil {
			return -1, p.why.failed.Because(err)
		}
		p.pairs[key] = found
		e.pairs++
		other.pairs++
		found.first = at
	}
	file, err = found.open(role)
	if err != nil {
		return -1, p.why.failed.Because(err)
	}
	return file, nil
}

// waitsFor reports whether a pair is waiting for this end: the other one has asked, and still has
// the connection. An address and port may be another connection's by now. The caller holds mu.
func (p *Plane) waitsFor(found *pair, role int, e *endpoint) bool {
	if found.given[role] || !found.given[1-role] || found.ends[role] != e {
		return false
	}
	fd, there := p.programs.Find(found.first.Connection)
	if there {
		closeFD(fd)
	}
	return there
}

// closeFD closes a descriptor of ours: the number is always free then.
func closeFD(fd int) { _ = unix.Close(fd) }
