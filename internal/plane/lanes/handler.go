package lanes

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/trap"
	"heddle.dev/heddle/internal/trap/task"
)

// A library asks for lanes by
//
//	socket(AF_INET, SOCK_STREAM, 0, askMagic, role<<32 | descriptor, ^askMagic)
//
// of which the kernel takes the first three arguments: clib/guest/ask.c. The answer is a file, or
// an errno. askMagic is random, so that no program has it in its registers by chance.
const askMagic = 0x9c4be1f27d5830a6

// What an end has done for its connection.
const (
	connector = 0
	acceptor  = 1
)

// handler answers the questions of libraries.
type handler struct{ p *Plane }

var _ interface {
	trap.EndpointHandler
	trap.ListenerHandler
} = (*handler)(nil)

// Owns implements trap.Handler.
func (h *handler) Owns(d *trap.Data) bool {
	return d.Arch == trap.NativeArch && d.Nr == unix.SYS_SOCKET && d.Args[3] == askMagic && d.Args[5] == ^uint64(askMagic)
}

// Reasons implements trap.Handler.
func (h *handler) Reasons() []*trap.Reason { return h.p.why.all() }

// Bound implements trap.EndpointHandler: what there is of an endpoint begins with its Attach.
func (h *handler) Bound(*trap.Endpoint) {}

// Released implements trap.EndpointHandler.
func (h *handler) Released(*trap.Endpoint) {}

// Annotations implements trap.ListenerHandler: heddle-runtime preloads the library in containers
// with this one.
func (h *handler) Annotations() []string { return []string{model.AnnotationGuest} }

// Opened implements trap.ListenerHandler.
func (h *handler) Opened(*trap.Listener) {}

// Closed implements trap.ListenerHandler.
func (h *handler) Closed(*trap.Listener) {}

var (
	errNotChosen = errors.New("the stack profile of an end does not say shared-memory")
	errLimited   = errors.New("an end has a cap, which memory would not be held to")
	errBusy      = errors.New("too many questions at a time")
	errFull      = errors.New("an end has as many connections with lanes as it may")
	errElsewhere = errors.New("the other end is no other endpoint of this node")
	errSocket    = errors.New("not an established TCP connection of the endpoint's")
)

// Answer answers a question.
func (h *handler) Answer(c *trap.Call) error {
	if c.Listener().Annotation(model.AnnotationGuest) != "true" {
		return c.Next()
	}
	if other, err := c.InOtherNetns(); err != nil {
		return err
	} else if other {
		return h.p.why.socket.Because(errSocket)
	}
	h.p.mu.Lock()
	e := h.p.endpoints[c.Endpoint.ID]
	err := h.p.mayHave(e)
	h.p.mu.Unlock()
	if err != nil {
		return err
	}
	select {
	case e.places <- struct{}{}:
	default:
		return h.p.why.busy.Because(errBusy)
	}
	// By a goroutine of its own: a socket's lock may be held by a send that waits for memory.
	d := c.Defer()
	go func() {
		defer func() { <-e.places }()
		if err := h.p.answer(d, e); err != nil {
			d.Fail(err)
		}
	}()
	return nil
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
	thread        uint32
	inode, cookie uint64
	local, remote netip.AddrPort
}

// answer answers endpoint e's question d. An error means that the call was not answered.
func (p *Plane) answer(d *trap.Deferred, e *endpoint) error {
	role, number := int(d.Data().Args[4]>>32&1), int(int32(d.Data().Args[4]))
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
	fd, found, err := p.proc.Take(thread, number)
	if err != nil || !found {
		return at, p.why.socket.Because(errors.Join(errSocket, err))
	}
	defer closeFD(fd)
	netns, err := task.NetnsOfSocket(fd)
	if err != nil || netns != p.netns {
		return at, p.why.socket.Because(errors.Join(errSocket, err))
	}
	at, err = lookAt(fd)
	at.thread = thread
	if err != nil {
		return at, p.why.socket.Because(err)
	}
	return at, nil
}

// tcpEstablished is a state as in TCP_INFO.
const tcpEstablished = 1

func lookAt(fd int) (at end, err error) {
	if protocol, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err != nil || protocol != unix.IPPROTO_TCP {
		return at, errors.Join(errSocket, err)
	}
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil || info.State != tcpEstablished {
		return at, errors.Join(errSocket, err)
	}
	local, err := unix.Getsockname(fd)
	if err != nil {
		return at, fmt.Errorf("name of a socket: %w", err)
	}
	remote, err := unix.Getpeername(fd)
	if err != nil {
		return at, fmt.Errorf("name of a socket's peer: %w", err)
	}
	at.local, at.remote = addrPort(local), addrPort(remote)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return at, err
	}
	at.inode = st.Ino
	at.cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	return at, err
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
		return -1, p.why.socket.Because(errSocket)
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
	number, there, err := p.proc.FindSocket(found.first.thread, found.first.inode)
	if err != nil || !there {
		return false
	}
	fd, there, err := p.proc.Take(found.first.thread, number)
	if err != nil || !there {
		return false
	}
	defer closeFD(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	return err == nil && cookie == found.first.cookie
}

// closeFD closes a descriptor of ours: the number is always free then.
func closeFD(fd int) { _ = unix.Close(fd) }
