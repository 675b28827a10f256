package fdkeep

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// lookAfterSocket is how often a keeper looks whether clients can still find its socket.
const lookAfterSocket = time.Second

// listener is where a keeper's clients come in: its socket, and the lock that says that the path is
// its own.
type listener struct {
	socket *net.UnixListener
	lock   *os.File
	file   os.FileInfo // of the socket, as it was made
}

// open locks the path and binds the socket.
func open(socketPath string) (*listener, error) {
	lock, err := lockPath(socketPath)
	if err != nil {
		return nil, err
	}
	d := &listener{lock: lock}
	if d.socket, err = listen(socketPath); err != nil {
		lock.Close()
		return nil, err
	}
	d.socket.SetUnlinkOnClose(false) // by then the path may be another's
	if d.file, err = os.Lstat(socketPath); err != nil {
		d.close()
		return nil, fmt.Errorf("fd keeper socket: %w", err)
	}
	return d, nil
}

func (d *listener) close() {
	d.socket.Close()
	d.lock.Close()
}

// stands reports whether the path still leads to this socket.
func (d *listener) stands(socketPath string) bool {
	now, err := os.Lstat(socketPath)
	return err == nil && os.SameFile(now, d.file)
}

// serveAll answers clients at d until ctx is done or one says stop. When the socket is gone,
// because somebody removed the state directory, it makes directory and socket anew. If another
// keeper has taken the path since, that one gets everything.
func (h *keeper) serveAll(ctx context.Context, socketPath string, d *listener) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	errs := make(chan error, 1)
	serve := func(d *listener) {
		wg.Go(func() {
			defer context.AfterFunc(ctx, d.close)()
			if err := h.serve(ctx, stop, d); err != nil {
				select {
				case errs <- err:
				default:
				}
				stop()
			}
		})
	}
	serve(d)
	tick := time.NewTicker(lookAfterSocket)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			d.close()
			if d.stands(socketPath) {
				_ = os.Remove(socketPath) // the next keeper removes it, too
			}
			select {
			case err := <-errs:
				return err
			default:
				return nil
			}
		case <-tick.C:
		}
		if d.stands(socketPath) {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(socketPath), 0o700); err != nil {
			continue // nobody to tell, and the listeners are worth another try
		}
		switch next, err := open(socketPath); {
		case err == nil:
			d.close()
			d = next
			serve(d)
		case errors.Is(err, errOtherKeeper) && h.giveAll(NewClient(socketPath)) == nil:
			stop()
		}
	}
}

// giveAll keeps everything with another keeper.
func (h *keeper) giveAll(other *Client) error {
	for _, key := range h.keys() {
		meta, fds, err := h.copyOf(key)
		if err != nil {
			return err
		}
		if fds == nil {
			continue // gone since
		}
		err = other.Put(key, meta, fds[0], fds[1])
		closeAll(fds)
		if err != nil {
			return err
		}
	}
	return nil
}

// lockPath makes sure that one keeper at a time serves a path. The lock goes with the process.
func lockPath(socketPath string) (*os.File, error) {
	f, err := os.OpenFile(socketPath+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock fd keeper socket: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("fd keeper socket %s: %w: %w", socketPath, errOtherKeeper, err)
	}
	return f, nil
}

var errOtherKeeper = errors.New("another fd keeper serves it")

// listen binds the socket, readable and writable by its owner only.
func listen(socketPath string) (*net.UnixListener, error) {
	if err := os.Remove(socketPath); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove old fd keeper socket: %w", err)
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		// The mode of the socket before bind becomes the file's, so that it is never wider.
		cerr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, cerr)
	}}
	ln, err := lc.Listen(context.Background(), "unixpacket", socketPath)
	if err != nil {
		return nil, fmt.Errorf("fd keeper socket %s: %w", socketPath, err)
	}
	return ln.(*net.UnixListener), nil
}
