package intercept

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/trap"
	"heddle.dev/heddle/internal/trap/task"
)

// socketOptions are what a caller wants of a socket and the agent can give it before it is
// injected.
type socketOptions struct {
	own      task.Owner
	nonblock bool
	mptcp    bool
}

// socket is a tagged TCP socket nobody has yet. It belongs to whoever holds the value: the
// answering thread, the prefiller or a pool.
type socket struct {
	fd    int
	inode uint64
	has   socketOptions
}

// apply gives the socket the options a caller wants: no system call if it has them already.
func (s *socket) apply(m SocketMaker, id model.EndpointID, want socketOptions) error {
	if s.has.own != want.own && model.ProtectUser.On() {
		// SO_REUSEPORT groups and sk_uid (firewall rules, ss) go by the socket's owner.
		if err := unix.Fchown(s.fd, int(want.own.UID), int(want.own.GID)); err != nil {
			return fmt.Errorf("give socket to %d:%d: %w", want.own.UID, want.own.GID, err)
		}
		s.has.own = want.own
	}
	if s.has.mptcp != want.mptcp {
		if err := m.SetMPTCP(s.fd, id, want.mptcp); err != nil {
			return err
		}
		s.has.mptcp = want.mptcp
	}
	if s.has.nonblock != want.nonblock {
		flags := 0
		if want.nonblock {
			flags = unix.O_NONBLOCK
		}
		// A new socket has no other status flag, so there is nothing to read first.
		if _, err := unix.FcntlInt(uintptr(s.fd), unix.F_SETFL, flags); err != nil {
			return fmt.Errorf("set O_NONBLOCK: %w", err)
		}
		s.has.nonblock = want.nonblock
	}
	return nil
}

// pools are the ready sockets of one endpoint.
type pools struct {
	endpoint   *trap.Endpoint
	lastFilled uint64      // when one of its batches was filled last (prefiller.turns); the prefiller's own
	lingers    atomic.Bool // a program of it kept the prefiller waiting: it gets no more batches
	v4, v6     socketPool
}

func newPools(ep *trap.Endpoint) *pools {
	first := socketOptions{own: task.Self()} // as a socket is made, until a caller has shown what it wants
	return &pools{
		endpoint: ep,
		v4:       socketPool{endpoint: ep.ID, family: unix.AF_INET, want: first},
		v6:       socketPool{endpoint: ep.ID, family: unix.AF_INET6, want: first},
	}
}

// of gives those of a family.
func (p *pools) of(family int) *socketPool {
	if family == unix.AF_INET6 {
		return &p.v6
	}
	return &p.v4
}

// socketPool holds the ready sockets of one endpoint and family. It owns them: the threads that
// answer take them out, only the prefiller (and an answer nobody waited for) puts them in, and
// prefiller.drop closes what is left when the endpoint's last listener ends or the endpoint is
// forgotten.
type socketPool struct {
	endpoint model.EndpointID
	family   int
	queued   atomic.Bool // on the prefiller's queue; keeps it there once
	asked    time.Time   // when it was filled last; the prefiller's own

	mu     sync.Mutex // guards the rest; never held across a system call
	ready  []socket
	limit  int           // how many it was to have when it was filled last
	used   bool          // somebody took one, or wanted to
	want   socketOptions // of the latest caller: the prefiller's guess for the next
	closed bool
}

// isUsed reports whether somebody took a socket, or wanted to.
func (p *socketPool) isUsed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used
}

// isClosed reports whether the pool is empty for good.
func (p *socketPool) isClosed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed
}

// lastOwner is the owner that the latest caller had: the guess for the next.
func (p *socketPool) lastOwner() task.Owner {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.want.own
}

// learn notes what the latest caller wanted after all.
func (p *socketPool) learn(want socketOptions) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.want = want
}

// take removes a ready socket and reports how many are left, of how many. The newest first: its
// memory is warmest.
func (p *socketPool) take(want socketOptions) (s socket, left, limit int, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.want, p.used = want, true
	n := len(p.ready)
	if n == 0 {
		return socket{}, 0, p.limit, false
	}
	s = p.ready[n-1]
	p.ready = p.ready[:n-1]
	return s, n - 1, p.limit, true
}

// giveUp removes the sockets beyond so many, the oldest first.
func (p *socketPool) giveUp(keeps int) []socket {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.ready) - keeps
	if n <= 0 {
		return nil
	}
	given := slices.Clone(p.ready[:n])
	p.ready, p.limit = slices.Delete(p.ready, 0, n), keeps
	return given
}

// put adds a ready socket. It reports false, and the caller keeps the socket, if the pool holds
// limit sockets or is closed.
func (p *socketPool) put(s socket, limit int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.ready) >= limit {
		return false
	}
	p.ready = append(p.ready, s)
	return true
}

// shortfall notes how many sockets the pool is to have, and reports how many are missing and what
// the next caller will probably want.
func (p *socketPool) shortfall(limit int) (int, socketOptions) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return 0, socketOptions{}
	}
	p.limit = limit
	return limit - len(p.ready), p.want
}

// close empties the pool for good and returns what was in it.
func (p *socketPool) close() []socket {
	p.mu.Lock()
	defer p.mu.Unlock()
	left := p.ready
	p.ready, p.closed = nil, true
	return left
}

func makeSocket(m SocketMaker, id model.EndpointID, family int) (socket, error) {
	fd, err := m.MakeSocket(id, family)
	if err != nil {
		return socket{}, fmt.Errorf("%w: %w", errMake, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		closeFD(fd)
		return socket{}, fmt.Errorf("%w: %w", errMake, err)
	}
	return socket{fd: fd, inode: st.Ino, has: socketOptions{own: task.Owner{UID: st.Uid, GID: st.Gid}}}, nil
}
