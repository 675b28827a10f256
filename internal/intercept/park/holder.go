package park

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// entry is what the holder keeps under one key.
type entry struct {
	meta     []byte
	fd, page int
}

func (e entry) close() { closeAll([]int{e.fd, e.page}) }

// holder keeps listeners. Its map and the descriptors in it are guarded by mu, which is held across
// system calls that cannot block only (close, dup, epoll_ctl).
type holder struct {
	epoll int

	mu      sync.Mutex
	entries map[string]entry
	byFD    map[int32]string // listener descriptor -> key
}

// RunHolder holds listeners for the clients of socketPath until ctx is done or a client says stop. It
// fails if another holder serves the path already.
func RunHolder(ctx context.Context, socketPath string) error {
	lock, err := lockPath(socketPath)
	if err != nil {
		return err
	}
	defer lock.Close()
	ln, err := listen(socketPath)
	if err != nil {
		return err
	}
	h := &holder{entries: map[string]entry{}, byFD: map[int32]string{}}
	if h.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		ln.Close()
		return fmt.Errorf("epoll: %w", err)
	}
	// An eventfd ends watch: closing an epoll descriptor does not wake who waits on it.
	stopFD, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err == nil {
		err = unix.EpollCtl(h.epoll, unix.EPOLL_CTL_ADD, stopFD, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(stopFD)})
	}
	if err != nil {
		ln.Close()
		closeAll([]int{h.epoll})
		return fmt.Errorf("watch: %w", err)
	}

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() { h.watch(int32(stopFD)) })
	stopAccept := context.AfterFunc(ctx, func() { ln.Close() })
	defer stopAccept()
	err = h.serve(ctx, cancel, ln)
	_, _ = unix.Write(stopFD, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // cannot fail: the counter is 0
	wg.Wait()
	h.closeAll()
	closeAll([]int{h.epoll, stopFD})
	return err
}

// lockPath makes sure that one holder at a time serves a path. The lock goes with the process.
func lockPath(socketPath string) (*os.File, error) {
	f, err := os.OpenFile(socketPath+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock holder socket: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("holder socket %s: another holder serves it: %w", socketPath, err)
	}
	return f, nil
}

// listen binds the socket, readable and writable by its owner only.
func listen(socketPath string) (*net.UnixListener, error) {
	if err := os.Remove(socketPath); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove old holder socket: %w", err)
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		// The mode of the socket before bind becomes the file's, so that it is never wider.
		cerr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, cerr)
	}}
	ln, err := lc.Listen(context.Background(), "unixpacket", socketPath)
	if err != nil {
		return nil, fmt.Errorf("holder socket %s: %w", socketPath, err)
	}
	return ln.(*net.UnixListener), nil
}

// serve answers clients until the listener closes, then waits for those it is answering.
func (h *holder) serve(ctx context.Context, stop context.CancelFunc, ln *net.UnixListener) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := ln.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
				time.Sleep(10 * time.Millisecond) // the client waits; a closing filter frees descriptors
				continue
			}
			return fmt.Errorf("accept on holder socket: %w", err)
		}
		wg.Go(func() {
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(exchangeTimeout)) // fails on a closed connection; so will the next call
			h.answer(c, stop)
		})
	}
}

// answer handles one client's request.
func (h *holder) answer(c *net.UnixConn, stop context.CancelFunc) {
	msg, fds, err := receive(c)
	if errors.Is(err, io.EOF) {
		return // a client that only asks whether anyone is there
	}
	var r request
	if err == nil {
		r, err = parseRequest(msg, len(fds))
	}
	switch {
	case err != nil:
		closeAll(fds)
	case r.Op == opPut:
		err = h.put(r.Key, entry{meta: r.Meta, fd: fds[0], page: fds[1]})
	case r.Op == opDrop:
		h.drop(r.Key)
	case r.Op == opTake:
		err = h.sendAll(c)
	case r.Op == opStop:
		defer stop()
	}
	last := reply{Last: true}
	if err != nil {
		last.Error = err.Error()
	}
	_ = send(c, last) // the client may have hung up: nobody else to tell
}

// put keeps e under key. It owns e's descriptors from here on.
func (h *holder) put(key string, e entry) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, replaces := h.entries[key]; !replaces && len(h.entries) >= MaxParked {
		e.close()
		return fmt.Errorf("%d listeners are parked: that is the limit", MaxParked)
	}
	// No event is asked for: the hang-up is always reported.
	if err := unix.EpollCtl(h.epoll, unix.EPOLL_CTL_ADD, e.fd, &unix.EpollEvent{Fd: int32(e.fd)}); err != nil {
		e.close()
		return fmt.Errorf("watch listener: %w", err)
	}
	h.dropLocked(key)
	h.entries[key], h.byFD[int32(e.fd)] = e, key
	return nil
}

func (h *holder) drop(key string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.dropLocked(key)
}

func (h *holder) dropLocked(key string) {
	e, ok := h.entries[key]
	if !ok {
		return
	}
	delete(h.entries, key)
	delete(h.byFD, int32(e.fd))
	// Closing alone would not do: the agent has the same open file, and epoll goes by that.
	_ = unix.EpollCtl(h.epoll, unix.EPOLL_CTL_DEL, e.fd, nil) // it was added by put
	e.close()
}

func (h *holder) closeAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for key := range h.entries {
		h.dropLocked(key)
	}
}

// sendAll sends every entry with duplicates of its descriptors. It copies one entry at a time under the
// lock and sends without it, so it needs two spare descriptors however much is parked.
func (h *holder) sendAll(c *net.UnixConn) error {
	for _, key := range h.keys() {
		meta, fds, err := h.copyOf(key)
		if err != nil {
			return err
		}
		if fds == nil {
			continue // gone since
		}
		err = send(c, reply{Key: key, Meta: meta}, fds...)
		closeAll(fds)
		if err != nil {
			return err
		}
	}
	return nil
}

func (h *holder) keys() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	keys := make([]string, 0, len(h.entries))
	for key := range h.entries {
		keys = append(keys, key)
	}
	return keys
}

// copyOf duplicates an entry; no descriptors if there is none.
func (h *holder) copyOf(key string) (meta []byte, fds []int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e, ok := h.entries[key]
	if !ok {
		return nil, nil, nil
	}
	fds, err = dup(e.fd, e.page)
	return e.meta, fds, err
}

// watch drops listeners whose filters have no users left, until stopFD becomes readable.
func (h *holder) watch(stopFD int32) {
	events := make([]unix.EpollEvent, 64)
	for {
		n, err := unix.EpollWait(h.epoll, events, -1)
		if err != nil && err != unix.EINTR {
			return // only for a bad descriptor or buffer, and we own both
		}
		for _, ev := range events[:max(n, 0)] {
			if ev.Fd == stopFD {
				return
			}
			h.hungUp(ev.Fd)
		}
	}
}

// hungUp drops the listener behind fd. It asks again under the lock, because fd may have been dropped
// and its number used for another listener since the event.
func (h *holder) hungUp(fd int32) {
	h.mu.Lock()
	defer h.mu.Unlock()
	key, ok := h.byFD[fd]
	if !ok {
		return
	}
	p := []unix.PollFd{{Fd: fd}}
	if n, err := unix.Poll(p, 0); err == nil && n == 1 && p[0].Revents&(unix.POLLHUP|unix.POLLNVAL) != 0 {
		h.dropLocked(key)
	}
}
