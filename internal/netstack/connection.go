package netstack

import (
	"io"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

const (
	// orphan is for how long a connection without a program waits for the peer's FIN: Linux's
	// tcp_fin_timeout.
	orphan = 60 * time.Second
	// turnBytes is how much a connection moves before others of its tenant have their turns.
	turnBytes = 1 << 20
	// refill is how soon one that waits for the tenant's rates looks again.
	refill = 2 * time.Millisecond
)

// phase is how far a connection is.
type phase int

const (
	connecting phase = iota // CONNECT is to be answered
	arriving                // a listener's SYN came
	open
	waits // the program has been told that it is over; TIME-WAIT
	over
)

// Orders to a connection's goroutine, of the agent's.
const (
	orderClose = 1 << iota
	orderAbort
)

// connection is netstack's endpoint on one side, the program's pair on the other. Its goroutine
// (serve) moves what there is to move.
type connection struct {
	t             *tenant
	id, listener  uint64
	local, remote netip.AddrPort
	reserved      uint64
	began         time.Time
	queue         waiter.Queue
	entry         waiter.Entry
	kick          chan struct{} // something has happened
	ended         chan struct{} // closed when its program has been told that it is over
	pair          int           // the module's end, or -1

	// Guarded by tenant.mu.
	phase   phase
	ep      tcpip.Endpoint // nil while a handshake of a peer's is not over
	options protocol.Options
	program int  // the program's end until the agent has it, or -1
	taken   bool // it is not, or no longer, in a listener's backlog: a program has it, or will
	evicted bool

	orders atomic.Int32
	// Bytes from the program, to it, and of the former those that the peer has acknowledged.
	pulled, pushed, acked atomic.Uint64
	lastAck               atomic.Uint32
	opened                atomic.Bool // lastAck is there

	// What follows is the goroutine's.
	other    otherEnd
	guard    bool
	deaf     bool // the program reads no more
	eof      bool // the peer has sent FIN, and the program has all before it
	shown    bool // and knows it
	finished bool // FIN was asked for
	failed   bool // with errno, which may be 0
	errno    unix.Errno
}

func (t *tenant) newConnection(id, listener uint64, o protocol.Options, p phase) *connection {
	c := &connection{
		t: t, id: id, listener: listener, options: o, phase: p, began: time.Now(), kick: make(chan struct{}, 1), ended: make(chan struct{}),
		pair: -1, program: -1, taken: true,
	}
	c.entry = waiter.NewFunctionEntry(waiter.EventIn|waiter.EventOut|waiter.EventErr|waiter.EventHUp|waiter.EventRdHUp, func(waiter.EventMask) { c.wake() })
	return c
}

// wake has the connection have a turn.
func (c *connection) wake() {
	select {
	case c.kick <- struct{}{}:
	default: // it will have one
	}
}

// saw notes what the peer acknowledges. netstack keeps to itself how much that is.
func (c *connection) saw(ack uint32) {
	if !c.opened.Load() {
		return
	}
	last := c.lastAck.Load()
	if n := int32(ack - last); n > 0 && c.lastAck.CompareAndSwap(last, ack) {
		c.acked.Add(uint64(n))
	}
}

// sent gives the bytes that were acknowledged: neither FIN, nor what was never sent.
func (c *connection) sent() uint64 {
	if pulled := c.pulled.Load(); !c.opened.Load() || c.acked.Load() > pulled {
		return pulled // it is the tenant's own, by no device
	}
	return c.acked.Load()
}

func (c *connection) state() tcp.EndpointState { return tcp.EndpointState(c.ep.State()) }

func isConnected(s tcp.EndpointState) bool {
	switch s {
	case tcp.StateEstablished, tcp.StateFinWait1, tcp.StateFinWait2, tcp.StateTimeWait, tcp.StateCloseWait, tcp.StateLastAck, tcp.StateClosing:
		return true
	}
	return false
}

// connect has netstack connect, answers the agent, and serves the connection.
func (c *connection) connect(asked protocol.Head, skip uint32) {
	errno := c.establish()
	if errno != 0 {
		c.t.watcher.remove(c.pair)
		c.t.forget(c, func() {
			c.t.done.Failed++
			c.t.agent.send(plain(asked, errno), c.pair)
		})
		c.ep.Close()
		return
	}
	for left := int(skip) - 1; left > 0; {
		var rest [4096]byte
		n := readPair(c.pair, rest[:min(left, len(rest))])
		if n == 0 {
			break
		}
		left -= n
	}
	c.guard = waiting(c.pair) > 0
	c.t.mu.Lock()
	c.phase = open
	c.t.done.Connected++
	c.t.agent.send(protocol.Append(nil, &protocol.Named{Head: answerTo(asked, nil), Local: addressOf(c.local)}), -1)
	c.t.mu.Unlock()
	c.serve()
}

// establish waits for a handshake to be over.
func (c *connection) establish() unix.Errno {
	c.queue.EventRegister(&c.entry)
	patience := min(connectTimeout, time.Duration(c.options.UserTimeout)*time.Millisecond)
	timer := time.NewTimer(patience)
	defer timer.Stop()
	err := c.ep.Connect(tcpip.FullAddress{Addr: toAddress(c.remote.Addr()), Port: c.remote.Port()})
	if _, started := err.(*tcpip.ErrConnectStarted); err != nil && !started {
		return errnoOf(err)
	}
	for {
		switch s := c.state(); {
		case isConnected(s):
			return 0
		case s == tcp.StateError || s == tcp.StateClose:
			if err := c.ep.LastError(); err != nil {
				return errnoOf(err)
			}
			return unix.ECONNREFUSED
		case c.orders.Load() != 0 || lookAt(c.pair).gone:
			c.ep.Abort()
			return unix.ECONNABORTED
		}
		select {
		case <-c.kick:
		case <-timer.C:
			c.ep.Abort()
			return unix.ETIMEDOUT
		}
	}
}

// serve lets the program and the peer have their way until the connection is over.
func (c *connection) serve() {
	timer := time.NewTimer(orphan)
	defer timer.Stop()
	var lost time.Time // since when nobody waits for the peer's FIN
	for {
		c.t.gate()
		more, throttled := c.turn()
		if errno, is := c.isOver(); is {
			c.end(errno)
			return
		}
		wait := time.Hour
		switch {
		case more:
			c.wake()
		case throttled:
			wait = refill
		}
		if c.other.gone && c.state() == tcp.StateFinWait2 {
			if lost.IsZero() {
				lost = time.Now()
			}
			if wait = min(wait, orphan-time.Since(lost)); wait <= 0 {
				c.abort(unix.ETIMEDOUT)
				c.wake()
			}
		}
		timer.Reset(max(wait, 0))
		select {
		case <-c.kick:
		case <-timer.C:
		}
	}
}

// turn moves what there is to move. It says whether there is more, and whether there would be but
// for the tenant's rates.
func (c *connection) turn() (more, throttled bool) {
	switch orders := c.orders.Swap(0); {
	case orders&orderAbort != 0:
		c.abort(unix.ECONNABORTED)
	case orders&orderClose != 0:
		c.finish()
	}
	c.other = lookAt(c.pair)
	budget := turnBytes
	throttled = c.push(&budget)
	if c.eof && !c.shown {
		c.shown = true
		_ = unix.Shutdown(c.pair, unix.SHUT_WR) // the other end may be gone, which is as good
	}
	// Before the rest is sent, and FIN behind it: the peer would read that as an end in order.
	if c.other.gone && (c.other.unread || c.options.Linger == 0 || c.unread() > 0) {
		c.abort(0)
		return false, false
	}
	throttled = c.pull(&budget) || throttled
	return budget <= 0, throttled
}

// unread counts the bytes that the program has not got yet.
func (c *connection) unread() int {
	n, err := c.ep.GetSockOptInt(tcpip.ReceiveQueueSizeOption)
	if err != nil {
		return 0
	}
	return n
}

// push gives the program what has come. It says whether the tenant's rate is in the way.
func (c *connection) push(budget *int) (throttled bool) {
	for *budget > 0 && !c.eof && !(c.other.gone && !c.deaf) {
		r := reader{fd: c.pair, left: *budget}
		var to io.Writer = &r
		if c.deaf {
			to = io.Discard
		} else if r.left = c.t.receive.reserve(time.Now(), r.left); r.left == 0 {
			return true // also of an end that has come, which Read would tell
		}
		room := r.left
		got, err := c.ep.Read(to, tcpip.ReadOptions{})
		if !c.deaf {
			c.t.receive.take(-r.left)
		}
		if err != nil {
			if _, nothing := err.(*tcpip.ErrBadBuffer); !nothing {
				c.cannotRead(err)
				return false
			}
		}
		if c.deaf {
			*budget -= max(got.Count, 1)
		} else {
			*budget -= room - r.left
		}
		c.pushed.Add(uint64(got.Count))
		if r.deaf {
			if c.deaf, c.other = true, lookAt(c.pair); c.other.gone {
				return false // turn answers it by RST
			}
		}
		if r.full {
			return false
		}
	}
	return false
}

// cannotRead notes why netstack has nothing to read.
func (c *connection) cannotRead(err tcpip.Error) {
	switch err.(type) {
	case *tcpip.ErrWouldBlock:
	case *tcpip.ErrClosedForReceive:
		switch c.state() {
		case tcp.StateError:
			c.fail(c.ep.LastError())
		case tcp.StateClose:
			if err := c.ep.LastError(); err != nil {
				c.fail(err)
			}
		}
		c.eof = !c.failed
	default:
		c.fail(err)
	}
}

// pull sends on what the program wrote, and its FIN. The last byte stays in the pair. It says
// whether the tenant's rate is in the way.
func (c *connection) pull(budget *int) (throttled bool) {
	for *budget > 0 && !c.finished && !c.failed {
		p := program{fd: c.pair, guard: c.guard, fresh: waiting(c.pair)}
		if c.guard {
			p.fresh--
		}
		if p.fresh <= 0 {
			break
		}
		if p.want = c.t.send.reserve(time.Now(), min(p.fresh, *budget)); p.want == 0 {
			return true
		}
		reserved := p.want
		n, err := c.ep.Write(&p, tcpip.WriteOptions{})
		c.t.send.take(int(n) - reserved)
		c.guard = p.guard
		c.pulled.Add(uint64(n))
		*budget -= int(n)
		switch err.(type) {
		case nil:
		case *tcpip.ErrWouldBlock:
			return false
		case *tcpip.ErrBadBuffer: // what is counted cannot be read
			return false
		case *tcpip.ErrClosedForSend:
			if c.state() == tcp.StateError {
				c.fail(c.ep.LastError())
			}
			return false
		default:
			c.fail(err)
			return false
		}
		if n == 0 {
			return false
		}
	}
	// What was written before the end is there once the end is.
	if c.other.silent && *budget > 0 && isConnected(c.state()) {
		left := waiting(c.pair)
		if left == 0 || left == 1 && c.guard {
			c.finish()
		}
	}
	return false
}

// finish has netstack send FIN after the data.
func (c *connection) finish() {
	if !c.finished {
		c.finished = true
		_ = c.ep.Shutdown(tcpip.ShutdownWrite) // it is closed already, which isOver sees
	}
}

// fail notes as what the connection ends.
func (c *connection) fail(err tcpip.Error) {
	if c.failed {
		return
	}
	c.failed = true
	if c.errno = errnoOf(err); err == nil || c.errno == unix.ECONNABORTED {
		c.errno = unix.ECONNRESET // we have aborted nothing
	}
}

// abort ends it by RST.
func (c *connection) abort(errno unix.Errno) {
	if c.failed || c.state() == tcp.StateTimeWait {
		return
	}
	c.failed, c.errno = true, errno
	c.ep.Abort()
}

// isOver reports whether it is over and the program has everything, and what it is to be told.
func (c *connection) isOver() (unix.Errno, bool) {
	s := c.state()
	if s != tcp.StateError && s != tcp.StateClose && s != tcp.StateTimeWait {
		return 0, false
	}
	if c.unread() > 0 && !c.deaf && !c.other.gone && !(c.failed && c.errno == unix.ECONNABORTED) {
		return 0, false
	}
	if s == tcp.StateTimeWait {
		return 0, true
	}
	if err := c.ep.LastError(); err != nil || s == tcp.StateError {
		c.fail(err)
	}
	return c.errno, true
}

// end tells the agent, then the program. In TIME-WAIT the endpoint lives on without them.
func (c *connection) end(errno unix.Errno) {
	if errno == 0 {
		var rest [4096]byte // with nothing unread the other end sees no reset
		for range 4096 {    // not what it goes on writing meanwhile
			if readPair(c.pair, rest[:]) == 0 {
				break
			}
		}
	}
	t := c.t
	t.watcher.remove(c.pair)
	t.ended(c, errno)
	closeFD(c.pair)
	if c.ep.Close(); c.state() != tcp.StateTimeWait {
		t.forget(c, nil)
		return
	}
	timer := time.NewTimer(timeWait)
	defer timer.Stop()
	for c.state() == tcp.StateTimeWait {
		select {
		case <-c.kick:
			if c.orders.Load() != 0 {
				c.ep.Abort()
			}
		case <-timer.C:
			timer.Reset(time.Second) // what the peer has sent again has prolonged it
		}
	}
	t.forget(c, nil)
}

// errnoOf gives what Linux calls an error of netstack's.
func errnoOf(err tcpip.Error) unix.Errno {
	switch err.(type) {
	case nil:
		return 0
	case *tcpip.ErrConnectionRefused:
		return unix.ECONNREFUSED
	case *tcpip.ErrConnectionReset:
		return unix.ECONNRESET
	case *tcpip.ErrConnectionAborted, *tcpip.ErrAborted:
		return unix.ECONNABORTED
	case *tcpip.ErrTimeout:
		return unix.ETIMEDOUT
	case *tcpip.ErrNetworkUnreachable, *tcpip.ErrHostUnreachable, *tcpip.ErrHostDown:
		return unix.ENETUNREACH
	case *tcpip.ErrBadLocalAddress, *tcpip.ErrPortInUse, *tcpip.ErrDuplicateAddress:
		return unix.EADDRNOTAVAIL
	case *tcpip.ErrNoBufferSpace:
		return unix.ENOBUFS
	}
	return unix.EIO
}
