package queues

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/queues/protocol"
	"heddle.dev/heddle/internal/trap"
	"heddle.dev/heddle/internal/trap/task"
)

// A library asks by
//
//	socket(AF_INET, SOCK_STREAM, 0, askMagic, question, ^askMagic)
//
// of which the kernel takes the first three arguments: clib/guest/ask.c. The question askRegion is
// for a region; others are for a stream for a descriptor, with the region's number above the
// askBits bits of that. askMagic is random, so that no program has it in its registers by chance.
const (
	askMagic  = 0xa35b91d0c24e7f68
	askRegion = 1 << 16
	askBits   = 17
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
	errNotChosen = errors.New("the endpoint's stack profile does not say queues")
	errBusy      = errors.New("too many questions at a time")
	errFull      = errors.New("the endpoint has as many regions as it may")
	errSocket    = errors.New("not an established TCP connection of the node's")
	errNoRegion  = errors.New("no region of the endpoint's")
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
	serves, l := e != nil && e.serves(), h.p.link
	h.p.mu.Unlock()
	if !serves {
		return h.p.why.notChosen.Because(errNotChosen)
	}
	if l == nil {
		return h.p.why.gone.Because(errEnded)
	}
	select {
	case e.places <- struct{}{}:
	default:
		return h.p.why.busy.Because(errBusy)
	}
	// By a goroutine of its own: the service answers it, and a socket's lock may be held by a send
	// that waits for memory.
	d := c.Defer()
	go func() {
		defer func() { <-e.places }()
		if err := h.p.answer(d, l, e); err != nil {
			d.Fail(err)
		}
	}()
	return nil
}

// answer answers endpoint e's question d. An error means that the call was not answered.
func (p *Plane) answer(d *trap.Deferred, l *link, e *endpoint) error {
	ctx, cancel := context.WithTimeout(context.Background(), process.Answers)
	defer cancel()
	switch question := d.Data().Args[4]; {
	case question == askRegion:
		return p.answerRegion(ctx, d, l, e)
	case question&askRegion == 0:
		return p.answerStream(ctx, d, l, e, question>>askBits, int(question%askRegion))
	}
	return p.why.socket.Because(errSocket)
}

// answerRegion gives a process a region of its own.
func (p *Plane) answerRegion(ctx context.Context, d *trap.Deferred, l *link, e *endpoint) error {
	r, guest, err := p.newRegion(ctx, l, e, 0)
	if err != nil {
		return err
	}
	defer guest.Close()
	// A duplicate, because Give closes what it gives.
	fd, err := unix.FcntlInt(guest.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return p.why.failed.Because(err)
	}
	if left, err := d.Give(trap.Descriptor{FD: fd, CloseOnExec: true}); err != nil {
		closeFD(left.FD)
		p.cfg.Log.Debug("a program did not get its queues", "endpoint", e.Name, "region", r.id, "err", err)
	}
	return nil
}

// newRegion makes a region of e's, for whoever gets the guest's end.
func (p *Plane) newRegion(ctx context.Context, l *link, e *endpoint, flags uint32) (*region, *os.File, error) {
	p.mu.Lock()
	full := e.regions >= maxRegions
	if !full {
		e.regions++
	}
	p.mu.Unlock()
	if full {
		return nil, nil, p.why.full.Because(errFull)
	}
	r, guest, err := l.makeRegion(ctx, e, flags)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		e.regions--
		return nil, nil, p.why.failed.Because(err)
	}
	p.regions[r.id] = r
	return r, guest, nil
}

// answerStream gives a connection of the caller's to the service. The region is one of its
// endpoint's: who has another process's number can give it no more than its own connections.
func (p *Plane) answerStream(ctx context.Context, d *trap.Deferred, l *link, e *endpoint, id uint64, number int) error {
	fd, found, err := p.proc.Take(d.Thread(), number)
	if err != nil || !found {
		return p.why.socket.Because(errors.Join(errSocket, err))
	}
	defer closeFD(fd)
	at, err := p.look(fd)
	if err != nil {
		return p.why.socket.Because(err)
	}
	at.thread = d.Thread()
	// From here on what was looked at is known to be the caller's: it has been waiting.
	if err := d.StillWaits(); err != nil {
		return err
	}
	p.mu.Lock()
	r := p.regions[id]
	p.mu.Unlock()
	if r == nil || r.of != e {
		return p.why.socket.Because(errNoRegion)
	}
	ask := protocol.Give{Head: protocol.Head{Type: protocol.TypeGive, Region: r.id}}
	got, back, err := request[protocol.Give, protocol.Give](ctx, l, &ask, &ask.Head, fd)
	closeFD(back)
	if err != nil {
		return p.why.full.Because(fmt.Errorf("give a connection to the service: %w", err))
	}
	p.mu.Lock()
	known := p.regions[id] == r
	if known { // or lose looks at what it has been given
		r.given[got.Stream] = at
	}
	p.mu.Unlock()
	if !known {
		return p.why.gone.Because(errEnded)
	}
	return d.Return(int(got.Stream))
}

// tcpEstablished and tcpCloseWait are states as in TCP_INFO.
const (
	tcpEstablished = 1
	tcpCloseWait   = 8
)

// look looks at a socket: it must be a connection that the node's own TCP runs, so that rules have
// let it come to be.
func (p *Plane) look(fd int) (at given, err error) {
	netns, err := task.NetnsOfSocket(fd)
	if err != nil || netns != p.netns {
		return at, errors.Join(errSocket, err)
	}
	if protocol, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err != nil || protocol != unix.IPPROTO_TCP {
		return at, errors.Join(errSocket, err)
	}
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil || info.State != tcpEstablished && info.State != tcpCloseWait {
		return at, errors.Join(errSocket, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return at, err
	}
	at.inode = st.Ino
	at.cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	return at, err
}
