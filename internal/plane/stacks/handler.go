package stacks

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/module"
	"heddle.dev/heddle/internal/plane/stacks/socket"
	"heddle.dev/heddle/internal/trap"
)

// handler answers the trapped calls of tenants: socket() by one end of a pair, and the others by
// what the plane and the module know of that socket.
type handler struct{ p *Plane }

var _ interface {
	trap.EndpointHandler
	trap.ListenerHandler
} = (*handler)(nil)

// answers are the calls of a socket that are answered, by number.
var answers = map[int32]func(*call){
	unix.SYS_BIND:        (*call).bind,
	unix.SYS_LISTEN:      (*call).listen,
	unix.SYS_CONNECT:     (*call).connect,
	unix.SYS_ACCEPT:      (*call).accept,
	unix.SYS_ACCEPT4:     (*call).accept,
	unix.SYS_GETSOCKNAME: (*call).getsockname,
	unix.SYS_GETPEERNAME: (*call).getpeername,
	unix.SYS_SHUTDOWN:    (*call).shutdown,
	unix.SYS_SETSOCKOPT:  (*call).setsockopt,
	unix.SYS_GETSOCKOPT:  (*call).getsockopt,
}

// Owns implements trap.Handler.
func (h *handler) Owns(d *trap.Data) bool {
	return d.Arch == trap.NativeArch && (d.Nr == unix.SYS_SOCKET || answers[d.Nr] != nil)
}

// Reasons implements trap.Handler.
func (h *handler) Reasons() []*trap.Reason { return h.p.why.all() }

// Bound implements trap.EndpointHandler: what there is of an endpoint begins with its Attach.
func (h *handler) Bound(*trap.Endpoint) {}

// Released implements trap.EndpointHandler.
func (h *handler) Released(*trap.Endpoint) {}

// Annotations implements trap.ListenerHandler: heddle-runtime traps the calls of sockets in
// containers with this one, and in no others.
func (h *handler) Annotations() []string { return []string{model.AnnotationStack} }

// Opened implements trap.ListenerHandler.
func (h *handler) Opened(*trap.Listener) {}

// Closed implements trap.ListenerHandler.
func (h *handler) Closed(*trap.Listener) {}

// Answer answers a call of a tenant's. Those of sockets that are not of the plane go on.
func (h *handler) Answer(c *trap.Call) error {
	t := h.p.tenantOf(c.Endpoint.ID)
	if t == nil {
		return c.Next()
	}
	d := c.Data()
	if d.Nr == unix.SYS_SOCKET {
		return h.socket(c, t)
	}
	fd, found, err := h.p.proc.Take(c.Thread(), int(int32(d.Args[0])))
	if err != nil {
		return h.p.why.failed.Because(err)
	}
	if !found {
		return c.Next() // the kernel says why not
	}
	raw, ours, err := h.p.cfg.StackModules.Note(fd)
	n := socket.ParseNote(raw)
	if err != nil || !ours || !t.owns(&n) {
		closeFD(fd)
		if err != nil {
			return h.p.why.failed.Because(err)
		}
		return c.Next()
	}
	if d.Nr == unix.SYS_SHUTDOWN && n.State == socket.Connected && n.Flags&socket.Told != 0 {
		closeFD(fd)
		return c.Next() // the pair does it, and the module sees that
	}
	// From here on what was taken is known to be the caller's: it has been waiting all the time.
	if err := c.StillWaits(); err != nil {
		closeFD(fd)
		return err
	}
	// By a goroutine of its own: it may wait for a peer, and for the caller's memory.
	on := &call{p: h.p, t: t, fd: fd, Deferred: c.Defer()}
	go on.answer()
	return nil
}

// answer answers the call.
func (c *call) answer() {
	defer c.leaveFile()
	t, err := c.p.startCall(c.t)
	if err != nil {
		c.end(0, err)
		return
	}
	defer t.endCall()
	c.t = t
	answers[c.Data().Nr](c)
}

// leaveFile closes the program's end, unless that is done.
func (c *call) leaveFile() {
	if c.fd >= 0 {
		closeFD(c.fd)
	}
	c.fd = -1
}

// key tells a request from others, of other planes' too; it is never 0.
func key(s trap.TCPSocket) uint64 { return 1<<33 | s.Key() }

// socket gives the caller what becomes the program's end of a pair.
func (h *handler) socket(c *trap.Call, t *tenant) error {
	w, ok := trap.ParseTCPSocket(c.Data())
	if !ok {
		return c.Next()
	}
	if _, done := c.Redeliver(key(w)); done {
		return nil
	}
	if other, err := c.InOtherNetns(); err != nil {
		return err
	} else if other {
		return c.PassToOwnNetns()
	}
	if !t.active.Load() {
		return c.Next() // its profile says otherwise by now
	}
	if c.Listener().Annotation(model.AnnotationStack) != "true" {
		h.p.why.untrapped.Add()
		return c.Next()
	}
	var made socket.Pair
	select {
	case made = <-h.p.pairs.Ready:
	case <-time.After(module.Answers):
		return h.p.why.failed.Because(errors.New("no socket pair is made"))
	case <-c.Context().Done():
		return trap.ErrAgentEnds
	}
	n := socket.Note{Tenant: t.number(), Generation: t.generation(), State: socket.Fresh, Family: uint32(w.Family)}
	if w.MPTCP {
		n.Flags |= socket.MPTCP
	}
	err := h.p.cfg.StackModules.SetNote(made.Program, n.Bytes())
	if err == nil && w.Nonblock {
		err = unix.SetNonblock(made.Program, true)
	}
	if err != nil {
		closeFD(made.Program)
		return h.p.why.failed.Because(fmt.Errorf("make a socket: %w", err))
	}
	return c.Give(trap.Descriptor{FD: made.Program, Inode: made.Inode, CloseOnExec: w.CloseOnExec, Key: key(w)})
}

// call is a call of a socket of a tenant's.
type call struct {
	*trap.Deferred
	p  *Plane
	t  *tenant
	fd int // the program's end
	n  socket.Note
}

// waitStep is how often a call that waits for its turn looks whether its caller still waits.
const waitStep = time.Second

// acquire takes a place in turns, which may be held by a call that waits for its program. A caller
// that is killed meanwhile leaves nothing behind.
func (c *call) acquire(turns chan struct{}) error {
	for {
		select {
		case turns <- struct{}{}:
			return nil
		case <-c.p.ctx.Done():
			return trap.ErrAgentEnds
		case <-time.After(waitStep):
			if err := c.StillWaits(); err != nil {
				return err
			}
		}
	}
}

// mayBlock runs what can wait for the program in the kernel: for memory of it that does not come
// (userfaultfd), or for a read of its own of the same socket. Each that does has a thread of the
// agent's, which ends with 10,000, so that a tenant may have few.
func (c *call) mayBlock(f func() error) error {
	if err := c.acquire(c.t.blocking); err != nil {
		return err
	}
	defer func() { <-c.t.blocking }()
	return f()
}

// lock keeps other calls from the socket, and reads what is noted of it.
func (c *call) lock() (unlock func(), ok bool) {
	turns, err := c.enter()
	if err != nil {
		c.end(0, err)
		return nil, false
	}
	return func() { <-turns }, true
}

// locked runs f as lock does, and leaves it to its caller to answer.
func (c *call) locked(f func() error) error {
	turns, err := c.enter()
	if err != nil {
		return err
	}
	defer func() { <-turns }()
	return f()
}

func (c *call) enter() (turns chan struct{}, err error) {
	cookie, err := unix.GetsockoptUint64(c.fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return nil, c.p.why.failed.Because(err)
	}
	turns = c.t.sockets[cookie%uint64(len(c.t.sockets))]
	if err := c.acquire(turns); err != nil {
		return nil, err
	}
	raw, _, err := c.p.cfg.StackModules.Note(c.fd)
	if err != nil {
		<-turns
		return nil, c.p.why.failed.Because(err)
	}
	c.n = socket.ParseNote(raw)
	return turns, nil
}

// write notes what is known of the socket.
func (c *call) write() {
	if err := c.p.cfg.StackModules.SetNote(c.fd, c.n.Bytes()); err != nil {
		c.p.cfg.Log.Error("a socket is not known any more", "endpoint", c.t.Name, "err", err)
	}
}

// end answers the call: by value, or by the errno of err, which may be one already. The socket's
// file is left before: else what the program closes next would stay open, and its epoll would tell
// it of that.
func (c *call) end(value int, err error) {
	c.leaveFile()
	var errno unix.Errno
	var failure *trap.Failure
	switch {
	case err == nil:
		_ = c.Return(value) // fails if the caller has gone
	case errors.Is(err, trap.ErrAgentEnds): // it is the next agent's
	case errors.As(err, &failure):
		c.Fail(err) // the caller has gone, for one
	case errors.Is(err, socket.ErrQueue):
		c.Fail(c.p.why.queue.Because(err))
	case errors.Is(err, module.ErrNone):
		c.Fail(c.p.why.refused.Because(err))
	case errors.Is(err, process.ErrGone):
		c.Fail(c.p.why.ended.Because(err))
	case errors.As(err, &errno):
		_ = c.Refuse(errno)
	default:
		c.Fail(c.p.why.failed.Because(err))
	}
}

// nonblocking reports whether the program has the socket so.
func (c *call) nonblocking() bool {
	flags, err := unix.FcntlInt(uintptr(c.fd), unix.F_GETFL, 0)
	return err == nil && flags&unix.O_NONBLOCK != 0
}

// giveConnection has the call return a descriptor: the one that the program has if this call is
// one that was interrupted, and made again. left is the agent's, as after Give; -1: nothing is.
func (c *call) giveConnection(n socket.Note, fd int, inode uint64, closeOnExec bool) (left int, err error) {
	c.leaveFile() // as end does
	c.t.awaitOffers()
	exec := uint32(1)
	if closeOnExec {
		exec = 0
	}
	before := trap.Left{FD: -1, Number: -1}
	if n.Exec == exec {
		before.Number = int(n.Number) - 1
	}
	after, err := c.GiveAgain(before, trap.Descriptor{FD: fd, Inode: inode, CloseOnExec: closeOnExec})
	if err == nil || after.FD < 0 || after.Number < 0 {
		return after.FD, err
	}
	n.Number, n.Exec = uint32(after.Number)+1, exec
	if failed := c.p.cfg.StackModules.SetNote(after.FD, n.Bytes()); failed != nil {
		c.p.cfg.Log.Debug("a program has a connection twice", "endpoint", c.t.Name, "err", failed)
	}
	return after.FD, err
}

// closeFD closes a descriptor of ours: the number is always free then.
func closeFD(fd int) { _ = unix.Close(fd) }
