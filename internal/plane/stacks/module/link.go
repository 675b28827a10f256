package module

import (
	"context"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// Link is a connection to a module. Any goroutine may make requests; one receives.
type Link struct {
	process.Requests
	// TellsSent says that the module says SENT.
	TellsSent atomic.Bool

	lists  sync.Mutex                 // guards listed, and is taken before what Requests locks
	listed map[uint32][]protocol.Info // for a LIST that has no answer yet, by its tag
}

// Dial connects to the module that listens at path.
func Dial(path string) (*Link, error) {
	conn, err := process.Connect(path)
	if err != nil {
		return nil, err
	}
	return &Link{Requests: process.Requests{Conn: conn}, listed: map[uint32][]protocol.Info{}}, nil
}

// Request sends a message, with a descriptor unless fd is -1, and waits for its answer. The error
// is the errno that the module gives, if it does; back is a descriptor that came with that, or -1.
func Request[Q, A protocol.Message](ctx context.Context, l *Link, q *Q, head *protocol.Head, fd int) (a A, back int, err error) {
	message := func(tag uint32) []byte { head.Tag = tag; return protocol.Append(nil, q) }
	heard, err := l.Request(ctx, question(*head), message, fd)
	if err != nil {
		return a, -1, err
	}
	h, err := protocol.ParseHead(heard.Message)
	if err == nil && h.Error != 0 {
		return a, heard.FD, unix.Errno(h.Error)
	}
	if heard.FD >= 0 {
		closeFD(heard.FD)
	}
	if err == nil {
		a, err = protocol.Parse[A](heard.Message)
	}
	return a, -1, err
}

// question is what a message asks, or answers.
func question(h protocol.Head) process.Question {
	return process.Question{Type: h.Type &^ protocol.Answer, Of: h.Tenant}
}

// Send sends what has no answer. After an error whoever receives finds the connection closed.
func Send[M protocol.Message](l *Link, m *M) {
	_ = l.Write(protocol.Append(nil, m), -1)
}

// Hear waits for a message that is no answer; answers it passes on. The error is io.EOF when the
// module has ended, or has another agent.
func (l *Link) Hear() (head protocol.Head, message []byte, fd int, err error) {
	buf := make([]byte, protocol.MessageMax+1)
	for {
		n, fd, err := l.Receive(buf)
		if err != nil {
			return head, nil, -1, err
		}
		if head, err = protocol.ParseHead(buf[:n]); err != nil {
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
		l.Answered(head.Tag, question(head), process.Answer{Message: append([]byte(nil), buf[:n]...), FD: fd})
	}
}

// list keeps a socket of a list that was asked for.
func (l *Link) list(info protocol.Info) {
	l.lists.Lock()
	defer l.lists.Unlock()
	if l.Asks(info.Head.Tag, process.Question{Type: protocol.TypeList, Of: info.Head.Tenant}) {
		l.listed[info.Head.Tag] = append(l.listed[info.Head.Tag], info)
	}
}

// Sockets asks the module for all sockets of a tenant, by its number.
func (l *Link) Sockets(ctx context.Context, tenant uint64) ([]protocol.Info, error) {
	m := protocol.Plain{Head: protocol.Head{Type: protocol.TypeList, Tenant: tenant}}
	_, _, err := Request[protocol.Plain, protocol.Plain](ctx, l, &m, &m.Head, -1)
	l.lists.Lock()
	defer l.lists.Unlock()
	all := l.listed[m.Head.Tag]
	delete(l.listed, m.Head.Tag)
	return all, err
}

// Stats asks the module what a tenant uses, by its number; 0 is all of them.
func (l *Link) Stats(ctx context.Context, tenant uint64) (protocol.Stats, error) {
	m := protocol.Plain{Head: protocol.Head{Type: protocol.TypeStats, Tenant: tenant}}
	s, _, err := Request[protocol.Plain, protocol.Stats](ctx, l, &m, &m.Head, -1)
	return s, err
}

// Info asks the module what it knows of a tenant's socket.
func (l *Link) Info(ctx context.Context, tenant, id uint64) (protocol.Info, error) {
	m := protocol.Plain{Head: protocol.Head{Type: protocol.TypeInfo, Tenant: tenant, ID: id}}
	i, _, err := Request[protocol.Plain, protocol.Info](ctx, l, &m, &m.Head, -1)
	return i, err
}

// CloseSocket has the module close a tenant's socket; flags are those of CLOSE.
func (l *Link) CloseSocket(ctx context.Context, tenant, id uint64, flags uint32) error {
	m := protocol.Close{Head: protocol.Head{Type: protocol.TypeClose, Tenant: tenant, ID: id}, Flags: flags}
	_, _, err := Request[protocol.Close, protocol.Plain](ctx, l, &m, &m.Head, -1)
	return err
}

// closeFD closes a descriptor of ours: the number is always free then.
func closeFD(fd int) { _ = unix.Close(fd) }
