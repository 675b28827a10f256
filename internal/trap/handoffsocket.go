package trap

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// handoffKey is the keeper's name for the hand-off socket. keepKey's have other forms.
const handoffKey = "hand-off socket"

// socketFile is the file a hand-off socket is bound to, so that a kept socket can be told from a
// later one at the same path. It is the kept socket's metadata.
type socketFile struct {
	Dev uint64 `json:"dev"`
	Ino uint64 `json:"ino"`
}

func fileOf(path string) (socketFile, error) {
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	return socketFile{st.Dev, st.Ino}, err
}

// openSocket gets the hand-off socket: the one an earlier agent kept, with the hand-offs that have
// come since, or a new one. The lock says that no other agent has it; it goes with the process.
func (s *Server) openSocket() (err error) {
	path := s.cfg.SocketPath
	if s.lock, err = os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		return fmt.Errorf("lock hand-off socket: %w", err)
	}
	defer func() {
		if err != nil {
			s.lock.Close()
		}
	}()
	if err := unix.Flock(int(s.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("hand-off socket %s: another agent serves it; stop that one or choose another path: %w", path, err)
	}
	if s.socket = s.keptSocket(); s.socket == nil {
		if s.socket, err = bind(path); err != nil {
			return err
		}
	}
	// A kept socket's path must outlive this agent.
	s.socket.SetUnlinkOnClose(s.cfg.Keeper == nil)
	return nil
}

// keptSocket gives the socket that the keeper has, or nil if there is none that runtimes can still
// reach.
func (s *Server) keptSocket() (ln *net.UnixListener) {
	if s.cfg.Keeper == nil {
		return nil
	}
	all, err := s.take(handoffKey)
	if err != nil {
		return nil // resume asks again and says so
	}
	for _, p := range all {
		var file socketFile
		if p.Key == handoffKey && json.Unmarshal(p.Meta, &file) == nil {
			if now, err := fileOf(s.cfg.SocketPath); err == nil && now == file {
				f := os.NewFile(uintptr(p.FD), handoffKey)
				if l, err := net.FileListener(f); err == nil {
					ln, _ = l.(*net.UnixListener)
				}
				f.Close() // FileListener has a duplicate
				closeFD(p.Page)
				continue
			}
		}
		closeFD(p.FD)
		closeFD(p.Page)
	}
	return ln
}

// keepSocket gives the keeper a duplicate of the hand-off socket. While no agent runs, runtimes
// then connect, leave their hand-offs in the socket's queue, listeners included, and start their
// containers.
func (s *Server) keepSocket() {
	if err := s.tryKeepSocket(); err != nil {
		s.why.keep.Add()
		s.log.Error("hand-off socket not kept: no container can start while no agent runs", "err", err)
	}
}

func (s *Server) tryKeepSocket() error {
	file, err := fileOf(s.cfg.SocketPath)
	if err != nil {
		return err
	}
	meta, err := json.Marshal(file)
	if err != nil {
		return err
	}
	raw, err := s.socket.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) {
		err = s.cfg.Keeper.Put(handoffKey, meta, int(fd), int(fd)) // it needs no page
	})
	return errors.Join(cerr, err)
}

// bind makes the hand-off socket, for its owner only. A socket a dead agent left is replaced; a
// living agent's is not.
func bind(path string) (*net.UnixListener, error) {
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		c.Close()
		return nil, fmt.Errorf("hand-off socket %s: another agent serves it; stop that one or choose another path", path)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode()&os.ModeSocket != 0 {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("remove old hand-off socket: %w", err)
		}
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		// The mode of the socket before bind becomes the file's, so that it is never wider.
		cerr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, cerr)
	}}
	ln, err := lc.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("hand-off socket %s: %w", path, err)
	}
	return ln.(*net.UnixListener), nil
}
