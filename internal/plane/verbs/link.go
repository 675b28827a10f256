package verbs

import (
	"errors"
	"fmt"
	"os"
	"time"

	"heddle.dev/heddle/internal/plane/layout"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/verbs/protocol"
)

// routerAnswers bounds what a router may take for its next message.
var routerAnswers = process.Answers

// link is a connection to the router. One goroutine at a time sends, and one receives.
type link struct {
	process.Conn
	socket string // where it listens
	// foreign says that it speaks another version: nothing is said to it.
	foreign bool
	// buf is the receiver's. What parse gives of it holds until the next receive.
	buf [protocol.StatisticsMax + 1]byte
	// answers has each STATISTICS, for whoever asked; done is closed when nothing comes any more.
	answers chan heard
	done    chan struct{}
}

// dial connects to the router that listens at path.
func dial(path string) (*link, error) {
	conn, err := process.Connect(path)
	if err != nil {
		return nil, err
	}
	return &link{Conn: conn, socket: path, answers: make(chan heard, 1), done: make(chan struct{})}, nil
}

// receiveSoon is receive for a message that is not to take long.
func (l *link) receiveSoon() (heard, error) {
	if err := l.SetReadDeadline(time.Now().Add(routerAnswers)); err != nil {
		return heard{}, err
	}
	return l.receive()
}

// send sends a message, with a descriptor unless file is nil.
func (l *link) send(message []byte, file *os.File) error {
	fd := -1
	if file != nil {
		fd = int(file.Fd())
	}
	return l.Send(message, fd)
}

// receive waits for a message. The error is io.EOF when the router has ended, or has another agent.
func (l *link) receive() (heard, error) {
	n, fd, err := l.Receive(l.buf[:])
	if err != nil {
		return heard{}, err
	}
	m, err := parse(l.buf[:n])
	if fd >= 0 {
		m.file = os.NewFile(uintptr(fd), "given back")
	}
	if (err != nil || m.Type != protocol.TypeReleased) && m.file != nil {
		return heard{}, errors.Join(fmt.Errorf("%w: a descriptor with type %d", layout.ErrMalformed, m.Type), err, m.file.Close())
	}
	return m, err
}

// close may be called by any goroutine: who receives then gets an error.
func (l *link) close() { _ = l.Close() }
