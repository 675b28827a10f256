// Package guest is what planes have in common that serve the library in containers (clib/guest,
// NetKernel's GuestLib): where it lies, how its questions come, and what it may ask them of.
package guest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/trap/task"
)

// Library is the file of the containers' side.
const Library = "libheddle-guest.so"

// FindLibrary says whether the library is there, beside the program self or where the Debian
// package has it.
func FindLibrary(self string) error {
	dir := filepath.Dir(self)
	for _, d := range []string{dir, filepath.Join(dir, "../lib/heddle")} {
		if _, err := os.Stat(filepath.Join(d, Library)); err == nil {
			return nil
		}
	}
	return fmt.Errorf("%s is not installed beside %s, nor in ../lib/heddle", Library, self)
}

// States of connections, as in TCP_INFO.
const (
	Established = 1
	CloseWait   = 8
)

// ErrNoConnection says that a descriptor is no TCP connection of the node's in such a state.
var ErrNoConnection = errors.New("not an established TCP connection of the node's")

// Connection is a connection as its program has it, to be found again.
type Connection struct {
	Thread        uint32 // of the program
	Process       uint32 // the thread's; it may outlive the thread
	Inode, Cookie uint64
}

// Programs are those of the node's containers, whose sockets are looked at.
type Programs struct {
	task.Proc
	Netns uint64 // of the node's sockets
}

// OpenPrograms gives them; the caller closes it.
func OpenPrograms() (p Programs, err error) {
	if p.Proc, err = task.Open(); err != nil {
		return p, err
	}
	if p.Netns, err = p.OwnNetns(); err != nil {
		p.Close()
	}
	return p, err
}

// Connection gives a duplicate of a thread's descriptor, which must be a connection in one of the
// states that the node's own TCP runs, so that rules have let it come to be.
func (p Programs) Connection(thread uint32, number int, states ...uint8) (fd int, c Connection, err error) {
	fd, found, err := p.Take(thread, number)
	if err != nil || !found {
		return -1, c, errors.Join(ErrNoConnection, err)
	}
	c, err = look(fd, p.Netns, states)
	if err != nil {
		_ = unix.Close(fd)
		return -1, c, err
	}
	c.Thread = thread
	if c.Process, err = p.Process(thread); err != nil {
		c.Process = thread // it is gone, or about to be
	}
	return fd, c, nil
}

func look(fd int, netns uint64, states []uint8) (c Connection, err error) {
	if of, err := task.NetnsOfSocket(fd); err != nil || of != netns {
		return c, errors.Join(ErrNoConnection, err)
	}
	if protocol, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err != nil || protocol != unix.IPPROTO_TCP {
		return c, errors.Join(ErrNoConnection, err)
	}
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil || !slices.Contains(states, info.State) {
		return c, errors.Join(ErrNoConnection, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return c, fmt.Errorf("look at a socket: %w", err)
	}
	c.Inode = st.Ino
	c.Cookie, err = cookie(fd)
	return c, err
}

// Find gives a duplicate of a connection's socket if its program has it still.
func (p Programs) Find(c Connection) (fd int, found bool) {
	// The thread may have descriptors of its own, and may have ended.
	for _, task := range []uint32{c.Thread, c.Process} {
		if fd, found = p.findIn(task, c); found {
			break
		}
	}
	return fd, found
}

func (p Programs) findIn(task uint32, c Connection) (fd int, found bool) {
	number, found, err := p.FindSocket(task, c.Inode)
	if err != nil || !found {
		return -1, false
	}
	fd, found, err = p.Take(task, number)
	if err != nil || !found {
		return -1, false
	}
	// The number may be another socket's by now.
	if is, err := cookie(fd); err != nil || is != c.Cookie {
		_ = unix.Close(fd)
		return -1, false
	}
	return fd, true
}

func cookie(fd int) (uint64, error) {
	c, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("number of a socket: %w", err)
	}
	return c, nil
}
