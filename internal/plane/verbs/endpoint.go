package verbs

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/verbs/folder"
)

// endpoint is one that wants verbs.
type endpoint struct {
	model.Endpoint
	// number is its name at the router. Ids are given again, the moment at which an endpoint was
	// made is not.
	number uint64
	dir    string
	// router has the endpoint; nil: none has, or it is yet to be told.
	router *link
	// listener is bound in dir and has yet to be handed to the router; nil: the router has it, or
	// an earlier one had.
	listener *os.File
	// connections takes those of other endpoints' queue pairs; nil: it could not be made, which is
	// a fault.
	connections net.Listener
	// counted is what it did, as far as the router has said.
	counted counted
}

func newEndpoint(e model.Endpoint, dir string) *endpoint {
	return &endpoint{Endpoint: e, number: uint64(e.Created.UnixNano()), dir: dir}
}

// hasSocket reports whether there is a socket in the folder, an earlier agent's.
func (ep *endpoint) hasSocket() bool {
	_, err := os.Lstat(filepath.Join(ep.dir, folder.Socket))
	return err == nil
}

// listen makes the socket anew, to which programs can connect from then on. The folder stays the
// same if there is one: it is what containers have mounted.
func (ep *endpoint) listen() error {
	ep.closeListener()
	if err := os.MkdirAll(ep.dir, 0o755); err != nil {
		return err
	}
	dir, err := openOwn(ep.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	// Containers' users go through it, whatever this process's umask says. Others do not reach it:
	// the folder above is root's.
	if err := dir.Chmod(0o755); err != nil {
		return err
	}
	path := fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), folder.Socket)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	listener := os.NewFile(uintptr(fd), filepath.Join(ep.dir, folder.Socket))
	if err = unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err == nil {
		if err = os.Chmod(path, 0o666); err == nil {
			err = unix.Listen(fd, unix.SOMAXCONN)
		}
	}
	if err != nil {
		return errors.Join(fmt.Errorf("listen at %s: %w", listener.Name(), err), listener.Close())
	}
	ep.listener = listener
	return nil
}

// openOwn opens a folder that is on the same file system as the one above, this process's own:
// whatever were mounted over it would be somebody else's to change.
func openOwn(path string) (*os.File, error) {
	above, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer above.Close()
	fd, err := unix.Openat2(int(above.Fd()), filepath.Base(path), &unix.OpenHow{
		Flags:   unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// close gives up what the agent has open of it.
func (ep *endpoint) close() {
	ep.closeListener()
	if ep.connections != nil {
		_ = ep.connections.Close()
		ep.connections = nil
	}
}

// closeListener has programs be refused, until the socket is made anew.
func (ep *endpoint) closeListener() {
	if ep.listener != nil {
		_ = ep.listener.Close()
		ep.listener = nil
	}
}
