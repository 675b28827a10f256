package netstack

import (
	"net"
	"sync"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// mailMost is how many messages wait for somebody who does not read before he is cut off, and
// mailMany from how many on nothing more is read of who asks for them.
const (
	mailMost = 65536
	mailMany = 4096
)

// message is one, with a descriptor or -1.
type message struct {
	bytes []byte
	fd    int
}

// mailbox sends messages without making its user wait.
type mailbox struct {
	conn *net.UnixConn

	mu     sync.Mutex // guards the rest
	change sync.Cond
	queue  []message
	closed bool
}

func newMailbox(conn *net.UnixConn) *mailbox {
	m := &mailbox{conn: conn}
	m.change.L = &m.mu
	go m.run()
	return m
}

// send has a message sent, and closes its descriptor afterwards. A mailbox that is closed drops it.
func (m *mailbox) send(b []byte, fd int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		closeFD(fd)
		return
	}
	m.queue = append(m.queue, message{b, fd})
	if len(m.queue) > mailMost {
		m.closeLocked()
	}
	m.change.Broadcast()
}

// run sends what is queued until the mailbox is closed.
func (m *mailbox) run() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		for len(m.queue) == 0 && !m.closed {
			m.change.Wait()
		}
		if m.closed {
			return
		}
		next := m.queue[0]
		m.mu.Unlock()
		var rights []byte
		if next.fd >= 0 {
			rights = unix.UnixRights(next.fd)
		}
		_, _, err := m.conn.WriteMsgUnix(next.bytes, rights, nil)
		m.mu.Lock()
		if m.closed {
			return // which has closed the descriptor, too
		}
		closeFD(next.fd)
		m.queue = m.queue[1:]
		if len(m.queue) == 0 {
			m.queue = nil
		}
		m.change.Broadcast()
		if err != nil {
			m.closeLocked()
			return
		}
	}
}

// settle waits until so many messages wait at most; false: the mailbox is closed.
func (m *mailbox) settle(most int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for len(m.queue) > most && !m.closed {
		m.change.Wait()
	}
	return !m.closed
}

func (m *mailbox) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closeLocked()
}

func (m *mailbox) closeLocked() {
	if m.closed {
		return
	}
	m.closed = true
	_ = m.conn.Close() // nothing is lost with it that anybody waits for
	for _, left := range m.queue {
		closeFD(left.fd)
	}
	m.queue = nil
	m.change.Broadcast()
}

// receive waits for a message. One that is longer than any gets longer than any here, too.
func receive(conn *net.UnixConn) (b []byte, fds []int, err error) {
	buf := make([]byte, protocol.MessageMax+1)
	rights := make([]byte, unix.CmsgSpace(4*4))
	n, r, _, _, err := conn.ReadMsgUnix(buf, rights)
	if err != nil {
		return nil, nil, err
	}
	control, err := unix.ParseSocketControlMessage(rights[:r])
	if err != nil {
		return nil, nil, err
	}
	for _, c := range control {
		got, err := unix.ParseUnixRights(&c)
		if err != nil {
			closeAll(fds)
			return nil, nil, err
		}
		fds = append(fds, got...)
	}
	return buf[:n], fds, nil
}

// closeFD closes a descriptor of ours, if it is one: its number is free then in any case.
func closeFD(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd)
	}
}

func closeAll(fds []int) {
	for _, fd := range fds {
		closeFD(fd)
	}
}

// only gives the one descriptor that there is, or -1.
func only(fds []int) int {
	if len(fds) == 0 {
		return -1
	}
	return fds[0]
}
