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

// maxSocketName is how long a socket's name may be: sockaddr_un's, less its end.
const maxSocketName = 107

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
	// `ss -x` shows for good the name by which a socket was bound: it is made beside the folder,
	// where containers do not come, and moved, which the kernel does within a mount only.
	made := ep.dir + "." + folder.Socket
	if len(made) > maxSocketName {
		made = path
	}
	if err := os.Remove(made); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	listener := os.NewFile(uintptr(fd), filepath.Join(ep.dir, folder.Socket))
	if err = unix.Bind(fd, &unix.SockaddrUnix{Name: made}); err == nil {
		if err = os.Chmod(made, 0o666); err == nil {
			err = unix.Listen(fd, unix.SOMAXCONN)
		}
	}
	if err == nil && made != path {
		err = os.Rename(made, path)
	}
	if err != nil {
		_ = os.Remove(made)
		return errors.Join(fmt.Errorf("listen at %s: %w", listener.Name(), err), listener.Close())
	}
	ep.listener = listener
	return nil
}

// openOwn opens a folder that is of the same mount as the one above, this process's own: whatever
// were mounted over it would be somebody else's to change. Not by openat2, which systemd takes from
// services that may set no set-user-id bits.
func openOwn(path string) (*os.File, error) {
	above, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer above.Close()
	fd, err := unix.Openat(int(above.Fd()), filepath.Base(path), unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	dir := os.NewFile(uintptr(fd), path)
	if err := sameMount(above, dir); err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", path, err), dir.Close())
	}
	return dir, nil
}

// sameMount gives EXDEV for files of two mounts.
func sameMount(a, b *os.File) error {
	var mounts [2]uint64
	for i, f := range []*os.File{a, b} {
		var found unix.Statx_t
		if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &found); err != nil {
			return err
		}
		mounts[i] = found.Mnt_id
	}
	if mounts[0] != mounts[1] {
		return unix.EXDEV
	}
	return nil
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
