package verbs

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/process"
)

// routerAnswers bounds what a router may take for one exchange.
const routerAnswers = process.Answers

// link is a connection to the router. One goroutine at a time sends, and one receives.
type link struct {
	conn   *net.UnixConn
	socket string // where it listens
	pid    int    // its process
	// foreign says that it speaks another version: nothing is said to it.
	foreign bool
	// buf is the receiver's. What parse gives of it holds until the next receive.
	buf [statisticsMax + 1]byte
	// answers has each STATISTICS, for whoever asked; done is closed when nothing comes any more.
	answers chan heard
	done    chan struct{}
}

// Process implements process.Link.
func (l *link) Process() int { return l.pid }

// dial connects to the router that listens at path.
func dial(path string) (*link, error) {
	conn, err := net.DialTimeout("unixpacket", path, routerAnswers)
	if err != nil {
		return nil, err
	}
	l := &link{conn: conn.(*net.UnixConn), socket: path, answers: make(chan heard, 1), done: make(chan struct{})}
	l.pid, err = process.Peer(l.conn)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("look who listens at %s: %w", path, err), conn.Close())
	}
	return l, nil
}

// send sends a message, with a descriptor unless file is nil. A router that does not read is as
// good as none.
func (l *link) send(message []byte, file *os.File) error {
	var rights []byte
	if file != nil {
		rights = unix.UnixRights(int(file.Fd()))
	}
	if err := l.conn.SetWriteDeadline(time.Now().Add(routerAnswers)); err != nil {
		return err
	}
	_, _, err := l.conn.WriteMsgUnix(message, rights, nil)
	return err
}

// receive waits for a message. The error is io.EOF when the router has ended, or has another agent.
func (l *link) receive() (heard, error) {
	buf, rights := l.buf[:], make([]byte, unix.CmsgSpace(4))
	n, control, _, _, err := l.conn.ReadMsgUnix(buf, rights)
	if err != nil {
		return heard{}, err
	}
	if n == 0 {
		return heard{}, io.EOF
	}
	file, err := descriptor(rights[:control])
	if err != nil {
		return heard{}, err
	}
	m, err := parse(buf[:n])
	if (err != nil || m.kind != typeReleased) && file != nil {
		return heard{}, errors.Join(fmt.Errorf("%w: a descriptor with type %d", errMalformed, m.kind), err, file.Close())
	}
	m.file = file
	return m, err
}

// descriptor gives the one that came with a message; nil: there was none.
func descriptor(control []byte) (*os.File, error) {
	if len(control) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, err
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) == 0 {
		return nil, err
	}
	return os.NewFile(uintptr(fds[0]), "given back"), nil // the room is for one
}

// close may be called by any goroutine: who receives then gets an error.
func (l *link) close() { _ = l.conn.Close() }
