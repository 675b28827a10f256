package stacks

import (
	"context"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// link is a connection to the module. Any goroutine may make requests; one receives.
type link struct {
	process.Requests
	// tellsSent says that the module says SENT.
	tellsSent atomic.Bool

	lists  sync.Mutex                 // guards listed, and is taken before what Requests locks
	listed map[uint32][]protocol.Info // for a LIST that has no answer yet, by its tag
}

// dial connects to the module that listens at path.
func dial(path string) (*link, error) {
	conn, err := process.Connect(path)
	if err != nil {
		return nil, err
	}
	return &link{Requests: process.Requests{Conn: conn}, listed: map[uint32][]protocol.Info{}}, nil
}

// request sends a message, with a descriptor unless fd is -1, and waits for its answer. The error
// is the errno that the module gives, if it does; back is a descriptor that came with that, or -1.
func request[Q, A protocol.Message](ctx context.Context, l *link, q *Q, head *protocol.Head, fd int) (a A, back int, err error) {
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

// send sends what has no answer. After an error whoever receives finds the connection closed.
func send[M protocol.Message](l *link, m *M) {
	_ = l.Write(protocol.Append(nil, m), -1)
}

// receive waits for a message that is no answer; answers it passes on. The error is io.EOF when the
// module has ended, or has another agent.
func (l *link) receive() (head protocol.Head, message []byte, fd int, err error) {
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
func (l *link) list(info protocol.Info) {
	l.lists.Lock()
	defer l.lists.Unlock()
	if l.Asks(info.Head.Tag, process.Question{Type: protocol.TypeList, Of: info.Head.Tenant}) {
		l.listed[info.Head.Tag] = append(l.listed[info.Head.Tag], info)
	}
}

// socketsOf asks the module for all sockets of a tenant.
func (l *link) socketsOf(ctx context.Context, t *tenant) ([]protocol.Info, error) {
	m := protocol.Plain{Head: t.head(protocol.TypeList, 0)}
	_, _, err := request[protocol.Plain, protocol.Plain](ctx, l, &m, &m.Head, -1)
	l.lists.Lock()
	defer l.lists.Unlock()
	all := l.listed[m.Head.Tag]
	delete(l.listed, m.Head.Tag)
	return all, err
}
