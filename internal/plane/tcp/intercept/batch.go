package intercept

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/trap"
	"heddle.dev/heddle/internal/trap/task"
)

// A batch is a Unix socket with TCP sockets in its queue, one a message, each admitted for its
// container as one that is given by itself. A program that may have several sockets at a time
// (model.AnnotationSocketPool) asks for one by
//
//	socket(family, type, protocol, batchMagic, number, ^batchMagic)
//
// of which the kernel takes the first three arguments; it gets a socket as always if the agent does
// not know, or does not want. clib/pool/pool.c is the program's side;
// docs/decisions/0038-sockets-by-the-batch.md says why it is like this.

// batchMagic is random, so that no program has it in its registers by chance.
const batchMagic = 0xb7c1_5e0d_92f6_4a83

const (
	// maxBatch is how many sockets are put into a batch.
	maxBatch = 512
	// maxBatches is how many batches a listener's programs may hold, full or empty: a process holds
	// up to two of each family. The agent pays for their memory; the sockets in them are bounded as
	// all others are (Admit).
	maxBatches = 64
	// batchBytes is the buffer of a batch: the kernel counts less than 1 kB for each socket under
	// way.
	batchBytes = 2 * maxBatch << 10
	// batchUser is the user whose sockets the kernel counts as being under way in batches: it
	// refuses to send more than a process may have open (ETOOMANYREFS) to all of a user's processes
	// together, and root's may be in other containers.
	batchUser = math.MaxUint32 - 4871
)

// batchWanted reads the arguments of socket() that the kernel does not.
func batchWanted(d *trap.Data, mptcp bool) int {
	if d.Args[3] != batchMagic || d.Args[5] != ^uint64(batchMagic) || mptcp {
		return 0
	}
	return int(min(d.Args[4], maxBatch))
}

// batch is an empty batch.
type batch struct {
	fd    int // the container's end
	inode uint64
	name  *unix.SockaddrUnix // of the container's end, in the namespace of batches
	own   int                // the agent's end
	done  *atomic.Bool       // nothing will be put into it any more; nil until there is something that could be
}

func (c batch) close() {
	closeFD(c.fd)
	closeFD(c.own)
}

// batchMaker makes empty batches, on a thread in a network namespace with nothing in it: one could
// bind names of Unix sockets there. They are connections to a listener whose process has ended, so
// that what they tell of their peer (SO_PEERCRED, SO_PEERPIDFD) leads nowhere. The agent's pidfd in
// a container with CAP_SYS_PTRACE would be the agent's files.
type batchMaker struct {
	once     sync.Once
	ready    atomic.Bool
	netns    atomic.Uint64                               // inode of the namespace, 0 before there is one
	requests chan func(listener int, name unix.Sockaddr) // run on the maker's thread
	spare    chan batch                                  // one made ahead: to wait for the maker's thread takes longer than to answer
}

// begin starts the maker, unless it runs. Until it is ready there are no batches.
func (m *batchMaker) begin(h *Handler) {
	if h.cfg.ListenElsewhere == nil {
		return
	}
	m.once.Do(func() {
		m.requests, m.spare = make(chan func(int, unix.Sockaddr)), make(chan batch, 1)
		h.tasks.Add(1)
		task.OnThread(func() {
			defer h.tasks.Done()
			if err := m.run(h.ctx, h.cfg.ListenElsewhere); err != nil {
				h.cfg.Log.Error("batches cannot be made: containers get their sockets one by one", "err", err)
			}
		})
	})
}

// run makes batches until ctx is done. It leaves its thread in another network namespace.
func (m *batchMaker) run(ctx context.Context, listen func(*os.File) error) error {
	defer m.netns.Store(0) // the kernel gives the number to another namespace
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("network namespace of batches: %w", err)
	}
	fd, err := unixSocket(unix.SOCK_NONBLOCK)
	if err != nil {
		return err
	}
	inode, err := task.NetnsOfSocket(fd)
	if err != nil {
		closeFD(fd)
		return err
	}
	m.netns.Store(inode)
	listener := os.NewFile(uintptr(fd), "batches")
	defer listener.Close()
	if !model.ProtectBatches.On() {
		listen = func(*os.File) error { return unix.Listen(fd, 8) }
	}
	if err := listen(listener); err != nil {
		return fmt.Errorf("listen in another process: %w", err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		return fmt.Errorf("name of the listener: %w", err)
	}
	m.ready.Store(true)
	m.serve(ctx, fd, name)
	return nil
}

// serve does what it is asked for and sees to it that there is a spare batch, until ctx is done.
func (m *batchMaker) serve(ctx context.Context, listener int, name unix.Sockaddr) {
	var next batch
	var err error
	var spare chan<- batch // nil while next is none
	for {
		if spare == nil {
			if next, err = newBatch(listener, name); err == nil { // else who needs one asks, and hears why not
				spare = m.spare
			}
		}
		select {
		case <-ctx.Done():
			if spare != nil {
				next.close()
			}
			select {
			case c := <-m.spare:
				c.close()
			default:
			}
			return
		case spare <- next:
			spare = nil
		case f := <-m.requests:
			f(listener, name)
		}
	}
}

// unixSocket makes a socket with a name that the kernel chooses: it cannot be bound again. The
// listener does not block: it is the agent's alone.
func unixSocket(flags int) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|flags, 0)
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{}); err != nil {
		closeFD(fd)
		return -1, fmt.Errorf("bind: %w", err)
	}
	return fd, nil
}

// newBatch connects to the listener. Nobody else does. A connection that waits there all the same
// is of a batch whose end could not be accepted, for want of a descriptor perhaps, and is not to
// become this one's.
func newBatch(listener int, name unix.Sockaddr) (c batch, err error) {
	if err = emptyQueue(listener); err != nil {
		return c, err
	}
	if c.fd, err = unixSocket(0); err != nil {
		return c, err
	}
	defer func() {
		if err != nil {
			closeFD(c.fd)
		}
	}()
	var st unix.Stat_t
	if err = unix.Fstat(c.fd, &st); err != nil {
		return c, err
	}
	c.inode = st.Ino
	own, err := unix.Getsockname(c.fd)
	if err != nil {
		return c, err
	}
	c.name = own.(*unix.SockaddrUnix)
	if err = unix.Connect(c.fd, name); err != nil {
		return c, err
	}
	var peer unix.Sockaddr
	if c.own, peer, err = unix.Accept4(listener, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK); err != nil {
		return c, err
	}
	// Nothing comes back from the container.
	if err = unix.Shutdown(c.own, unix.SHUT_RD); err == nil {
		err = unix.SetsockoptInt(c.own, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, batchBytes)
	}
	if at, ok := peer.(*unix.SockaddrUnix); err == nil && (!ok || at.Name != c.name.Name) {
		err = errors.New("another batch's connection")
	}
	if err != nil {
		closeFD(c.own)
	}
	return c, err
}

// emptyQueue closes the connections that wait at a listener that does not block.
func emptyQueue(listener int) error {
	for {
		fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		switch err {
		case nil:
			closeFD(fd)
		case unix.EAGAIN:
			return nil
		default:
			return err
		}
	}
}

// do runs f on the maker's thread and waits for it. It reports false if the agent ends.
func (m *batchMaker) do(ctx context.Context, f func(listener int, name unix.Sockaddr)) bool {
	done := make(chan struct{})
	select {
	case m.requests <- func(listener int, name unix.Sockaddr) { defer close(done); f(listener, name) }:
		<-done
		return true
	case <-ctx.Done():
		return false
	}
}

// get gives an empty batch, if there can be one.
func (m *batchMaker) get(ctx context.Context) (c batch, ok bool) {
	if !m.ready.Load() {
		return c, false
	}
	select {
	case c = <-m.spare:
		return c, true
	default:
	}
	err := trap.ErrAgentEnds
	m.do(ctx, func(listener int, name unix.Sockaddr) { c, err = newBatch(listener, name) })
	return c, err == nil
}

// held gives those of the batches that a program still holds. That one is hung up does not say so:
// shutdown() does that, too. But its name is taken as long as it is open.
func (m *batchMaker) held(ctx context.Context, hungUp []batch) (held []batch) {
	if !m.do(ctx, func(int, unix.Sockaddr) {
		for _, c := range hungUp {
			if nameTaken(c.name) {
				held = append(held, c)
				continue
			}
			closeFD(c.own)
		}
	}) {
		return hungUp
	}
	return held
}

// nameTaken reports whether a socket of the thread's network namespace has that name, or may have.
func nameTaken(name *unix.SockaddrUnix) bool {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return true
	}
	defer closeFD(fd)
	return unix.Bind(fd, name) != nil
}

// outstanding knows the batches that a listener's programs hold.
type outstanding struct {
	mu      sync.Mutex // guards the rest; held while the batches are looked at, which only the listener's readers wait for
	batches []batch
}

// room forgets the batches that were closed and reports whether the programs may have another one.
// Readers that ask at the same time may add one each.
func (s *outstanding) room(ctx context.Context, m *batchMaker) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.forget(ctx, m); err != nil {
		return false
	}
	return len(s.batches) < maxBatches || !model.ProtectBatches.On()
}

// forget forgets the batches that were closed. The caller holds mu.
func (s *outstanding) forget(ctx context.Context, m *batchMaker) error {
	if len(s.batches) == 0 {
		return nil
	}
	ends := make([]unix.PollFd, len(s.batches))
	for i, c := range s.batches {
		ends[i].Fd = int32(c.own)
	}
	_, err := unix.Poll(ends, 0)
	for err == unix.EINTR { // no reason to refuse
		_, err = unix.Poll(ends, 0)
	}
	if err != nil {
		return err
	}
	var open, hungUp []batch
	for i, c := range s.batches {
		// What the prefiller has still to look at counts, too: else its work would have no bound.
		if ends[i].Revents&unix.POLLHUP != 0 && c.done.Load() {
			hungUp = append(hungUp, c)
		} else {
			open = append(open, c)
		}
	}
	if len(hungUp) > 0 {
		open = append(open, m.held(ctx, hungUp)...)
	}
	s.batches = open
	return nil
}

// add notes a batch that the container gets. The outstanding closes the agent's end when the
// program has closed its own, which may be as soon as it has it.
func (s *outstanding) add(c batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.batches = append(s.batches, c)
}

func (s *outstanding) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.batches {
		closeFD(c.own)
	}
	s.batches = nil
}

// mayHaveBatches reports whether who started the listener's container said so.
func mayHaveBatches(l *trap.Listener) bool {
	return l.Annotation(model.AnnotationSocketPool) == "true"
}

// outstandingOf gives what a listener's programs hold.
func (h *Handler) outstandingOf(l *trap.Listener) *outstanding {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := h.outstanding[l]
	if out == nil {
		out = new(outstanding)
		h.outstanding[l] = out
	}
	return out
}

// countBatch counts a batch that a caller got, with so many sockets in it then; none is no batch.
func (h *Handler) countBatch(filled int) {
	if filled > 0 {
		h.batches.Add(1)
		h.batchSockets.Add(uint64(filled))
	}
}

// giveBatch answers a call with a batch that has a few sockets in it; the prefiller adds the rest.
// done is false if the caller gets a single socket instead: it may have no batch, or there is none.
func (h *Handler) giveBatch(c *trap.Call, req request, of *pools, want socketOptions, caller model.Caller) (done bool, err error) {
	if of.lingers.Load() || !mayHaveBatches(c.Listener()) && model.ProtectBatches.On() {
		return false, nil
	}
	out := h.outstandingOf(c.Listener())
	if !out.room(c.Context(), &h.maker) {
		return false, nil
	}
	want.nonblock = false // the program's own to set, on each
	p := &filling{pools: of, family: req.Family, want: want, left: req.batch}
	b, ok := h.emptyBatch(c.Context(), p)
	if !ok {
		return false, nil
	}
	filled, err := h.fillFirst(c, p, caller)
	if filled == 0 {
		b.close()
		closeFD(p.batch)
		switch {
		case errors.Is(err, model.ErrOtherNetns):
			return true, c.PassToOwnNetns()
		case errors.Is(err, model.ErrSocketQuota):
			return true, h.why.quota.Because(err)
		case errors.Is(err, model.ErrStackRefused):
			return true, h.why.stack.Because(err)
		}
		return false, nil // a single socket fails for the same reason, or does not
	}
	out.add(b)
	defer h.prefiller.startFilling(p, err == nil, c.YieldToCaller)
	if err := c.Give(trap.Descriptor{FD: b.fd, Inode: b.inode, CloseOnExec: true, Key: req.key(), Note: filled}); err != nil {
		return true, err
	}
	h.countBatch(filled)
	return true, nil
}

// emptyBatch gives a batch for p to be filled into.
func (h *Handler) emptyBatch(ctx context.Context, p *filling) (b batch, ok bool) {
	if b, ok = h.maker.get(ctx); !ok {
		return b, false
	}
	b.done = &p.done
	var err error
	if p.batch, err = unix.FcntlInt(uintptr(b.own), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		b.close()
		return b, false
	}
	return b, true
}

// fillFirst puts the sockets into a batch that its caller waits for. They are compared with the
// caller as single ones are.
func (h *Handler) fillFirst(c *trap.Call, p *filling, caller model.Caller) (filled int, err error) {
	pool := p.pools.of(p.family)
	defer h.prefiller.request(pool, needNow, nothing)
	// The thread is the reader's own, and keeps this.
	if err := becomeBatchUser(); err != nil {
		return 0, err
	}
	for filled < filledFirst && p.left > 0 {
		s, _, _, err := h.prefiller.take(pool, p.want)
		if err != nil {
			return filled, err
		}
		if err := h.admit(c, pool, &s, &p.want, caller); err != nil {
			if errors.Is(err, model.ErrOtherNetns) || errors.Is(err, model.ErrSocketQuota) {
				h.prefiller.giveBack(pool, s)
			} else {
				closeFD(s.fd)
			}
			return filled, err
		}
		if err := p.put(s); err != nil {
			return filled, err
		}
		filled++
	}
	return filled, nil
}
