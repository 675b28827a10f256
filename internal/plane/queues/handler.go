package queues

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/guest"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/queues/protocol"
	"heddle.dev/heddle/internal/trap"
)

// The library's question askRegion is for a region; others are for a stream for a descriptor, with
// the region's number above the askBits bits of that.
const (
	askMagic  = 0xa35b91d0c24e7f68
	askRegion = 1 << 16
	askBits   = 17
)

var (
	errNotChosen = errors.New("the endpoint's stack profile does not say queues")
	errFull      = errors.New("the endpoint has as many regions as it may")
	errNoRegion  = errors.New("no region of the endpoint's")
)

// begin implements guest.Handler.
func (p *Plane) begin(id model.EndpointID) (guest.Places, func(*trap.Deferred) error, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e, l := p.endpoints[id], p.link
	if e == nil || !e.serves() {
		return nil, nil, p.why.notChosen.Because(errNotChosen)
	}
	if l == nil {
		return nil, nil, p.why.gone.Because(process.ErrGone)
	}
	return e.places, func(d *trap.Deferred) error { return p.answer(d, l, e) }, nil
}

// answer answers endpoint e's question d. An error means that the call was not answered.
func (p *Plane) answer(d *trap.Deferred, l *link, e *endpoint) error {
	ctx, cancel := context.WithTimeout(context.Background(), process.Answers)
	defer cancel()
	switch question := guest.Question(d.Data()); {
	case question == askRegion:
		return p.answerRegion(ctx, d, l, e)
	case question&askRegion == 0:
		return p.answerStream(ctx, d, l, e, question>>askBits, int(question%askRegion))
	}
	return p.why.socket.Because(guest.ErrNoConnection)
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
	capacity := e.take()
	p.mu.Unlock()
	if capacity == 0 {
		return nil, nil, p.why.full.Because(errFull)
	}
	r, guest, err := l.makeRegion(ctx, e, flags, capacity)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		e.leave(capacity)
		return nil, nil, p.why.failed.Because(err)
	}
	if p.link != l { // lose, which has been, would not know of it
		e.leave(capacity)
		closeFD(r.memory)
		_ = guest.Close()
		return nil, nil, p.why.gone.Because(process.ErrGone)
	}
	p.regions[r.id] = r
	return r, guest, nil
}

// answerStream gives a connection of the caller's to the service. The region is one of its
// endpoint's: who has another process's number can give it no more than its own connections.
func (p *Plane) answerStream(ctx context.Context, d *trap.Deferred, l *link, e *endpoint, id uint64, number int) error {
	fd, cut, err := p.take(ctx, e, d.Thread(), number)
	if err != nil {
		return p.why.socket.Because(err)
	}
	defer closeFD(fd)
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
		r.given[got.Stream] = cut
	}
	p.mu.Unlock()
	if !known {
		return p.why.gone.Because(process.ErrGone)
	}
	return d.Return(int(got.Stream))
}

// take gives a duplicate of a connection of endpoint e's, by the thread's number of it, and what
// ends that connection.
func (p *Plane) take(ctx context.Context, e *endpoint, thread uint32, number int) (fd int, cut func(), err error) {
	fd, at, err := p.programs.Connection(thread, number, guest.Established, guest.CloseWait)
	if err == nil {
		return fd, func() { p.cut(at) }, nil
	}
	fd, found, failed := p.programs.Take(thread, number)
	if !found || failed != nil {
		return -1, nil, errors.Join(err, failed)
	}
	abort, ok, failed := p.cfg.Modules.Connected(ctx, e.ID, fd)
	if !ok || failed != nil {
		closeFD(fd)
		return -1, nil, errors.Join(err, failed)
	}
	return fd, func() {
		ctx, cancel := context.WithTimeout(context.Background(), process.Answers)
		defer cancel()
		if err := abort(ctx); err != nil {
			p.cfg.Log.Error("a connection whose queues have ended is not", "endpoint", e.Name, "err", err)
		}
	}, nil
}
