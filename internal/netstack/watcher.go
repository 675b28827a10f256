package netstack

import (
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// watcher wakes connections when something happens at their pairs. A set of its own, which the
// runtime's contains: the runtime would want a goroutine for each direction of each pair.
type watcher struct {
	file *os.File
	raw  syscall.RawConn

	mu   sync.Mutex
	fds  map[int32]*connection
	epfd int
}

func newWatcher() (*watcher, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil { // or the runtime does not take it
		return nil, err
	}
	w := &watcher{file: os.NewFile(uintptr(fd), "epoll"), fds: map[int32]*connection{}, epfd: fd}
	if w.raw, err = w.file.SyscallConn(); err != nil {
		return nil, err
	}
	return w, nil
}

// add watches a connection's pair.
func (w *watcher) add(fd int, c *connection) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET, Fd: int32(fd)}
	if err := unix.EpollCtl(w.epfd, unix.EPOLL_CTL_ADD, fd, &e); err != nil {
		return err
	}
	w.fds[int32(fd)] = c
	return nil
}

// remove is called before a pair is closed: one that others have, too, stays in the set.
func (w *watcher) remove(fd int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = unix.EpollCtl(w.epfd, unix.EPOLL_CTL_DEL, fd, nil) // it is in the set
	delete(w.fds, int32(fd))
}

// run wakes connections for ever.
func (w *watcher) run() error {
	var events [256]unix.EpollEvent
	return w.raw.Read(func(fd uintptr) bool {
		for {
			n, err := epollWait(int(fd), events[:])
			if err != nil && err != unix.EINTR {
				return true
			}
			if n <= 0 && err == nil {
				return false
			}
			w.mu.Lock()
			for _, e := range events[:max(n, 0)] {
				if c := w.fds[e.Fd]; c != nil {
					c.wake()
				}
			}
			w.mu.Unlock()
		}
	})
}
