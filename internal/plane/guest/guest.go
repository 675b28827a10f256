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

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/trap"
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

// Questions are those of one kind, which a library asks by
//
//	socket(AF_INET, SOCK_STREAM, 0, magic, question, ^magic)
//
// of which the kernel takes the first three arguments: clib/guest/ask.c. The number is the magic,
// random, so that no program has it in its registers by chance. A handler of trapped calls embeds
// it, and answers.
type Questions uint64

// Owns implements trap.Handler.
func (q Questions) Owns(d *trap.Data) bool {
	return d.Arch == trap.NativeArch && d.Nr == unix.SYS_SOCKET && d.Args[3] == uint64(q) && d.Args[5] == ^uint64(q)
}

// Question gives the question of a call.
func (Questions) Question(d trap.Data) uint64 { return d.Args[4] }

// AreFor reports whether the caller's container has the library.
func (Questions) AreFor(c *trap.Call) bool {
	return c.Listener().Annotation(model.AnnotationGuest) == "true"
}

// Bound implements trap.EndpointHandler: what there is of an endpoint begins with its Attach.
func (Questions) Bound(*trap.Endpoint) {}

// Released implements trap.EndpointHandler.
func (Questions) Released(*trap.Endpoint) {}

// Annotations implements trap.ListenerHandler: heddle-runtime preloads the library in containers
// with this one.
func (Questions) Annotations() []string { return []string{model.AnnotationGuest} }

// Opened implements trap.ListenerHandler.
func (Questions) Opened(*trap.Listener) {}

// Closed implements trap.ListenerHandler.
func (Questions) Closed(*trap.Listener) {}

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
	Inode, Cookie uint64
}

// Take gives a duplicate of a thread's descriptor, which must be a connection in one of the states
// that the node's own TCP runs, in the network namespace with the number netns, so that rules have
// let it come to be.
func Take(proc task.Proc, thread uint32, number int, netns uint64, states ...uint8) (fd int, c Connection, err error) {
	fd, found, err := proc.Take(thread, number)
	if err != nil || !found {
		return -1, c, errors.Join(ErrNoConnection, err)
	}
	c, err = look(fd, netns, states)
	if err != nil {
		_ = unix.Close(fd)
		return -1, c, err
	}
	c.Thread = thread
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

// Find gives a duplicate of the connection's socket if its program has it still.
func (c Connection) Find(proc task.Proc) (fd int, found bool) {
	number, found, err := proc.FindSocket(c.Thread, c.Inode)
	if err != nil || !found {
		return -1, false
	}
	fd, found, err = proc.Take(c.Thread, number)
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
