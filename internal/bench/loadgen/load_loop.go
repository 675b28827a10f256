package loadgen

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/bench/histogram"
)

// loop drives some connections on one thread. Only the goroutine in run uses it until that has
// returned.
type loop struct {
	settings
	number    int        // of the loop
	exchanges []exchange // one for each connection

	to          netip.AddrPort
	epoll       int
	connections []connection
	made        int // connections
	start       time.Time
	now         time.Duration // since start
	latency     map[string]*histogram.Histogram
	operations  int
	unfinished  int
	buffer      []byte // received
	out         []byte // sent
}

// connection is one of a loop's connections. Times are since the loop's start.
type connection struct {
	exchange
	fd   int
	busy bool          // an operation is under way
	kind string        // its kind
	from time.Duration // what its latency counts from
	due  time.Duration // of the next operation, at a fixed rate
}

// receiveBuffer is how much a loop takes from a connection at once.
const receiveBuffer = 256 << 10

// open connects; the caller closes.
func (l *loop) open(to netip.AddrPort) (err error) {
	l.epoll = -1
	l.buffer, l.out = make([]byte, receiveBuffer), make([]byte, 0, maxSize+1024)
	l.latency = make(map[string]*histogram.Histogram)
	if l.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("make epoll: %w", err)
	}
	l.to = to
	for i, e := range l.exchanges {
		l.connections = append(l.connections, connection{exchange: e, fd: -1})
		if err := l.connect(i); err != nil {
			return fmt.Errorf("connection %d: %w", i, err)
		}
	}
	return nil
}

// connect gives connection i a socket, in the place of the one it has. It waits for the server, as
// a client does that has to connect before it can go on.
func (l *loop) connect(i int) (err error) {
	c := &l.connections[i]
	if c.fd >= 0 {
		if err := rawClose(c.fd); err != nil {
			return fmt.Errorf("close: %w", err)
		}
	}
	if c.fd, err = dial(sockaddr(l.to)); err != nil {
		return err
	}
	l.made++
	if err := unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
		return fmt.Errorf("set TCP_NODELAY: %w", err)
	}
	if err := unix.SetNonblock(c.fd, true); err != nil {
		return fmt.Errorf("make connection non-blocking: %w", err)
	}
	event := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(i)}
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, c.fd, &event); err != nil {
		return fmt.Errorf("watch connection: %w", err)
	}
	return nil
}

func (l *loop) close() error {
	var errs []error
	for _, c := range l.connections {
		if c.fd >= 0 {
			errs = append(errs, abort(c.fd))
		}
	}
	if l.epoll >= 0 {
		errs = append(errs, unix.Close(l.epoll))
	}
	return errors.Join(errs...)
}

// interval is the time between two operations of one connection at a fixed rate, 0 without one.
func (l *loop) interval() time.Duration {
	if l.rate <= 0 {
		return 0
	}
	return time.Duration(float64(l.settings.connections) / l.rate * float64(time.Second))
}

// run makes operations from start on, through the warm-up and the measured phase.
func (l *loop) run(start time.Time) error {
	if err := pin(anyCPU); err != nil {
		return err
	}
	// Waits end when they are due, not up to 50 us later. It concerns this thread alone, which ends
	// with the loop.
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set timer slack: %w", err)
	}
	l.start = start
	interval, end := l.interval(), l.warmUp+l.duration
	for i := range l.connections {
		// Connections take turns: number i of this loop is number i*threads+number of all.
		l.connections[i].due = interval * time.Duration(i*l.threads+l.number) / time.Duration(l.settings.connections)
	}
	events := make([]unix.EpollEvent, 64)
	for {
		l.now = time.Since(l.start)
		if l.now >= end {
			break
		}
		next, err := l.begin(interval)
		if err != nil {
			return err
		}
		n, err := epollWait(l.epoll, events, min(next, end)-l.now)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("wait for connections: %w", err)
		}
		for _, event := range events[:n] {
			if err := l.receive(int(event.Fd), end); err != nil {
				return err
			}
		}
	}
	for _, c := range l.connections {
		for due := c.due; interval > 0 && due < end; due += interval {
			l.unfinished++
		}
		if interval > 0 && c.busy && c.from < end {
			l.unfinished++
		}
	}
	return nil
}

// begin starts what is due, and gives when the next operation will be. Without a schedule
// everything is due at once, and what comes next begins when an operation ends: there is nothing to
// wait for but answers.
func (l *loop) begin(interval time.Duration) (next time.Duration, err error) {
	next = 1<<63 - 1
	for i := range l.connections {
		c := &l.connections[i]
		if c.busy {
			continue
		}
		if interval > 0 && c.due > l.now {
			next = min(next, c.due)
			continue
		}
		if err := l.send(c, interval); err != nil {
			return 0, err
		}
	}
	return next, nil
}

// send starts an operation on c.
func (l *loop) send(c *connection, interval time.Duration) error {
	c.from = time.Since(l.start)
	if interval > 0 {
		c.from = c.due
		c.due += interval
	}
	l.out, c.kind = c.request(l.out[:0])
	c.busy = true
	// Requests are small and nothing else is under way, so there is room.
	n, err := rawWrite(c.fd, l.out)
	if err != nil || n != len(l.out) {
		return fmt.Errorf("send %s: %d of %d bytes: %w", c.kind, n, len(l.out), errOrShort(err))
	}
	return nil
}

func errOrShort(err error) error {
	if err == nil {
		return io.ErrShortWrite
	}
	return err
}

// receive takes what connection i has got, and counts its operation if that is the end of it.
func (l *loop) receive(i int, end time.Duration) error {
	c := &l.connections[i]
	n, err := rawRead(c.fd, l.buffer)
	if err == unix.EAGAIN || err == unix.EINTR {
		return nil
	}
	if err != nil {
		return fmt.Errorf("receive: %w", err)
	}
	if n == 0 {
		return fmt.Errorf("receive: %w", io.ErrUnexpectedEOF)
	}
	if !c.busy {
		return fmt.Errorf("receive: %d bytes that nobody asked for", n)
	}
	done, err := c.feed(l.buffer[:n])
	if err != nil || !done {
		return err
	}
	c.busy = false
	at := time.Since(l.start)
	if at >= l.warmUp && at < end {
		h := l.latency[c.kind]
		if h == nil {
			h = &histogram.Histogram{}
			l.latency[c.kind] = h
		}
		h.Add(at - c.from)
		l.operations++
	}
	if c.closing() {
		return l.connect(i)
	}
	return nil
}

// addTo adds what the loop measured.
func (l *loop) addTo(r *Load) {
	r.Operations += l.operations
	r.Unfinished += l.unfinished
	r.Connections += l.made
	for kind, h := range l.latency {
		if r.Latency[kind] == nil {
			r.Latency[kind] = &histogram.Histogram{}
		}
		r.Latency[kind].Merge(h)
	}
	for _, c := range l.connections {
		r.Hits += c.hits()
	}
}

// epollWait waits at most timeout, to the nanosecond.
func epollWait(epoll int, events []unix.EpollEvent, timeout time.Duration) (int, error) {
	t := unix.NsecToTimespec(max(int64(timeout), 0))
	n, _, e := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT2, uintptr(epoll), uintptr(unsafe.Pointer(&events[0])),
		uintptr(len(events)), uintptr(unsafe.Pointer(&t)), 0, 0)
	return int(n), rawErr(e)
}
