package stacks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// link is a connection to the module. Any goroutine may make requests; one receives.
type link struct {
	conn *net.UnixConn
	pid  int // the module's process
	// tellsSent says that the module says SENT.
	tellsSent atomic.Bool

	// writing is held for a write, which waits for a module that does not read. Such a one may wait
	// for its answers to be read: who receives never takes it.
	writing sync.Mutex

	mu     sync.Mutex // guards what follows
	tag    uint32
	asked  map[uint32]question
	listed map[uint32][]protocol.Info // for a LIST that has no answer yet, by its tag
	closed bool
}

// question is a request that has no answer yet.
type question struct {
	kind   uint32
	tenant uint64
	got    chan answer
}

// answer is what the module said to a request.
type answer struct {
	message []byte
	fd      int // that came with it, or -1
}

var errModuleEnded = errors.New("the stack module has ended")

// Process implements process.Link.
func (l *link) Process() int { return l.pid }

// dial connects to the module that listens at path.
func dial(path string) (*link, error) {
	conn, err := net.DialTimeout("unixpacket", path, process.Answers)
	if err != nil {
		return nil, err
	}
	l := &link{conn: conn.(*net.UnixConn), asked: map[uint32]question{}, listed: map[uint32][]protocol.Info{}}
	if l.pid, err = process.Peer(l.conn); err != nil {
		return nil, errors.Join(fmt.Errorf("look who listens at %s: %w", path, err), conn.Close())
	}
	return l, nil
}

// request sends a message, with a descriptor unless fd is -1, and waits for its answer. The error
// is the errno that the module gives, if it does; back is a descriptor that came with that, or -1.
func request[Q, A protocol.Message](ctx context.Context, l *link, q *Q, head *protocol.Head, fd int) (a A, back int, err error) {
	got, err := l.ask(head, func() []byte { return protocol.Append(nil, q) }, fd)
	if err != nil {
		return a, -1, err
	}
	var heard answer
	select {
	case <-ctx.Done():
		l.forget(head.Tag)
		return a, -1, ctx.Err()
	case heard = <-got:
	}
	if heard.message == nil {
		return a, -1, errModuleEnded
	}
	h, err := protocol.ParseHead(heard.message)
	if err == nil && h.Error != 0 {
		return a, heard.fd, unix.Errno(h.Error)
	}
	if heard.fd >= 0 {
		closeFD(heard.fd)
	}
	if err == nil {
		a, err = protocol.Parse[A](heard.message)
	}
	return a, -1, err
}

// ask sends a request under a tag of its own.
func (l *link) ask(head *protocol.Head, message func() []byte, fd int) (<-chan answer, error) {
	got := make(chan answer, 1)
	if !l.expect(head, got) {
		return nil, errModuleEnded
	}
	if err := l.write(message(), fd); err != nil {
		l.forget(head.Tag)
		return nil, err
	}
	return got, nil
}

// expect gives a request its tag; false: the module has ended.
func (l *link) expect(head *protocol.Head, got chan answer) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	for l.tag++; l.tag == 0 || l.asked[l.tag].got != nil; l.tag++ {
	}
	head.Tag = l.tag
	l.asked[l.tag] = question{head.Type, head.Tenant, got}
	return true
}

// forget says that nobody waits for an answer any more.
func (l *link) forget(tag uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.asked, tag)
}

// send sends what has no answer. After an error whoever receives finds the connection closed.
func send[M protocol.Message](l *link, m *M) {
	_ = l.write(protocol.Append(nil, m), -1)
}

// write sends a message. A module that does not read is as good as none.
func (l *link) write(message []byte, fd int) error {
	l.writing.Lock()
	defer l.writing.Unlock()
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	err := l.conn.SetWriteDeadline(time.Now().Add(process.Answers))
	if err == nil {
		_, _, err = l.conn.WriteMsgUnix(message, rights, nil)
	}
	if err != nil {
		_ = l.conn.Close()
		return fmt.Errorf("%w: %w", errModuleEnded, err)
	}
	return nil
}

// receive waits for a message that is no answer; answers it passes on. The error is io.EOF when the
// module has ended, or has another agent.
func (l *link) receive() (head protocol.Head, message []byte, fd int, err error) {
	buf := make([]byte, protocol.MessageMax+1)
	rights := make([]byte, unix.CmsgSpace(4*8))
	for {
		n, m, flags, _, err := l.conn.ReadMsgUnix(buf, rights)
		if err != nil {
			return head, nil, -1, err
		}
		if n == 0 {
			return head, nil, -1, io.EOF
		}
		fd, err = descriptor(rights[:m])
		if err == nil && flags&unix.MSG_CTRUNC != 0 {
			err = fmt.Errorf("%w: descriptors are cut off", protocol.ErrMalformed)
		}
		if err == nil {
			head, err = protocol.ParseHead(buf[:n])
		}
		if err != nil {
			if fd >= 0 {
				closeFD(fd)
			}
			return head, nil, -1, err
		}
		if head.Type == protocol.TypeListed {
			info, err := protocol.Parse[protocol.Info](buf[:n])
			if err != nil {
				return head, nil, -1, err
			}
			l.list(info)
			continue
		}
		if head.Type&protocol.Answer == 0 {
			return head, buf[:n], fd, nil
		}
		l.answered(head, answer{append([]byte(nil), buf[:n]...), fd})
	}
}

// list keeps a socket of a list that was asked for.
func (l *link) list(info protocol.Info) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if q := l.asked[info.Head.Tag]; q.got != nil && q.kind == protocol.TypeList && q.tenant == info.Head.Tenant {
		l.listed[info.Head.Tag] = append(l.listed[info.Head.Tag], info)
	}
}

// socketsOf asks the module for all sockets of a tenant.
func (l *link) socketsOf(ctx context.Context, t *tenant) ([]protocol.Info, error) {
	m := protocol.Plain{Head: t.head(protocol.TypeList, 0)}
	_, _, err := request[protocol.Plain, protocol.Plain](ctx, l, &m, &m.Head, -1)
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.listed[m.Head.Tag]
	delete(l.listed, m.Head.Tag)
	return all, err
}

// answered hands an answer to who waits for it. One that is of another type or tenant than what was
// asked under its tag is nobody's: a tenant's process that somebody has taken over does not answer
// for others.
func (l *link) answered(head protocol.Head, a answer) {
	l.mu.Lock()
	q := l.asked[head.Tag]
	is := q.got != nil && head.Type == q.kind|protocol.Answer && head.Tenant == q.tenant
	if is {
		delete(l.asked, head.Tag)
	}
	l.mu.Unlock()
	if is {
		q.got <- a
	} else if a.fd >= 0 {
		closeFD(a.fd)
	}
}

// descriptor gives the one that came with a message, -1 if none did.
func descriptor(rights []byte) (int, error) {
	if len(rights) == 0 {
		return -1, nil
	}
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return -1, err
	}
	fd := -1
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue
		}
		for _, got := range fds {
			if fd >= 0 {
				closeFD(got)
				err = fmt.Errorf("%w: more than one descriptor", protocol.ErrMalformed)
			} else {
				fd = got
			}
		}
		if err != nil {
			return fd, err
		}
	}
	return fd, nil
}

// close ends the connection and all requests. Any goroutine may call it.
func (l *link) close() {
	_ = l.conn.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for tag, q := range l.asked {
		delete(l.asked, tag)
		q.got <- answer{fd: -1}
	}
}
