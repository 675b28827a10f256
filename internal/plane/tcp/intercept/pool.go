package intercept

import (
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// socketOptions are what a caller wants of a socket and the agent can give it before it is injected.
type socketOptions struct {
	own      owner
	nonblock bool
	mptcp    bool
}

// socket is a tagged TCP socket nobody has yet. It belongs to whoever holds the value: the answering
// thread, the prefiller or a pool.
type socket struct {
	fd    int
	inode uint64
	has   socketOptions
}

// apply gives the socket the options a caller wants: no system call if it has them already.
func (s *socket) apply(m SocketMaker, id model.EndpointID, want socketOptions) error {
	if s.has.own != want.own && model.ProtectUser.On() {
		// SO_REUSEPORT groups and sk_uid (firewall rules, ss) go by the socket's owner.
		if err := unix.Fchown(s.fd, int(want.own.uid), int(want.own.gid)); err != nil {
			return fmt.Errorf("give socket to %d:%d: %w", want.own.uid, want.own.gid, err)
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

// endpoint is what the listeners of one endpoint share.
type endpoint struct {
	id         model.EndpointID
	removed    atomic.Bool // set once by Server.Forget, read for every call
	users      int         // running listeners; guarded by Server.mu
	lastFilled uint64      // when one of its batches was filled last (prefiller.turns); the prefiller's own
	lingers    atomic.Bool // a program of it kept the prefiller waiting: it gets no more batches
	v4, v6     socketPool
}

func newEndpoint(id model.EndpointID) *endpoint {
	first := socketOptions{own: self()} // as a socket is made, until a caller has shown what it wants
	return &endpoint{
		id: id,
		v4: socketPool{endpoint: id, family: unix.AF_INET, want: first},
		v6: socketPool{endpoint: id, family: unix.AF_INET6, want: first},
	}
}

// self is the owner of the sockets the agent makes.
func self() owner { return owner{uint32(unix.Geteuid()), uint32(unix.Getegid())} }

// pool gives the endpoint's ready sockets of a family.
func (e *endpoint) pool(family int) *socketPool {
	if family == unix.AF_INET6 {
		return &e.v6
	}
	return &e.v4
}

// socketPool holds the ready sockets of one endpoint and family. It owns them: the threads that answer take
// them out, only the prefiller (and an answer nobody waited for) puts them in, and Server.drop closes
// what is left when the endpoint's last listener ends or the endpoint is forgotten.
type socketPool struct {
	endpoint model.EndpointID
	family   int
	queued   atomic.Bool // on the prefiller's queue; keeps it there once

	mu     sync.Mutex // guards the rest; never held across a system call
	ready  []socket
	want   socketOptions // of the latest caller: the prefiller's guess for the next
	closed bool
}

// lastOwner is the owner that the latest caller had: the guess for the next.
func (st *socketPool) lastOwner() owner {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.want.own
}

// learn notes what the latest caller wanted after all.
func (st *socketPool) learn(want socketOptions) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.want = want
}

// take removes a ready socket and reports how many are left. The newest first: its memory is warmest.
func (st *socketPool) take(want socketOptions) (s socket, left int, ok bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.want = want
	n := len(st.ready)
	if n == 0 {
		return socket{}, 0, false
	}
	s = st.ready[n-1]
	st.ready = st.ready[:n-1]
	return s, n - 1, true
}

// put adds a ready socket. It reports false, and the caller keeps the socket, if the pool holds limit
// sockets or is closed.
func (st *socketPool) put(s socket, limit int) bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.closed || len(st.ready) >= limit {
		return false
	}
	st.ready = append(st.ready, s)
	return true
}

// shortfall reports how many sockets are missing to target and what the next caller will probably want.
func (st *socketPool) shortfall(target int) (int, socketOptions) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.closed {
		return 0, socketOptions{}
	}
	return target - len(st.ready), st.want
}

// close empties the pool for good and returns what was in it.
func (st *socketPool) close() []socket {
	st.mu.Lock()
	defer st.mu.Unlock()
	left := st.ready
	st.ready, st.closed = nil, true
	return left
}

func makeSocket(m SocketMaker, id model.EndpointID, family int) (socket, error) {
	fd, err := m.MakeSocket(id, family)
	if err != nil {
		return socket{}, fmt.Errorf("make socket: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		closeFD(fd)
		return socket{}, fmt.Errorf("make socket: %w", err)
	}
	return socket{fd: fd, inode: st.Ino, has: socketOptions{own: self()}}, nil
}

// closeFD closes a descriptor of ours. The kernel always frees the number, and none of what we close can
// report lost data, so there is nothing to do about an error.
func closeFD(fd int) { _ = unix.Close(fd) }
