package queues

import (
	"context"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/queues/protocol"
)

// link is a connection to the service. Any goroutine may make requests; one receives.
type link struct {
	process.Requests
	// owners says that the service reads of a region whose it is: one of before does not.
	owners bool
}

// dial connects to the service that listens at path.
func dial(path string) (*link, error) {
	conn, err := process.Connect(path)
	if err != nil {
		return nil, err
	}
	return &link{Requests: process.Requests{Conn: conn}}, nil
}

// request sends a message, with a descriptor unless fd is -1, and waits for its answer. The error
// is the errno that the service gives, if it does; back is a descriptor that came with it, or -1.
func request[Q, A protocol.Message](ctx context.Context, l *link, q *Q, head *protocol.Head, fd int) (a A, back int, err error) {
	message := func(tag uint32) []byte { head.Tag = tag; return protocol.Append(nil, q) }
	heard, err := l.Request(ctx, question(*head), message, fd)
	if err != nil {
		return a, -1, err
	}
	h, err := protocol.ParseHead(heard.Message)
	if err == nil && h.Error != 0 {
		err = unix.Errno(h.Error)
	}
	if err == nil {
		a, err = protocol.Parse[A](heard.Message)
	}
	return a, heard.FD, err
}

// question is what a message asks, or answers.
func question(h protocol.Head) process.Question {
	return process.Question{Type: h.Type &^ protocol.Answer, Of: h.Region}
}

// receive waits for a message that is no answer; answers it passes on.
func (l *link) receive() (head protocol.Head, message []byte, err error) {
	buf := make([]byte, protocol.MessageMax+1)
	for {
		n, fd, err := l.Receive(buf)
		if err != nil {
			return head, nil, err
		}
		if head, err = protocol.ParseHead(buf[:n]); err != nil {
			closeFD(fd)
			return head, nil, err
		}
		heard := append([]byte(nil), buf[:n]...)
		if head.Type&protocol.Answer == 0 {
			closeFD(fd)
			return head, heard, nil
		}
		l.Answered(head.Tag, question(head), process.Answer{Message: heard, FD: fd})
	}
}

// closeFD closes a descriptor of ours; -1 is none.
func closeFD(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd)
	}
}
