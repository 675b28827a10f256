package queues

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/queues/protocol"
)

// link is a connection to the service. Any goroutine may make requests; one receives.
type link struct {
	conn *net.UnixConn
	pid  int // the service's process

	mu     sync.Mutex // guards what follows
	tag    uint32
	asked  map[uint32]chan answer
	closed bool
}

// answer is what the service said to a request.
type answer struct {
	message []byte
	fd      int // that came with it, or -1
}

var errEnded = errors.New("the service of queues has ended")

// Process implements process.Link.
func (l *link) Process() int { return l.pid }

// dial connects to the service that listens at path.
func dial(path string) (*link, error) {
	conn, err := net.DialTimeout("unixpacket", path, process.Answers)
	if err != nil {
		return nil, err
	}
	l := &link{conn: conn.(*net.UnixConn), asked: map[uint32]chan answer{}}
	if l.pid, err = process.Peer(l.conn); err != nil {
		return nil, errors.Join(fmt.Errorf("look who listens at %s: %w", path, err), conn.Close())
	}
	return l, nil
}

// request sends a message, with a descriptor unless fd is -1, and waits for its answer. The error
// is the errno that the service gives, if it does; back is a descriptor that came with it, or -1.
func request[Q, A protocol.Message](ctx context.Context, l *link, q *Q, head *protocol.Head, fd int) (a A, back int, err error) {
	got := make(chan answer, 1)
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return a, -1, errEnded
	}
	l.tag++
	head.Tag = l.tag
	l.asked[l.tag] = got
	l.mu.Unlock()
	defer l.forget(head.Tag)
	if err := send(l, q, fd); err != nil {
		return a, -1, err
	}
	var heard answer
	select {
	case <-ctx.Done():
		return a, -1, ctx.Err()
	case heard = <-got:
	}
	if heard.message == nil {
		return a, -1, errEnded
	}
	h, err := protocol.ParseHead(heard.message)
	if err == nil && h.Error != 0 {
		err = unix.Errno(h.Error)
	}
	if err == nil {
		a, err = protocol.Parse[A](heard.message)
	}
	return a, heard.fd, err
}

func (l *link) forget(tag uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.asked, tag)
}

// send sends a message. A service that does not read is as good as none.
func send[M protocol.Message](l *link, m *M, fd int) error {
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.conn.SetWriteDeadline(time.Now().Add(process.Answers))
	if err == nil {
		_, _, err = l.conn.WriteMsgUnix(protocol.Append(nil, m), rights, nil)
	}
	if err != nil {
		_ = l.conn.Close()
		return fmt.Errorf("%w: %w", errEnded, err)
	}
	return nil
}

// receive waits for a message that is no answer; answers it passes on.
func (l *link) receive() (head protocol.Head, message []byte, err error) {
	buf, rights := make([]byte, protocol.MessageMax+1), make([]byte, unix.CmsgSpace(4*4))
	for {
		n, m, _, _, err := l.conn.ReadMsgUnix(buf, rights)
		if err == nil && n == 0 {
			err = io.EOF
		}
		if err != nil {
			return head, nil, err
		}
		fd := descriptor(rights[:m])
		if head, err = protocol.ParseHead(buf[:n]); err != nil {
			closeFD(fd)
			return head, nil, err
		}
		heard := append([]byte(nil), buf[:n]...)
		if head.Type&protocol.Answer == 0 {
			closeFD(fd)
			return head, heard, nil
		}
		l.mu.Lock()
		got := l.asked[head.Tag]
		delete(l.asked, head.Tag)
		l.mu.Unlock()
		if got == nil {
			closeFD(fd)
		} else {
			got <- answer{heard, fd}
		}
	}
}

// descriptor gives the one that came with a message, -1 if none did. The service sends no more.
func descriptor(rights []byte) int {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil || len(messages) == 0 {
		return -1
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) == 0 {
		return -1
	}
	for _, more := range fds[1:] {
		closeFD(more)
	}
	return fds[0]
}

// close ends the connection and all requests. Any goroutine may call it.
func (l *link) close() {
	_ = l.conn.Close()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for tag, got := range l.asked {
		delete(l.asked, tag)
		got <- answer{fd: -1}
	}
}

// closeFD closes a descriptor of ours; -1 is none.
func closeFD(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd)
	}
}
